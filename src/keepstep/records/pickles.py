"""Reading a pickle as data: the stream is parsed, nothing in it is looked up, imported or called.

Checkpoints and flight-recorder dumps of torch are pickles. Python's unpickler turns names in them into objects of this process
and calls them; this reader has no such step. A name must be one of `allowed`, and what a stream builds from it comes back as a
`Record` that says so. Opcodes and their arguments: CPython's Lib/pickletools.py, protocols 0 to 5; those that torch never
writes are refused.

An unpickler that refuses every name would not do for untrusted files. In CPython 3.11 a memo index of 2^32 in a stream of ten bytes
makes it clear 64 GB of memory, and a key of nested tuples makes it hash until its stack or our patience ends. `parse_plain` still
uses it, eight times as fast, for streams whose every opcode was seen to be harmless first.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from keepstep.records.errors import VerificationError

MAX_LONG_BYTES = 1 << 16
MAX_KEY_PARTS = 100
"""Values within a tuple that is a key, nested ones counted: a tuple's hash is computed again each time."""
MAX_ODD_KEYS = 5000
"""Keys of one stream whose hashes a stranger can choose to be all the same, each key then compared with all others: tuples, and
integers beyond 64 bits (integers hash to themselves modulo 2^61 - 1)."""
PLAIN_KEYS = frozenset({str, bool, type(None), bytes, float})


class Global(NamedTuple):
    """An allowed name of a stream, e.g. `torch.Size`. It stands for itself and is never looked up."""

    name: str


class Persistent(NamedTuple):
    """Something the stream refers to that lies outside of it; `value` is the reference."""

    value: Any


class Record:
    """What a stream builds from the name `kind`: the arguments, the state set afterwards, and items put into it."""

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.items: list[tuple[Any, Any]] = []


def parse_pickle(data: bytes | memoryview, allowed: frozenset[str], what: str, *, begin: int = 0) -> tuple[Any, int]:
    """The value of the pickle at `begin` of `data`, and where it ends.

    Raises VerificationError, with `what` in the message, for a name that is not allowed (it is said), an opcode that is
    not known here, or a stream that makes no sense. Takes time and memory in proportion to `data`, at most some 40 times its size.
    """
    machine = _Machine(data, allowed, begin)
    try:
        return machine.run(), machine.at
    except VerificationError as error:
        raise VerificationError(f"{what}: {error}") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise VerificationError(f"{what}: not a pickle this version can read: {error!r}") from None


def parse_plain(data: bytes, what: str) -> Any:
    """The value of a pickle that holds nothing but texts, numbers, lists, dicts and tuples. Raises as `parse_pickle`."""
    if not is_harmless(data):
        return parse_pickle(data, frozenset(), what)[0]
    try:
        return pickle.loads(data)
    except Exception as error:  # it raises whatever a nonsensical operand leads to
        raise VerificationError(f"{what}: not a pickle this version can read: {error!r}") from None


_HARMLESS = re.compile(
    rb"""
    (?: q. | r..[\0-\3]\0 )?+                  # BINPUT, LONG_BINPUT of the text before; an index is an allocation
    (?:
      (?: h. | j.... )                        # BINGET, LONG_BINGET, or two and TUPLE2. As no tuple is put into the memo,
      (?: (?: h. | j.... ) \x86 )?+           # none of them finds one, and no tuple holds a tuple
    | [N\x88\x89] | K. | M.. | J.... | \x8a\x08.{8} | G.{8}
    | \( (?! [eu] ) | [as]                    # MARK, APPEND, SETITEM. A group that may be empty would let anything be put,
    | (?: \] (?: \(e )?+ | } (?: \(u )?+        # so only lists and dicts just made may be filled with nothing
        | [eu] ) (?: q. | r..[\0-\3]\0 )?+     # EMPTY_LIST, EMPTY_DICT, APPENDS, SETITEMS: a list or a dict may be put
    )*+
    """,
    re.VERBOSE | re.DOTALL,
).match


