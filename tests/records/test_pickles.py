"""Pickles that strangers wrote: read exactly when they hold plain values, refused quickly and cheaply when they mean harm."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from typing import Any

import pytest
from bench._dumps import torch_pickle
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.records.errors import VerificationError
from keepstep.records.pickles import MAX_ODD_KEYS, is_harmless, parse_pickle, parse_plain

NOTHING: frozenset[str] = frozenset()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.text(), st.integers()), inner, max_size=4)
    ),
    max_leaves=30,
)


def read(data: bytes) -> Any:
    return parse_pickle(data, NOTHING, "x")[0]


@settings(max_examples=200, deadline=None)
@given(VALUES, st.sampled_from([3, 4, 5]))
def test_values_come_back_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol=protocol)) == value


def test_a_place_in_a_larger_buffer() -> None:
    one, two = pickle.dumps({"a": 1}, protocol=2), pickle.dumps(["b"], protocol=2)
    first, at = parse_pickle(memoryview(one + two), NOTHING, "x")
    second, end = parse_pickle(one + two, NOTHING, "x", begin=at)
    assert (first, second, end) == ({"a": 1}, ["b"], len(one + two))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil(), protocol=0),
        pickle.dumps(Evil(), protocol=2),
        pickle.dumps(Evil(), protocol=4),
        pickle.dumps({"a": os.system}, protocol=4),
        b"\x80\x02\x82\x01.",  # a name from the extension registry
        b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.",
    ],
)
def test_a_name_is_refused_and_never_looked_up(data: bytes) -> None:
    with pytest.raises(VerificationError, match=r"not allowed|not read here"):
        read(data)


def nested(op: bytes, depth: int) -> bytes:
    return b"\x80\x02K\x01" + op * depth


BOMBS = {
    "a memo index of 2^32": b"\x80\x02]r\xff\xff\xff\xff.",
    "a frame of 2^64": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a text that claims 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "bytes that claim 2^63": b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b"abc.",
    "an integer of 4 GB": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "a key of tuples in tuples": b"\x80\x02}" + nested(b"\x85", 50_000)[2:] + b"Ns.",
    "a key whose hash takes 2^60 steps": b"\x80\x02}K\x01q\x00" + b"h\x00\x86q\x00" * 60 + b"Ns.",
    "a list as a key": b"\x80\x02}]Ns.",
    "marks without an end": b"\x80\x02" + b"(" * 50_000,
    "nothing to pop": b"\x80\x02e.",
    "a mark where a value should be": b"\x80\x02](a.",
    "no end": b"\x80\x02N",
    "no bytes": b"",
    "protocol 9": b"\x80\x09N.",
}
HARMLESS: dict[str, Any] = {"a memo index of 2^32": [], "a frame of 2^64": None}
"""What these two claim is of no use here, and costs nothing."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_nothing(name: str) -> None:
    data = BOMBS[name]
    tracemalloc.start()
    begin = time.process_time()
    try:
        if name in HARMLESS:
            assert read(data) == HARMLESS[name]
        else:
            with pytest.raises(VerificationError, match="x: "):
                read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 5
    assert peak < 64 * len(data) + 200_000


def test_deep_nesting_is_only_data() -> None:
    value = read(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")
    depth = 0
    while value:
        value, depth = value[0], depth + 1
    assert depth == 49_999


def test_keys_that_collide_are_limited() -> None:
    # All of these have the hash of 0.
    keys = b"".join(pickle.dumps(i * (2**61 - 1) << 64, protocol=2)[2:-1] + b"N" for i in range(1, MAX_ODD_KEYS + 2))
    with pytest.raises(VerificationError, match="keys"):
        read(b"\x80\x02}(" + keys + b"u.")


# ---- streams as torch's own pickler writes them, which Python's unpickler reads

PAIRS = st.tuples(st.text(), st.text(max_size=3))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | PAIRS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_both_readers_agree_about_plain_streams(value: Any) -> None:
    data = torch_pickle(value)
    assert parse_plain(data, "x") == read(data) == value


def test_what_torch_writes_is_seen_to_be_harmless() -> None:
    known = ["name", "desc"]
    value = {"a": known, "n": [1, 300, -1, 2**40, None, True, False], "t": [("name", "desc")] * 3, "e": [], "d": {}}
    assert is_harmless(torch_pickle(value))
    assert parse_plain(torch_pickle(value), "x") == value
    assert not is_harmless(pickle.dumps(value, protocol=4))
    assert parse_plain(pickle.dumps(value, protocol=4), "x") == value


TUPLE = b"X\x01\x00\x00\x00aq\x00h\x00h\x00\x86"
PUTS = {
    "a tuple": TUPLE + b"q\x01",
    "a tuple, as an empty group": TUPLE + b"(eq\x01",
    "a tuple, as an empty group of pairs": TUPLE + b"(uq\x01",
    "a tuple, as an empty group in an empty group": TUPLE + b"((eeq\x01",
    "a number": b"K\x01q\x01",
    "a number that looks like one": b"Keq\x01",
    "a large index": b"]r\xff\xff\xff\xff",
    "a tuple of a tuple": TUPLE + b"h\x00\x86",
    "a tuple of a number": b"K\x01K\x02\x86",
    "a name": b"cos\nsystem\n",
    "bytes": b"C\x01a",
}


@pytest.mark.parametrize("name", PUTS)
def test_what_could_make_a_key_of_nested_tuples_is_not_harmless(name: str) -> None:
    assert not is_harmless(b"\x80\x02" + PUTS[name] + b".")


OPCODES = [b"N", b"(", b"]", b"}", b"e", b"u", b"a", b"s", b"\x86", b"\x85", b"t", b"0", b"2"]
OPERANDS = [b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"r\x01\x00\x00\x00", b"j\x01\x00\x00\x00", b"K\x01", b"Ke", b"Mu("]
TOKENS = st.sampled_from([*OPCODES, *OPERANDS, b"X\x01\x00\x00\x00a", b"\x8a\x08aaaaaaaa"])


def parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


@settings(max_examples=1000, deadline=None)
@given(st.lists(TOKENS, max_size=40))
def test_no_harmless_stream_nests_tuples(tokens: list[bytes]) -> None:
    data = b"\x80\x02]" + b"".join(tokens) + b"."
    if not is_harmless(data):
        return
    try:
        waiting, seen = [parse_plain(data, "x")], set()
    except VerificationError:
        return
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            waiting += parts(value)
            assert not isinstance(value, tuple) or not any(isinstance(part, tuple) for part in value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_raises_only_what_is_promised(data: Any) -> None:
    value, protocol = data.draw(PLAIN), data.draw(st.sampled_from([0, 2, 4]))
    stream = bytearray(pickle.dumps(value, protocol=protocol) if protocol else torch_pickle(value))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse_plain(bytes(stream[: data.draw(st.integers(0, len(stream)))]), "x")
    except VerificationError as error:
        assert str(error).startswith("x: ")
