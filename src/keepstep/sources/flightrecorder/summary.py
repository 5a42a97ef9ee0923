"""One dump -> what a comparison between ranks needs of it (`keepstep.records.flightrecorder.RankState`)."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from keepstep.records.flightrecorder import UNKNOWN, Operation, Part, RankState, Transfer, Wait
from keepstep.sources.flightrecorder.dump import MAX_NAME, Configured, Dump, Status, text

RECENT = 8
"""Operations of a group with an open one that are kept, half of them from before it."""
MAX_WAITS = 12
MAX_TRANSFERS = 256
MAX_RANKS = 1 << 20
MAX_TENSORS = 4096
MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48
MAX_FRAMES = 64
MAX_SEQUENCE = 1 << 62
DEFAULT_GROUP = "default_pg"
"""Description of the group of all ranks."""

_TRANSFER = re.compile(r"(?:\w+:)?(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})\Z")
_NOT_THE_USERS = re.compile(r"(?:^|/)torch/|<frozen |<string>")
_INPUTS = re.compile(r"all_?reduce|_?reduce")
_OUTPUTS = re.compile(r"_?all_?gather|broadcast")
"""Operations whose inputs, or outputs, have together the same size on all ranks."""
_INT = frozenset({int})
_UNLIKE = re.compile(r"coalesced|_oop")
"""Several operations in one, or a part of one: sizes differ between ranks."""


class Tables:
    """Groups and operations, numbered as they were first seen."""

    def __init__(self) -> None:
        self.groups: dict[Configured, int] = {}
        self.operations: dict[Operation, int] = {}

    def group(self, group: Configured) -> int:
        """Number of a group. Those with one name and different ranks are different groups."""
        return self.groups.setdefault(group, len(self.groups))

    def operation(self, operation: Operation) -> int:
        """Number of an operation."""
        return self.operations.setdefault(operation, len(self.operations))


class _Track:
    """What the entries of one group say. `at` are indexes of entries, `sequences` theirs; transfers by their own sequence.

    `before`: how many collectives were enqueued before the newest transfer.
    """

    __slots__ = ("at", "before", "completed", "group", "sequences", "status", "transfers")

    def __init__(self, group: Configured, status: Status | None) -> None:
        self.group = group
        self.status = status
        self.sequences: list[int] = []
        self.at: list[int] = []
        self.completed = UNKNOWN
        self.before = 0
        self.transfers: dict[int, list[int]] = {}


def summarise(dump: Dump, rank: int, file: str, tables: Tables) -> tuple[RankState, int]:
    """The summary of a rank's dump, and how many of its entries made no sense and were left out."""
    tracks, bad = _tracks(dump)
    parts: list[Part] = []
    waits: list[tuple[int, Wait]] = []
    pending: set[Transfer] = set()
    for track in tracks.values():
        ranks = track.group.ranks
        if ranks and "," not in ranks:
            continue  # a group of one waits for nobody
        number = tables.group(track.group)
        part, opened = _part(track, number, dump.entries, tables)
        parts.append(part)
        waits += opened
        for index, wait in _open_transfers(track, number, dump.entries, tables):
            waits.append((index, wait))
            pending.update(wait.transfers)
    state = RankState(
        rank=rank,
        file=file,
        empty=not dump.entries,
        timed=_is_timed(dump),
        parts=tuple(parts),
        waits=_first_of_streams(waits),
        open_transfers=tuple(sorted(pending)[:MAX_TRANSFERS]),
        last=_last(dump, tracks, tables),
    )
    return state, bad


def rank_of(dump: Dump) -> int | None:
    """The rank that wrote the dump, where its groups leave only one: the rank that all of them have in common."""
    common: set[int] | None = None
    for group in dump.groups.values():
        ranks = members(group.ranks)
        if ranks:
            common = set(ranks) if common is None else common.intersection(ranks)
    return common.pop() if common is not None and len(common) == 1 else None


