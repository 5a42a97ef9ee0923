"""Training jobs that hang, played step by step, and the flight-recorder dumps that torch would write of them."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench._dumps import torch_pickle

from keepstep.attribution.hang import find_culprits
from keepstep.records.hang import Hang
from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot


class Op(NamedTuple):
    """What a rank calls. `peer` is set for sends and receives."""

    group: str
    name: str
    elements: int = 64
    peer: int | None = None


class Groups(NamedTuple):
    """Process groups by name: description and ranks."""

    desc: dict[str, str]
    ranks: dict[str, tuple[int, ...]]


class Rank(NamedTuple):
    """How far a rank came: operations issued, and how many of them, from the first on, it knows to be complete."""

    issued: int
    completed: int


def megatron(tp: int, pp: int, dp: int) -> tuple[Groups, dict[int, list[Op]]]:
    """Groups of a job with tensor, pipeline and data parallelism, and what each rank calls in two steps."""
    size = tp * pp * dp
    groups = Groups({"0": "default_pg"}, {"0": tuple(range(size))})

    def rank_at(t: int, d: int, p: int) -> int:
        return (p * dp + d) * tp + t

    def add(desc: str, ranks: tuple[int, ...]) -> None:
        name = str(len(groups.ranks))
        groups.desc[name], groups.ranks[name] = desc, ranks
        for rank in ranks:
            own[rank][desc] = name

    own: dict[int, dict[str, str]] = {rank: {} for rank in range(size)}
    for p in range(pp):
        for d in range(dp):
            add("TP", tuple(rank_at(t, d, p) for t in range(tp)))
        for t in range(tp):
            add("DP", tuple(rank_at(t, d, p) for d in range(dp)))
    for d in range(dp):
        for t in range(tp):
            add("PP", tuple(rank_at(t, d, p) for p in range(pp)))
    programs = {}
    for rank in range(size):
        mine = own[rank]
        stage = groups.ranks[mine["PP"]].index(rank)
        pipeline = groups.ranks[mine["PP"]]
        step = []
        for _ in range(2):
            step += [Op(mine["PP"], "recv", 8, pipeline[stage - 1])] if stage else []
            step += [Op(mine["TP"], "_all_gather_base", 128), Op(mine["TP"], "_reduce_scatter_base", 256)]
            step += [Op(mine["PP"], "send", 8, pipeline[stage + 1])] if stage < pp - 1 else []
        step += [Op(mine["DP"], "all_reduce", 1024), Op("0", "all_reduce", 1)]
        programs[rank] = [op for op in step * 2 if op.peer is not None or len(groups.ranks[op.group]) > 1]
    return groups, programs


def play(
    groups: Groups,
    programs: Mapping[int, Sequence[Op]],
    *,
    stop: Mapping[int, int] | None = None,
    stuck: Mapping[int, int] | None = None,
    ahead: int = 4,
) -> dict[int, Rank]:
    """Run until nothing moves. A rank issues up to `ahead` operations before their time and completes them in order.

    `stop`: rank -> operation that its host never issues. `stuck`: rank -> operation that it never knows to be complete, though its
    peers complete it.
    """
    stop, stuck = stop or {}, stuck or {}
    issued, ran = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
    known = dict(issued)
    calls = {rank: numbered(program) for rank, program in programs.items()}
    moved = True
    while moved:
        moved = False
        for rank, program in programs.items():
            limit = min(len(program), known[rank] + ahead, stop.get(rank, len(program)))
            if issued[rank] < limit:
                issued[rank], moved = limit, True
        for rank, program in programs.items():
            if ran[rank] < issued[rank] and _all_there(groups, programs, calls, ran, issued, rank):
                others = _partners(groups, program[ran[rank]], rank)
                for other in others:
                    ran[other] += 1
                    known[other] = min(ran[other], stuck.get(other, ran[other]))
                moved = True
    return {rank: Rank(issued[rank], known[rank]) for rank in programs}


def numbered(program: Sequence[Op]) -> list[int]:
    """The sequence number of each operation: collectives of a group, and transfers of a group, count from 1."""
    count: dict[tuple[str, bool], int] = defaultdict(int)
    numbers = []
    for op in program:
        count[op.group, op.peer is None] += 1
        numbers.append(count[op.group, op.peer is None])
    return numbers


def waited_for(groups: Groups, programs: Mapping[int, Sequence[Op]], came: Mapping[int, Rank]) -> set[int]:
    """Partners of the operations that ranks have issued first and not completed."""
    heads = {rank: programs[rank][at.completed] for rank, at in came.items() if at.completed < at.issued}
    return {other for rank, op in heads.items() for other in _partners(groups, op, rank) if other != rank}


def _partners(groups: Groups, op: Op, rank: int) -> tuple[int, ...]:
    return groups.ranks[op.group] if op.peer is None else (rank, op.peer)


def _all_there(
    groups: Groups,
    programs: Mapping[int, Sequence[Op]],
    calls: Mapping[int, Sequence[int]],
    ran: Mapping[int, int],
    issued: Mapping[int, int],
    rank: int,
) -> bool:
    """Whether all partners of a rank's current operation are at it, and call the same."""
    mine = programs[rank][ran[rank]]
    for other in _partners(groups, mine, rank):
        if ran[other] >= issued[other]:
            return False
        theirs = programs[other][ran[other]]
        if mine.peer is None:
            if theirs != mine or calls[other][ran[other]] != calls[rank][ran[rank]]:
                return False
        elif other != rank and (theirs.peer != rank or theirs.group != mine.group or theirs.name == mine.name):
            return False
    return True


