"""All dumps -> one snapshot. A dump is in memory only while it is read; many are read by several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from keepstep.records.flightrecorder import UNKNOWN, Group, Operation, Part, RankState, Snapshot, Wait
from keepstep.sources.flightrecorder.dump import NEWEST_MINOR, Configured, DumpError, NotADumpError, parse_dump
from keepstep.sources.flightrecorder.files import Source, read_bytes, shown
from keepstep.sources.flightrecorder.summary import DEFAULT_GROUP, Tables, members, rank_of, summarise
from keepstep.sources.sharing import shared_out

POOL_FROM_FILES = 256
POOL_FROM_BYTES = 16 << 20
"""From this many files or bytes on other processes are worth their start, which takes 0.2 s."""
CHUNK_FILES = 64
MAX_NOTES = 50


class Chunk(NamedTuple):
    """What some files hold. Ranks refer to `groups` and `operations` of their chunk. `not_dumps`: files that are something else."""

    ranks: list[RankState]
    groups: list[Configured]
    operations: list[Operation]
    unreadable: list[str]
    not_dumps: list[str]
    notes: list[str]
    files: int


def read_snapshot(
    sources: Sequence[Source],
    *,
    jobs: int = 0,
    expected: frozenset[int] = frozenset(),
    progress: Callable[[int], None] | None = None,
) -> Snapshot:
    """Read dumps with up to `jobs` processes (0: one for each core). `expected`: ranks of the job, where that is known.

    `progress` is called with how many more files were read.

    A dump that cannot be read is named in `unreadable` and the others are read. Raises ConfigError when one is compressed in a way
    that needs an extra, StorageError when a process that reads is killed.
    """
    merge = _Merge()
    for chunk in _chunks(sources, jobs or len(os.sched_getaffinity(0)), merge.tables):
        merge.add(chunk)
        if progress is not None:
            progress(chunk.files)
    return merge.snapshot(expected)


def read_chunk(sources: Sequence[Source], tables: Tables | None = None) -> Chunk:
    """Read some dumps, one after the other. Their groups and operations are added to `tables`, or to new ones."""
    tables = tables or Tables()
    chunk = Chunk([], [], [], [], [], [], len(sources))
    for source in sources:
        try:
            _read_one(source, tables, chunk)
        except NotADumpError as error:
            (chunk.unreadable if source.sure else chunk.not_dumps).append(f"{shown(source.path)}: {error}")
        except DumpError as error:
            chunk.unreadable.append(f"{shown(source.path)}: {error}")
    return chunk._replace(groups=list(tables.groups), operations=list(tables.operations))


def _read_one(source: Source, tables: Tables, chunk: Chunk) -> None:
    data = read_bytes(source.path)
    if not data or data.isspace():
        if source.rank is None:
            raise NotADumpError("empty, and its name tells no rank")
        chunk.ranks.append(RankState(source.rank, source.path, True, False, (), (), (), None))
        return
    dump = parse_dump(data)
    rank = source.rank if source.rank is not None else rank_of(dump)
    if rank is None:
        raise DumpError("neither its name nor its process groups tell the rank; name it like rank7.pkl")
    state, bad = summarise(dump, rank, source.path, tables)
    chunk.ranks.append(state)
    if bad:
        chunk.notes.append(
            f"{shown(source.path)}: {bad} of {len(dump.entries)} operations make no sense and are left out"
        )
    if dump.minor > NEWEST_MINOR:
        chunk.notes.append(
            f"dumps have version 2.{dump.minor}, newer than 2.{NEWEST_MINOR}; fields added since are not read"
        )


def _chunks(sources: Sequence[Source], jobs: int, tables: Tables) -> Iterator[Chunk]:
    """Chunks as they are read, in any order."""
    size = max(1, min(CHUNK_FILES, len(sources) // (jobs * 8)))
    parts = [sources[at : at + size] for at in range(0, len(sources), size)]
    many = len(sources) >= POOL_FROM_FILES or sum(source.size_bytes for source in sources) >= POOL_FROM_BYTES
    if jobs > 1 and len(parts) > 1 and many:
        yield from (chunk for _, chunk in shared_out(read_chunk, parts, jobs))
    else:
        yield from (read_chunk(part, tables) for part in parts)


class _Merge:
    """Puts chunks together: one table of groups and operations, one state a rank."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.ranks: dict[int, RankState] = {}
        self.texts: dict[str, str] = {}
        self.unreadable: list[str] = []
        self.not_dumps: list[str] = []
        self.notes: list[str] = []

    def add(self, chunk: Chunk) -> None:
        groups = [self.tables.group(group) for group in chunk.groups]
        operations = [self.tables.operation(operation) for operation in chunk.operations]
        is_ours = groups == list(range(len(groups))) and operations == list(range(len(operations)))
        self.unreadable += chunk.unreadable
        self.not_dumps += chunk.not_dumps
        self.notes += [note for note in chunk.notes if note not in self.notes][: max(0, MAX_NOTES - len(self.notes))]
        for state in chunk.ranks:
            known = self.ranks.get(state.rank)
            if known is not None:
                self.notes.append(
                    f"rank {state.rank} has two dumps, {shown(known.file)} and {shown(state.file)}; the fuller one is used"
                )
                if len(known.parts) >= len(state.parts):
                    continue
            self.ranks[state.rank] = state if is_ours else self._state(state, groups, operations)

    def _state(self, state: RankState, groups: list[int], operations: list[int]) -> RankState:
        """A state whose numbers are those of the tables here, and whose equal texts are one."""

        def number(operation: int) -> int:
            return operation if operation == UNKNOWN else operations[operation]

        def part(one: Part) -> Part:
            return one._replace(group=groups[one.group], recent=tuple(map(number, one.recent)))

        def wait(one: Wait) -> Wait:
            return one._replace(
                group=groups[one.group],
                operation=number(one.operation),
                transfers=tuple(t._replace(group=groups[t.group]) for t in one.transfers),
                where=self.texts.setdefault(one.where, one.where),
            )

        return state._replace(
            parts=tuple(map(part, state.parts)),
            waits=tuple(map(wait, state.waits)),
            open_transfers=tuple(t._replace(group=groups[t.group]) for t in state.open_transfers),
            last=None if state.last is None else wait(state.last),
        )

    def snapshot(self, expected: frozenset[int]) -> Snapshot:
        if self.not_dumps and not self.ranks:
            self.unreadable += self.not_dumps
        elif self.not_dumps:
            self.notes.append(f"{len(self.not_dumps)} files are no dumps and were left out, e.g. {self.not_dumps[0]}")
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        groups = list(self.tables.groups)
        same = same_groups(groups)
        if any(number != other for number, other in enumerate(same)):
            numbers = list(range(len(self.tables.operations)))
            ranks = [self._state(state, same, numbers) for state in ranks]
        found = [Group(group.name, group.desc, members(group.ranks), bool(group.ranks)) for group in groups]
        for number, who in _users(ranks, {n for n, group in enumerate(found) if not group.ranks}).items():
            everybody = expected.union(state.rank for state in ranks) if found[number].desc == DEFAULT_GROUP else who
            told = found[number].desc == DEFAULT_GROUP
            found[number] = found[number]._replace(ranks=tuple(sorted(everybody)), told=told)
        return Snapshot(found, list(self.tables.operations), ranks, expected, self.unreadable, self.notes)


def same_groups(groups: list[Configured]) -> list[int]:
    """For each group its own number, or that of the one group with its name and known members when its own are not known."""
    known: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        if group.ranks:
            known.setdefault(group.name, []).append(number)
    return [
        known[group.name][0] if not group.ranks and len(known.get(group.name, ())) == 1 else number
        for number, group in enumerate(groups)
    ]


def _users(ranks: list[RankState], groups: set[int]) -> dict[int, set[int]]:
    """Which ranks have used these groups."""
    users: dict[int, set[int]] = {number: set() for number in groups}
    for state in ranks if groups else ():
        for part in state.parts:
            if part.group in groups:
                users[part.group].add(state.rank)
    return users
