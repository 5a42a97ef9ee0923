"""Python values as JSON that gives back exactly the same values: types, key types, float bits and big integers.

Plain JSON stands for None, bool, str, list, float, small int and dict with str keys; everything else is an object whose
only reserved key is "$". Nothing is ever pickled, and what cannot be written exactly is refused with the path that
leads to it.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from keepstep.records.errors import ConfigError, VerificationError

TAG = "$"
MAX_DEPTH = 64
_SMALL_INT = 1 << 53

Leaf = Callable[[Any, str], "dict[str, Any] | None"]
"""Called with a value no rule here knows and its path; returns its JSON form, or None to refuse it."""
Lookup = Callable[[dict[str, Any]], Any]
"""Called with a tagged object no rule here knows; returns the value."""


def join(path: str, part: str | int) -> str:
    """Path of an item. Distinct keys never share one: "~" and "/" are escaped, texts that look like numbers marked."""
    if isinstance(part, int):
        return f"{path}/{part}"
    text = part.replace("~", "~0").replace("/", "~1")
    if text.lstrip("-").isdecimal() or text == "":
        text = f"~2{text}"
    return f"{path}/{text}"


def encode(value: Any, path: str, leaf: Leaf) -> Any:
    """JSON form of `value`, which lies at `path`. Raises ConfigError naming the path of anything that is refused."""
    return _encode(value, path, leaf, 0)


def _encode(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"state {path!r}: nested deeper than {MAX_DEPTH} levels (does it contain itself?)")
    kind = type(value)
    # Exact types only: a subclass would come back as its base.
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_SMALL_INT <= value <= _SMALL_INT else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}
    if kind is str:
        return _encode_str(value)
    if kind is bytes:
        return {TAG: "bytes", "v": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, join(path, at), leaf, depth + 1) for at, item in enumerate(value)]
    if kind is tuple:
        return {TAG: "tuple", "v": [_encode(item, join(path, at), leaf, depth + 1) for at, item in enumerate(value)]}
    if kind in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, leaf, depth)
    form = leaf(value, path)
    if form is None:
        raise ConfigError(
            f"state {path!r}: a {kind.__module__}.{kind.__qualname__} cannot be saved; "
            "allowed are tensors, numpy arrays, numbers, bool, None, str, bytes, list, tuple and dict, "
            "or an object with state_dict() at the top"
        )
    return form


def _encode_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, e.g. from os.fsdecode
        return {TAG: "str", "v": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _encode_dict(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise ConfigError(
                f"state {path!r}: key {key!r} is a {type(key).__qualname__}; only str and int can be keys"
            )
    items = [(key, _encode(item, join(path, key), leaf, depth + 1)) for key, item in value.items()]
    kind = type(value)
    if kind is dict and all(type(key) is str and key != TAG and _encode_str(key) is key for key, _ in items):
        return dict(items)
    pairs = [[_encode(key, path, leaf, depth + 1), item] for key, item in items]
    form = {TAG: {dict: "dict", OrderedDict: "ordered", Counter: "counter"}[kind], "v": pairs}
    # A module's state_dict carries the versions of its parts in an attribute, and load_state_dict looks at them.
    if kind is OrderedDict and isinstance(meta := getattr(value, "_metadata", None), (dict, OrderedDict)):
        form["meta"] = _encode(meta, f"{path}/_metadata", leaf, depth + 1)
    return form


def decode(form: Any, lookup: Lookup, what: str = "saved values") -> Any:
    """The value that `form`, read from `what`, stands for. Raises VerificationError when it is none of ours."""
    try:
        return _decode(form, lookup, 0)
    except VerificationError as error:
        raise VerificationError(f"{what}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error, struct.error) as error:
        raise VerificationError(f"{what}: malformed value: {error!r}") from None


def _decode(form: Any, lookup: Lookup, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise VerificationError("values are nested too deep")
    if isinstance(form, list):
        return [_decode(item, lookup, depth + 1) for item in form]
    if not isinstance(form, dict):
        return form
    tag = form.get(TAG)
    if tag is None:
        return {key: _decode(item, lookup, depth + 1) for key, item in form.items()}
    return _decode_tagged(tag, form, lookup, depth)


def _decode_tagged(tag: Any, form: dict[str, Any], lookup: Lookup, depth: int) -> Any:
    if tag == "int":
        return int(form["v"], 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(form["v"]))[0]
    if tag == "str":
        return base64.b64decode(form["v"], validate=True).decode("utf-8", "surrogatepass")
    if tag == "bytes":
        return base64.b64decode(form["v"], validate=True)
    if tag == "tuple":
        return tuple(_decode(item, lookup, depth + 1) for item in form["v"])
    if tag in ("dict", "ordered", "counter"):
        pairs = [(_decode(key, lookup, depth + 1), _decode(item, lookup, depth + 1)) for key, item in form["v"]]
        if tag == "dict":
            return dict(pairs)
        if tag == "counter":
            return Counter(dict(pairs))
        ordered: OrderedDict[Any, Any] = OrderedDict(pairs)
        if "meta" in form:
            ordered._metadata = _decode(form["meta"], lookup, depth + 1)  # type: ignore[attr-defined]
        return ordered
    return lookup(form)