# ---- dumps


def dump(
    groups: Groups,
    program: Sequence[Op],
    rank: int,
    came: Rank,
    *,
    only_active: bool = False,
    buffer: int = 2000,
    status: bool = True,
    eager: bool = False,
    version: str = "2.10",
) -> dict[str, Any]:
    """The dump of one rank, as torch writes it with NCCL and without timing."""
    numbers = numbered(program)
    mine = [name for name, ranks in groups.ranks.items() if rank in ranks]
    ids = {name: index for index, name in enumerate(mine)}
    entries: list[dict[str, Any]] = []
    counts: dict[str, int] = defaultdict(int)
    summary = {
        name: {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1}
        for name in mine
    }
    for index, op in enumerate(program[: came.issued]):
        counts[op.group] += op.peer is None
        complete = index < came.completed
        summary[op.group]["last_enqueued_collective"] = numbers[index]
        if complete:
            summary[op.group]["last_completed_collective"] = numbers[index]
        if not (only_active and complete):
            entries.append(entry(groups, op, rank, index, ids[op.group], counts[op.group], numbers[index], complete))
    # torch knows a group from its first use on, or from its making where communicators are made early.
    known = [n for n in mine if eager or counts.keys() & {n}]
    made: dict[str, Any] = {
        "version": version,
        "comm_lib_version": "2.29.3",
        "pg_config": {n: {"name": n, "desc": groups.desc[n], "ranks": str(list(groups.ranks[n]))} for n in known},
        "entries": entries[-buffer:],
    }
    if status:
        made["pg_status"] = {str(ids[n]): s for n, s in summary.items() if s["last_enqueued_collective"] >= 0}
    return made


def entry(
    groups: Groups, op: Op, rank: int, index: int, group_id: int, collectives: int, number: int, complete: bool
) -> dict[str, Any]:
    """One entry of a dump."""
    name = op.name
    if op.peer is not None:
        here, there = (groups.ranks[op.group].index(r) for r in (rank, op.peer))
        name = f"{op.name} {here}{'->' if op.name == 'send' else '<-'}{there}"
    return {
        "record_id": index,
        "pg_id": group_id,
        "process_group": (op.group, groups.desc[op.group]),
        "collective_seq_id": collectives,
        "p2p_seq_id": 0 if op.peer is None else number,
        "op_id": index + 1,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_700_000_000_000_000_000 + index,
        "input_sizes": [[op.elements]],
        "input_dtypes": ["Float"],
        "output_sizes": [[op.elements]],
        "output_dtypes": ["Float"],
        "state": "completed" if complete else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_000_000_100 + index if complete else None,
        "retired": complete,
        "timeout_ms": 600_000,
        "is_p2p": op.peer is not None,
        "thread_id": "1",
        "thread_name": "python",
        "frames": [
            {
                "name": "wrapper",
                "filename": "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py",
                "line": 83,
            },
            {"name": "step", "filename": "/job/train.py", "line": 100 + index},
        ],
    }


def as_json(made: Mapping[str, Any]) -> bytes:
    """The same dump as torch spells it in JSON."""
    tree = json.loads(json.dumps(made))
    for summary in tree.get("pg_status", {}).values():
        summary.update({key: str(value) for key, value in summary.items()})
    for one in tree["entries"]:
        one.pop("frames", None)
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            one[key] = one[key] or 0
    if not tree["entries"]:
        del tree["entries"]
    return json.dumps(tree).encode()


def write(folder: Path, dumps: Mapping[int, Mapping[str, Any]], *, form: str = "torch") -> Path:
    """Write dumps as files, one a rank: as torch pickles them, as Python does, or as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, made in dumps.items():
        if form == "json":
            (folder / f"trace_rank_{rank}.json").write_bytes(as_json(made))
        else:
            data = torch_pickle(made) if form == "torch" else pickle.dumps(made, protocol=4)
            (folder / f"_dump_{rank}").write_bytes(data)
    return folder


def judge(folder: Path, expected: frozenset[int] = frozenset()) -> Hang:
    """What keepstep makes of a folder of dumps, read in this process."""
    return find_culprits(read_snapshot(find_dumps([str(folder)]).sources, jobs=1, expected=expected))


def ranks(hang: Hang) -> list[int]:
    """Culprits, by rank."""
    return sorted(culprit.rank for culprit in hang.culprits)
