"""Reading a pickle as data: the stream is parsed, nothing in it is looked up, imported or called.

Files of torch's own checkpoints are pickles. Python's unpickler turns names in them into objects of this process and calls
them; this reader has no such step. A name must be one of `allowed`, and what a stream builds from it comes back as a
`Record` that says so. Opcodes and their arguments: CPython's Lib/pickletools.py, protocols 0 to 5; those that torch never
writes are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from keepstep.records.errors import VerificationError

MAX_LONG_BYTES = 1 << 16


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


class _Mark:
    """Where a group of operands begins on the stack."""


_MARK = _Mark()


def parse_pickle(data: memoryview, allowed: frozenset[str], what: str, *, begin: int = 0) -> tuple[Any, int]:
    """The value of the pickle at `begin` of `data`, and where it ends.

    Raises VerificationError, with `what` in the message, for a name that is not allowed (it is said), an opcode that is
    not known here, or a stream that makes no sense.
    """
    machine = _Machine(data, allowed, begin)
    try:
        return machine.run(), machine.at
    except VerificationError as error:
        raise VerificationError(f"{what}: {error}") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise VerificationError(f"{what}: not a pickle this version can read: {error!r}") from None


class _Machine:
    """Stack, memo and position of one stream. One method an opcode, found by `_OPCODES`."""

    def __init__(self, data: memoryview, allowed: frozenset[str], begin: int) -> None:
        self.data = data
        self.allowed = allowed
        self.at = begin
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1:
                    raise ValueError(f"{len(self.stack)} values are left")
                return self.stack.pop()
            step = opcodes[code]
            if step is None:
                raise VerificationError(f"pickle opcode 0x{code:02x} is not read here")
            step(self)

    # ---- operands

    def take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError(f"{count} bytes at {self.at} are not there")
        part = self.data[self.at : self.at + count]
        self.at += count
        return part

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
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def group(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    # ---- opcodes

    def mark(self) -> None:
        self.stack.append(_MARK)

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
        if len(values) % 2:
            raise ValueError("a key without a value")
        target = self.stack[-1]
        if type(target) is dict:
            target.update(zip(values[::2], values[1::2], strict=True))
        elif type(target) is Record:
            target.items.extend(zip(values[::2], values[1::2], strict=True))
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

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a mark cannot be remembered")
        return value

    def long(self, count: int) -> None:
        if count > MAX_LONG_BYTES:
            raise ValueError(f"an integer of {count} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))


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


def _unsigned(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.unsigned(width))

    return step


def _get(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(machine.memo[machine.unsigned(width)])

    return step


def _put(width: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.memo[machine.unsigned(width)] = machine.top()

    return step


def _constant(value: Any) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value)

    return step


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(reversed(values)))

    return step


def _signed_32(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _float_64(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _opcodes() -> list[Callable[[_Machine], None] | None]:
    table: list[Callable[[_Machine], None] | None] = [None] * 256
    known: dict[bytes, Callable[[_Machine], None]] = {
        b"\x80": _Machine.proto,
        b"\x95": _Machine.frame,
        b"(": _Machine.mark,
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"K": _unsigned(1),
        b"M": _unsigned(2),
        b"J": _signed_32,
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"G": _float_64,
        b"X": _text(4),
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
        b"]": lambda machine: machine.stack.append([]),
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
        b"h": _get(1),
        b"j": _get(4),
        b"q": _put(1),
        b"r": _put(4),
        b"\x94": _Machine.memoize,
    }
    for code, step in known.items():
        table[code[0]] = step
    return table


_OPCODES = _opcodes()
