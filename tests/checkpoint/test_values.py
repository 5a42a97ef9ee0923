"""Python values come back exactly as they were, or are refused with the path that leads to them."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format.values import decode, encode, join
from keepstep.records.errors import ConfigError, VerificationError


def _no_leaf(value: Any, path: str) -> None:
    return None


def _no_lookup(form: dict[str, Any]) -> Any:
    raise VerificationError(f"unexpected {form}")


def round_trip(value: Any) -> Any:
    form = encode(value, "state", _no_leaf)
    return decode(msgspec.json.decode(msgspec.json.encode(form)), _no_lookup)


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, all the way down, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k1, k2) and same(v1, v2) for (k1, v1), (k2, v2) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec=None))
    | st.binary(max_size=20)
)
keys = st.text(max_size=5) | st.integers(-(2**70), 2**70)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_every_allowed_value_comes_back_the_same(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.nan,
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        math.inf,
        -0.0,
        5e-324,
        10**5000,
        -(2**63),
        {"$": 1},
        {"$": {"$": "int"}},
        {1: "a", "1": "b"},
        {"a": ()},
        "\udc80",
        {"\udc80": 1},
        Counter({30: 1, 80: 2}),
        random.Random(5).getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hard_values_come_back_the_same(value: Any) -> None:
    assert same(round_trip(value), value)


def test_module_versions_beside_an_ordered_dict_survive() -> None:
    value: Any = OrderedDict(a=1)
    value._metadata = OrderedDict({"": {"version": 1}, "bn": {"version": 2}})
    back = round_trip(value)
    assert back == value
    assert back._metadata == value._metadata


class _Colour(enum.IntEnum):
    RED = 1


_Point = collections.namedtuple("_Point", "x y")


@pytest.mark.parametrize(
    "bad",
    [{1, 2}, object(), print, _Colour.RED, _Point(1, 2), bytearray(b"x"), 1j, collections.deque([1]), range(3)],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_path(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"optim/state/3/why~1not"):
        encode({"state": {3: {"why/not": bad}}}, "optim", _no_leaf)


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2), b"k"])
def test_keys_other_than_str_and_int_are_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="only str and int"):
        encode({key: 1}, "state", _no_leaf)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="contain itself"):
        encode(value, "state", _no_leaf)


@given(st.lists(st.text() | st.integers(), min_size=2, max_size=2, unique_by=lambda key: (type(key), key)))
def test_distinct_keys_have_distinct_paths(pair: list[Any]) -> None:
    assert join("x", pair[0]) != join("x", pair[1])


@pytest.mark.parametrize(
    "form",
    [
        {"$": "int", "v": "zz"},
        {"$": "int"},
        {"$": "float", "v": "00"},
        {"$": "bytes", "v": "*"},
        {"$": "dict", "v": [1]},
        {"$": "dict", "v": [[[], 1]]},
        {"$": "tuple", "v": 5},
        {"$": "pickle", "v": "gASVBQ=="},
        {"$": []},
    ],
    ids=json.dumps,
)
def test_malformed_forms_are_verification_errors(form: Any) -> None:
    with pytest.raises(VerificationError, match=r"^saved values: "):
        decode(form, _no_lookup)


def test_deep_nesting_is_refused_not_a_crash() -> None:
    form: Any = 1
    for _ in range(500):
        form = [form]
    with pytest.raises(VerificationError, match="too deep"):
        decode(form, _no_lookup)