@functools.lru_cache(maxsize=64)
def members(ranks: str) -> tuple[int, ...]:
    """Global ranks of a group from their text "[0, 1, 2]"; () when it is something else."""
    found = re.findall(r"\d{1,9}", ranks)
    return tuple(map(int, found)) if len(found) <= MAX_RANKS else ()


# ---- entries by group


def _tracks(dump: Dump) -> tuple[dict[int, _Track], int]:
    """Entries by the number of their group on this rank; groups without entries too, where their name can be told."""
    tracks: dict[int, _Track] = {}
    bad = 0
    for index, entry in enumerate(dump.entries):
        if type(entry) is not dict:
            bad += 1
            continue
        number, sequence, name = entry.get("pg_id"), entry.get("collective_seq_id"), entry.get("profiling_name")
        if type(number) is not int or type(sequence) is not int or type(name) is not str:
            bad += 1
            continue
        if not (0 <= sequence < MAX_SEQUENCE and 0 <= number < MAX_SEQUENCE):
            bad += 1
            continue
        track = tracks.get(number)
        if track is None:
            track = tracks[number] = _Track(_group_of(entry, dump), dump.status.get(number))
        transfer = entry.get("p2p_seq_id")
        if type(transfer) is not int or not 0 <= transfer < MAX_SEQUENCE:
            bad += 1
            continue
        if entry.get("is_p2p") is True or _ends_batch(name, transfer, track):
            track.transfers.setdefault(transfer, []).append(index)
            track.before = max(track.before, sequence)
            continue
        track.sequences.append(sequence)
        track.at.append(index)
        if sequence > track.completed and (entry.get("state") == "completed" or _is_over(entry, name, track)):
            track.completed = sequence
    for number, group in _names_by_order(dump, tracks).items():
        tracks[number] = _Track(group, dump.status[number])
    return tracks, bad


def _group_of(entry: dict[Any, Any], dump: Dump) -> Configured:
    names: Any = entry.get("process_group")
    name = desc = ""
    if type(names) in (tuple, list) and len(names) == 2:
        name, desc = text(names[0]), text(names[1])
    return dump.groups.get(name) or Configured(name or f"pg_id {entry['pg_id']}", desc, "")


def _ends_batch(name: str, transfer: int, track: _Track) -> bool:
    """Whether an entry that is not marked as transfer closes a batch of transfers: torch gives it the sequence of the batch."""
    return "coalesced" in name and transfer in track.transfers


def _is_over(entry: dict[Any, Any], name: str, track: _Track) -> bool:
    """Backends without events, as gloo, never set a state: there an operation that is retired has ended."""
    return track.status is None and entry.get("retired") is True and not name.startswith("nccl:")


def _names_by_order(dump: Dump, tracks: dict[int, _Track]) -> dict[int, Configured]:
    """Groups of which no entry tells the name: both torch's names and a rank's own numbers count up as groups are made.

    Between two groups whose name and number are known, as many names as numbers are one to one; else nothing is known of them.
    """
    if dump.status.keys() <= tracks.keys():
        return {}
    names = sorted((name for name in dump.groups if name.isdecimal() and len(name) < 10), key=int)
    if len(names) < len(dump.groups):
        return {}
    known = sorted(
        (number, int(track.group.name)) for number, track in tracks.items() if track.group.name in dump.groups
    )
    if known != sorted(known, key=lambda pair: pair[1]):
        return {}
    found: dict[int, Configured] = {}
    low_number, low_name = -1, -1
    for high_number, high_name in [*known, (MAX_SEQUENCE, MAX_SEQUENCE)]:
        numbers = sorted(n for n in dump.status if low_number < n < high_number)
        between = [name for name in names if low_name < int(name) < high_name]
        if len(numbers) == len(between):
            found.update(zip(numbers, (dump.groups[name] for name in between), strict=True))
        low_number, low_name = high_number, high_name
    return found


# ---- collectives


