"""State of one checkpoint, and what the script held beside it, leaf by leaf; and how two of them differ.

Checkpoints are read file by file, each verified before it is parsed. Two runs of one job lay their files out alike, so pieces of
tensors are compared where they lie and nothing has to be put together.
"""

from __future__ import annotations

import base64
import contextlib
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from keepstep.checkpoint.format.index import BLOB_NAME, RANK_PREFIX, parse_index, parse_rank_values
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, parse_folder_name
from keepstep.checkpoint.format.values import TAG, decode, join
from keepstep.checkpoint.restore.reader import VerifiedFile
from keepstep.checkpoint.restore.verify import check_files, read_manifest
from keepstep.checkpoint.storage.source import Source, open_root
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.codec import from_json
from keepstep.records.errors import VerificationError
from keepstep.records.resumecheck import Observation

Kind = Literal["saved", "not_saved", "variable"]
_FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U64": "Q", "U32": "I"}
_FORMATS |= {"U16": "H", "U8": "B", "BOOL": "B"}
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}
_CODES |= {"int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
_RNG = "rng"


class Key(msgspec.Struct, frozen=True, order=True):
    """A leaf: `name` as in the checkpoint ("model/0.weight"), and whose it is (None: shared by all ranks)."""

    name: str
    rank: int | None = None


class Data(msgspec.Struct, frozen=True):
    """Bytes of a tensor or of a piece of one."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """One value. `order`: place of its entry in the script's state. `value`: text of a plain value, or the pieces of a tensor."""

    kind: Kind
    order: int = 0
    type: str = ""
    value: str | tuple[Data, ...]


State = dict[Key, Leaf]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf that differs, and since which step. `expected`: without interruption; `found`: after the resume.

    `kind`: "saved" is in the checkpoint, "not_saved" is an object of the script that no checkpoint holds, "variable" a plain
    number or text of the script.
    """

    key: str
    rank: int | None
    kind: Kind
    type: str
    is_tensor: bool
    first_step: int
    max_abs_diff: float | None
    expected: str
    found: str


# ---- reading


def checkpoints_by_step(root: Path, cycles: Mapping[int, int] | None = None) -> dict[int, str]:
    """Committed folder for each step. `cycles`: newest step that counts of each cycle but the last (what came after it was
    rolled back).
    """
    source, chosen = open_root(root), dict[int, FolderName]()
    for text in source.folders():
        name = parse_folder_name(text)
        if name is None or source.marker(text) is None:
            continue
        if cycles is not None and name.step > cycles.get(name.cycle, name.step):
            continue
        if name.step not in chosen or chosen[name.step] < name:
            chosen[name.step] = name
    return {step: name.text for step, name in sorted(chosen.items())}


def last_life(root: Path) -> tuple[int, int]:
    """Newest cycle that committed a checkpoint under `root`, and the step it had begun at; (0, 0) when there is none."""
    source = open_root(root)
    names = [name for text in source.folders() if (name := parse_folder_name(text)) is not None]
    names = [name for name in names if source.marker(name.text) is not None]
    if not names:
        return 0, 0
    newest = max(names, key=lambda name: (name.cycle, name.step))
    facts = read_manifest(source, newest.text, trusted_key=None, allow_unsigned=True).facts
    return newest.cycle, 0 if facts is None else facts.restored_step


def read_state(root: Path, folder: str, observed: Path) -> State:
    """All leaves of checkpoint `folder`, and of what the ranks observed at that save. Raises VerificationError, StorageError."""
    source, name = open_root(root), parse_folder_name(folder)
    assert name is not None
    manifest = read_manifest(source, folder, trusted_key=None, allow_unsigned=True)
    check_files(source, folder, manifest)
    files = {file.name: file for file in manifest.files}
    if manifest.facts is None or INDEX_NAME not in files:
        raise VerificationError(f"{folder}: {INDEX_NAME} is not listed in the manifest")
    data_bytes = sum(file.size_bytes for text, file in files.items() if text != INDEX_NAME)
    with _opened(source, folder, files[INDEX_NAME]) as file:
        index = parse_index(file.read(0, file.opened.size_bytes), INDEX_NAME, data_bytes=data_bytes)
    order = {entry: place for place, entry in enumerate(index.values)}
    state: State = {}
    for entry, form in index.values.items():
        _add_values(state, form, entry, None, order[entry])
    pieces: dict[Key, list[Data]] = {}
    for rank, text in enumerate(sorted(set(files) - {INDEX_NAME})):
        with _opened(source, folder, files[text]) as file:
            _read_file(file, rank, state, pieces)
    for key, parts in pieces.items():
        state[key] = Leaf(kind="saved", order=order.get(_entry(key.name), len(order)), value=tuple(parts))
    for path in sorted(observed.glob(f"observed-c{name.cycle:04d}-s{name.step:08d}-*.json")):
        _add_observed(state, from_json(path.read_bytes(), Observation))
    return state


@contextlib.contextmanager
def _opened(source: Source, folder: str, fact: FileFact) -> Iterator[VerifiedFile]:
    opened = source.open(folder, fact.name)
    try:
        yield VerifiedFile.by_fact(opened, fact)
    finally:
        opened.close()


def _read_file(file: VerifiedFile, rank: int, state: State, pieces: dict[Key, list[Data]]) -> None:
    for name, span in file.header().items():
        own = name.startswith(f"{RANK_PREFIX}/")
        if name == BLOB_NAME:
            blob = file.read(span.begin, span.end)
            for entry, form in parse_rank_values(blob, file.name, data_bytes=file.opened.size_bytes).values.items():
                _add_values(state, form, entry, rank, 0)
        elif not name.startswith(f"{RANK_PREFIX}/__"):  # what the format keeps for itself
            key = Key(name.removeprefix(f"{RANK_PREFIX}/") if own else name, rank if own else None)
            data = bytes(file.read(span.begin, span.end))
            pieces.setdefault(key, []).append(Data(span.dtype, span.shape, data))


def _entry(name: str) -> str:
    return name.partition("/")[0]


def _add_values(state: State, form: Any, entry: str, rank: int | None, order: int) -> None:
    """Plain values of one entry. References to tensors are left out: the bytes speak for themselves."""
    value = decode(form, lambda reference: reference, entry)
    for name, leaf in _leaves(value, entry):
        if not (isinstance(leaf, dict) and leaf.get(TAG) in ("tensor", "array")):
            state[Key(name, rank)] = Leaf(kind="saved", order=order, value=repr(leaf))


def _add_observed(state: State, observation: Observation) -> None:
    for name, held in observation.held.items():
        value = decode(held.value, lambda reference: reference, name)
        kind: Kind = "variable" if held.kind == "variable" else "not_saved"
        for path, leaf in _leaves(value, name):
            content: str | tuple[Data, ...] = repr(leaf)
            if isinstance(leaf, dict) and leaf.get(TAG) == "bytes_of":
                dtype = str(leaf["dtype"])
                content = (Data(_CODES.get(dtype, dtype), tuple(leaf["shape"]), base64.b64decode(leaf["v"])),)
            state[Key(path, observation.rank)] = Leaf(kind=kind, type=held.type, value=content)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of nested values. Random state is one leaf a generator: its hundreds of words mean nothing one by one."""
    if isinstance(value, dict) and TAG not in value:
        for key, item in value.items():
            yield from _leaves(item, join(path, key))
    elif isinstance(value, list | tuple) and not path.startswith(f"{_RNG}/") and len(value) <= 64:
        for number, item in enumerate(value):
            yield from _leaves(item, join(path, number))
    else:
        yield path, value


# ---- comparing


def compare_states(expected: State, found: State, step: int) -> list[Difference]:
    """Leaves that differ, bit by bit, the likely cause first (see `cause_rank`)."""
    result = []
    for key in expected.keys() | found.keys():
        one, two = expected.get(key), found.get(key)
        if one is not None and two is not None and one.value == two.value:
            continue
        known = one or two
        assert known is not None
        difference = Difference(
            key=key.name,
            rank=key.rank,
            kind=known.kind,
            type=known.type,
            is_tensor=not isinstance(known.value, str),
            first_step=step,
            max_abs_diff=_max_abs_diff(one, two),
            expected=_text(one),
            found=_text(two),
        )
        result.append((cause_rank(key, known), known.order, key.name, -1 if key.rank is None else key.rank, difference))
    return [difference for *_, difference in sorted(result, key=lambda item: item[:4])]


def cause_rank(key: Key, leaf: Leaf) -> int:
    """Smaller: less likely to be only a consequence of other differences.

    Random state and the place in the data do not follow from weights; what no checkpoint holds is lost on its own; plain
    values (a learning rate, a step count) move before the tensors that they act on.
    """
    if leaf.kind == "saved":
        if _entry(key.name) == _RNG:
            return 0
        if key.rank is not None:
            return 1
        return 3 if isinstance(leaf.value, str) else 5
    if leaf.kind == "not_saved":
        return 2
    return 4 if "." in key.name and "'" not in str(leaf.value) and leaf.type == "int" else 6


def _text(leaf: Leaf | None) -> str:
    if leaf is None:
        return "(not there)"
    if isinstance(leaf.value, str):
        return leaf.value if len(leaf.value) <= 60 else f"{leaf.value[:57]}..."
    numbers = [value for part in leaf.value for value in numbers_of(part)[:2]]
    shape = "x".join(map(str, leaf.value[0].shape)) or "scalar"
    return str(numbers[0]) if shape == "scalar" and numbers else f"{leaf.value[0].dtype}[{shape}]"


def _max_abs_diff(one: Leaf | None, two: Leaf | None) -> float | None:
    """Largest absolute difference of two tensors or numbers; None when they cannot be subtracted, inf beside a NaN."""
    if one is None or two is None:
        return None
    if isinstance(one.value, str) or isinstance(two.value, str):
        try:
            return abs(float(str(one.value)) - float(str(two.value)))
        except ValueError:
            return None
    if [(part.dtype, part.shape) for part in one.value] != [(part.dtype, part.shape) for part in two.value]:
        return None
    largest = 0.0
    for mine, other in zip(one.value, two.value, strict=True):
        if mine.data != other.data and not numbers_of(mine):
            return None
        for a, b in zip(numbers_of(mine), numbers_of(other), strict=True):
            if a != b:
                gap = abs(a - b)
                largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest


def numbers_of(data: Data) -> list[Any]:
    """The numbers a piece of a tensor holds; empty for a type that has no simple ones."""
    if data.dtype == "BF16":  # the upper half of a 32-bit float
        wide = b"".join(b"\0\0" + data.data[at : at + 2] for at in range(0, len(data.data), 2))
        return list(struct.unpack(f"<{len(wide) // 4}f", wide))
    code = _FORMATS.get(data.dtype)
    return [] if code is None else list(struct.unpack(f"<{len(data.data) // struct.calcsize(code)}{code}", data.data))