def is_harmless(data: bytes) -> bool:
    """Whether Python's unpickler can do nothing with this stream but build plain values, in time and memory that follow its size.

    True for what torch's own pickler writes (torch/csrc/jit/serialization/pickler.cpp, protocol 2). False says nothing.
    """
    at, size = 2, len(data)
    if data[:2] != b"\x80\x02":
        return False
    while True:
        run = _HARMLESS(data, at)
        at = run.end() if run is not None else size
        if at >= size:
            return False
        if data[at] == 0x58 and at + 5 <= size:  # BINUNICODE, which torch puts all texts into
            at += 5 + _UINT32(data, at + 1)[0]
        else:
            return data[at] == 0x2E  # STOP


_UINT16 = struct.Struct("<H").unpack_from
_INT32 = struct.Struct("<i").unpack_from
_UINT32 = struct.Struct("<I").unpack_from


class _Machine:
    """Stack, memo and position of one stream. `marks`: heights of the stack at which groups of operands begin."""

    def __init__(self, data: bytes | memoryview, allowed: frozenset[str], begin: int) -> None:
        self.data = data
        self.allowed = allowed
        self.at = begin
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.odd_keys = 0

    def run(self) -> Any:
        """Parse up to STOP. What streams mostly consist of is done here, most frequent first; the rest has a method an opcode."""
        data, stack, marks, memo, rare = self.data, self.stack, self.marks, self.memo, _OPCODES
        push, size = stack.append, len(self.data)
        at = self.at
        while True:
            code = data[at]
            if code == 0x68:  # BINGET
                push(memo[data[at + 1]])
                at += 2
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                at += 1
            elif code == 0x4D:  # BININT2
                push(_UINT16(data, at + 1)[0])
                at += 3
            elif code == 0x5D:  # EMPTY_LIST
                push([])
                at += 1
            elif code == 0x4B:  # BININT1
                push(data[at + 1])
                at += 2
            elif code == 0x71:  # BINPUT
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                at += 1
            elif code == 0x4A:  # BININT
                push(_INT32(data, at + 1)[0])
                at += 5
            elif code == 0x6A:  # LONG_BINGET
                push(memo[_UINT32(data, at + 1)[0]])
                at += 5
            elif code == 0x58:  # BINUNICODE
                begin = at + 5
                at = begin + _UINT32(data, at + 1)[0]
                if at > size:
                    raise ValueError(f"a text that would end at {at}")
                push(str(data[begin:at], "utf-8", "surrogatepass"))
            elif code == 0x4E:  # NONE
                push(None)
                at += 1
            elif code == 0x2E:  # STOP
                self.at = at + 1
                if len(stack) != 1 or marks:
                    raise ValueError(f"{len(stack)} values are left")
                return stack.pop()
            else:
                step = rare[code]
                if step is None:
                    raise VerificationError(f"pickle opcode 0x{code:02x} is not read here")
                self.at = at + 1
                step(self)
                at = self.at

    # ---- operands

    def take(self, count: int) -> bytes | memoryview:
        at, end = self.at, self.at + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"{count} bytes at {at} are not there")
        self.at = end
        return self.data[at:end]

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        begin = self.at
        end = begin
        while self.data[end] != 0x0A:
            end += 1
        self.at = end + 1
        return bytes(self.data[begin:end]).decode()

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise ValueError("a mark where a value should be")
        return self.stack.pop()

    def group(self) -> list[Any]:
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    # ---- opcodes

    def proto(self) -> None:
        version = self.data[self.at]
        self.at += 1
        if version > 5:
            raise ValueError(f"protocol {version}")

    def frame(self) -> None:
        self.at += 8

    def tuple_from_mark(self) -> None:
        self.stack.append(tuple(self.group()))

    def appends(self) -> None:
        values = self.group()
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items for what is no list")
        target.extend(values)

    def append(self) -> None:
        value = self.pop()
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("an item for what is no list")
        target.append(value)

    def set_items(self) -> None:
        values = self.group()
        self.into(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.into([key, value])

    def into(self, values: list[Any]) -> None:
        target, keys = self.stack[-1], values[::2]
        if len(values) % 2:
            raise ValueError("a key without a value")
        if type(target) is dict:
            if not {*map(type, keys)} <= PLAIN_KEYS:
                self.odd_keys += sum(map(is_odd_key, keys))
                if self.odd_keys > MAX_ODD_KEYS:
                    raise ValueError(f"more than {MAX_ODD_KEYS} keys that are tuples or large integers")
            target.update(zip(keys, values[1::2], strict=True))
        elif type(target) is Record:
            target.items.extend(zip(keys, values[1::2], strict=True))
        else:
            raise ValueError("items for what is no dict")

    def global_line(self) -> None:
        module = self.line()
        self._global(f"{module}.{self.line()}")

    def global_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is no text")
        self._global(f"{module}.{name}")

    def _global(self, name: str) -> None:
        if name not in self.allowed:
            raise VerificationError(f"refers to {name}, which is not allowed here; nothing was loaded")
        self.stack.append(Global(name))

    def make(self) -> None:
        args, kind = self.pop(), self.pop()
        if type(kind) is not Global or type(args) is not tuple:
            raise ValueError("a call of what is no name")
        self.stack.append(Record(kind.name, args))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if type(target) is not Record or target.state is not None:
            raise ValueError("a state for what cannot have one")
        target.state = state

    def persistent(self) -> None:
        self.stack.append(Persistent(self.pop()))

    def long(self, count: int) -> None:
        if count > MAX_LONG_BYTES:
            raise ValueError(f"an integer of {count} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))


def is_odd_key(key: Any) -> bool:
    """Whether `key` is one of those that are counted. Raises ValueError for one that is not taken at all, whatever their number."""
    if type(key) is int:
        return key.bit_length() > 64
    parts, waiting = 0, [key]
    while waiting:
        part = waiting.pop()
        parts += 1
        if type(part) is tuple and parts + len(part) <= MAX_KEY_PARTS:
            waiting.extend(part)
        elif type(part) not in PLAIN_KEYS | {int, Global, Record}:
            raise ValueError(f"a {type(part).__name__} that is not taken as a key")
    return type(key) is tuple


def _text(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        count = machine.unsigned(width)
        machine.stack.append(str(machine.take(count), "utf-8", "surrogatepass"))

    return step


def _bytes(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        count = machine.unsigned(width)
        machine.stack.append(bytes(machine.take(count)))

    return step


def _long(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.long(machine.unsigned(width))

    return step


def _put(machine: _Machine) -> None:
    machine.memo[machine.unsigned(4)] = machine.stack[-1]


def _constant(value: Any) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value)

    return step


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return step


def _float_64(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _opcodes() -> list[Callable[[_Machine], None] | None]:
    """Those that `_Machine.run` does not do itself."""
    table: list[Callable[[_Machine], None] | None] = [None] * 256
    known: dict[bytes, Callable[[_Machine], None]] = {
        b"\x80": _Machine.proto,
        b"\x95": _Machine.frame,
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"G": _float_64,
        b"\x8c": _text(1),
        b"\x8d": _text(8),
        b"B": _bytes(4),
        b"C": _bytes(1),
        b"\x8e": _bytes(8),
        b")": _constant(()),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": _Machine.tuple_from_mark,
        b"}": lambda machine: machine.stack.append({}),
        b"a": _Machine.append,
        b"e": _Machine.appends,
        b"s": _Machine.set_item,
        b"u": _Machine.set_items,
        b"c": _Machine.global_line,
        b"\x93": _Machine.global_stack,
        b"R": _Machine.make,
        b"\x81": _Machine.make,  # NEWOBJ: the class is not looked up, so it is the same as a call
        b"b": _Machine.build,
        b"Q": _Machine.persistent,
        b"r": _put,
    }
    for code, step in known.items():
        table[code[0]] = step
    return table


_OPCODES = _opcodes()