def _part(track: _Track, group: int, entries: list[Any], tables: Tables) -> tuple[Part, list[tuple[int, Wait]]]:
    """How far the rank is in the collectives of a group, and the first open one, with the index of its entry."""
    completed, enqueued = track.completed, max(track.sequences, default=UNKNOWN)
    by_status = track.status is not None and not track.transfers
    if track.status is not None and by_status:
        completed, enqueued = max(completed, track.status.completed), max(enqueued, track.status.enqueued)
    enqueued = max(enqueued, completed, track.before or UNKNOWN)
    opened = {s: i for s, i in _newest_first(track) if s > completed}
    first_open = min(opened, default=completed + 1 if enqueued > completed else UNKNOWN)
    since = first_open - RECENT // 2
    recent = () if first_open == UNKNOWN else _recent(track, since, entries, tables)
    part = Part(group, first_open, enqueued, completed, by_status, bool(track.transfers), since, recent)
    if first_open == UNKNOWN:
        return part, []
    index = opened.get(first_open, len(entries))
    entry = entries[index] if first_open in opened else {}
    operation = recent[first_open - since] if first_open - since < len(recent) else UNKNOWN
    return part, [(index, Wait(group, first_open, operation, (), _is_started(entry), where(entry)))]


def _recent(track: _Track, since: int, entries: list[Any], tables: Tables) -> tuple[int, ...]:
    """Operations (numbers) of RECENT sequence numbers, less those at the end that were not issued."""
    by_sequence: dict[int, list[int]] = {}
    for sequence, index in _newest_first(track):
        if since <= sequence < since + RECENT:
            by_sequence.setdefault(sequence, []).append(index)
        elif sequence < since:
            break
    return tuple(
        _operation([entries[i] for i in by_sequence[s]], tables) if s in by_sequence else UNKNOWN
        for s in range(since, max(by_sequence, default=since - 1) + 1)
    )


def _newest_first(track: _Track) -> Iterator[tuple[int, int]]:
    return zip(reversed(track.sequences), reversed(track.at), strict=True)


def _operation(entries: list[dict[Any, Any]], tables: Tables) -> int:
    """What a collective is (its number); several entries with one sequence were issued as one (see pytorch issue 139280)."""
    if len(entries) != 1:
        return tables.operation(Operation(""))
    name, sizes_key, dtypes_key = _alike(entries[0]["profiling_name"][:MAX_NAME])
    if sizes_key is None:
        return tables.operation(Operation(name))
    sizes, dtypes = entries[0].get(sizes_key), entries[0].get(dtypes_key)
    dtype = dtypes[0] if type(dtypes) is list and dtypes and type(dtypes[0]) is str else ""
    return tables.operation(Operation(name, _elements(sizes), text(dtype) or None))


@functools.lru_cache(maxsize=512)
def _alike(profiling_name: str) -> tuple[str, str | None, str | None]:
    """Name of an operation without its backend, and the fields that are alike on all ranks; None where there are none."""
    backend, _, name = text(profiling_name).partition(":")
    name = name or backend
    if not _UNLIKE.search(name):
        for pattern, side in ((_INPUTS, "input"), (_OUTPUTS, "output")):
            if pattern.match(name):
                return name, f"{side}_sizes", f"{side}_dtypes"
    return name, None, None


def _elements(sizes: Any) -> int | None:
    """Elements of all tensors together, from the list of their shapes; None for what is no list of shapes."""
    if type(sizes) is not list or len(sizes) > MAX_TENSORS:
        return None
    total = 0
    for shape in sizes:
        if type(shape) not in (list, tuple) or len(shape) > MAX_DIMENSIONS or not {*map(type, shape)} <= _INT:
            return None
        if shape and not 0 <= min(shape) <= max(shape) < MAX_SIZE:
            return None
        total += math.prod(shape)
    return total if 0 <= total < MAX_SEQUENCE else None


def _is_started(entry: dict[Any, Any]) -> bool:
    return entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns"))


def _is_timed(dump: Dump) -> bool:
    if any(status.started >= 0 for status in dump.status.values()):
        return True
    # With a summary that tells of no start there are none.
    return not dump.status and any(type(entry) is dict and _is_started(entry) for entry in dump.entries[-64:])


# ---- transfers


def _open_transfers(track: _Track, group: int, entries: list[Any], tables: Tables) -> Iterator[tuple[int, Wait]]:
    """Batches of sends and receives that are not complete. Of a batch torch marks only the entry that closes it."""
    if not track.group.ranks and track.group.desc != DEFAULT_GROUP:
        return  # their other ends are numbered within the group, and nothing tells which ranks these are
    newest = max(track.transfers, default=UNKNOWN)
    for sequence, at in track.transfers.items():
        batch = [entries[i] for i in at]
        if any(entry.get("state") == "completed" for entry in batch):
            continue
        if _is_over_by_status(track, sequence, newest, batch):
            continue
        transfers = tuple(sorted({t for entry in batch if (t := _transfer(entry, group, track.group)) is not None}))
        if transfers:
            names = {"send" if t.sends else "recv" for t in transfers}
            operation = tables.operation(Operation("/".join(sorted(names))))
            started = any(map(_is_started, batch))
            yield at[0], Wait(group, sequence, operation, transfers[:MAX_TRANSFERS], started, where(batch[0]))


def _is_over_by_status(track: _Track, sequence: int, newest: int, batch: list[dict[Any, Any]]) -> bool:
    """Whether the recorder's summary tells that a batch is over whose closing entry is missing, as in dumps of what is active."""
    if len(batch) == 1 or track.status is None or any("coalesced" in entry["profiling_name"] for entry in batch):
        return False
    # The summary is about transfers only if the newest of them is the newest operation.
    return track.status.enqueued == newest and track.status.completed >= sequence


def _transfer(entry: dict[Any, Any], group: int, configured: Configured) -> Transfer | None:
    """The other end of a send or receive. Its name holds ranks within the group: "nccl:send 0->3"."""
    match = _TRANSFER.match(entry["profiling_name"])
    if match is None:
        return None
    peer, ranks = int(match[3]), members(configured.ranks)
    return Transfer(group, ranks[peer] if peer < len(ranks) else peer, match[1] == "send")


def _first_of_streams(waits: list[tuple[int, Wait]]) -> tuple[Wait, ...]:
    """In the order of issue, of each stream the first: a group's collectives are one, transfers with the same peers another."""
    found: dict[Any, Wait] = {}
    for _, wait in sorted(waits, key=lambda item: item[0]):
        found.setdefault((wait.group, wait.transfers), wait)
    return tuple(found.values())[:MAX_WAITS]


# ---- where and what


def where(entry: dict[Any, Any]) -> str:
    """The innermost line outside of torch that issued an operation: "train.py:12 in step"; "" without a stack."""
    frames = entry.get("frames")
    for frame in frames[:MAX_FRAMES] if type(frames) is list else ():
        if type(frame) is dict:
            file, line, name = text(frame.get("filename")), frame.get("line"), text(frame.get("name"))
            if file and type(line) is int and 0 <= line < 1 << 31 and not _NOT_THE_USERS.search(file):
                return f"{file}:{line}" + (f" in {name}" if name else "")
    return ""


def _last(dump: Dump, tracks: dict[int, _Track], tables: Tables) -> Wait | None:
    """The newest operation of a dump, whatever its state."""
    for entry in reversed(dump.entries):
        number: Any = entry.get("pg_id") if type(entry) is dict else None
        track = tracks.get(number) if type(number) is int else None
        if track is None or type(entry.get("profiling_name")) is not str:
            continue
        sequence = entry.get("p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id")
        if type(sequence) is int and 0 <= sequence < MAX_SEQUENCE:
            operation = _operation([entry], tables)
            return Wait(tables.group(track.group), sequence, operation, (), _is_started(entry), where(entry))
    return None
