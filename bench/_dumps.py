"""Flight-recorder dumps of a large job that hangs: tensor, pipeline and data parallel groups as in Megatron; one rank stops."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

AHEAD = 3
"""Operations that a rank has issued beyond the one it waits in."""


class Op(NamedTuple):
    """What a rank calls: `key` is the same on all that take part, `number` the sequence in the group; elements in and out."""

    group: int
    name: str
    number: int
    key: tuple[Any, ...]
    size_in: int
    size_out: int


class Job(NamedTuple):
    """Process groups: (name, description, ranks); for each rank its groups by kind."""

    groups: list[tuple[str, str, tuple[int, ...]]]
    own: list[dict[str, int]]


IDLE = ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
"""Groups of all ranks that Megatron makes beside the default one. None of their operations is in the buffer any more."""
IDLE_COUNT = 26
"""Their operations so far."""


def make_job(ranks: int) -> Job:
    """8 ranks share a layer where there are so many, 8 stages, the rest is data parallel."""
    tp = min(8, ranks)
    pp = min(8, max(1, ranks // tp))
    dp = ranks // (tp * pp)
    groups: list[tuple[str, str, tuple[int, ...]]] = [("0", "default_pg", tuple(range(ranks)))]
    own: list[dict[str, int]] = [{"world": 0} for _ in range(ranks)]

    def add(kind: str, desc: str, members: Sequence[int]) -> None:
        for rank in members:
            own[rank][kind] = len(groups)
        groups.append((str(len(groups)), desc, tuple(members)))

    for p in range(pp):
        for d in range(dp):
            add("tp", "TENSOR_MODEL_PARALLEL_GROUP", [(p * dp + d) * tp + t for t in range(tp)])
        for t in range(tp):
            add("dp", "DATA_PARALLEL_GROUP", [(p * dp + d) * tp + t for d in range(dp)])
    for d in range(dp):
        for t in range(tp):
            add("pp", "PIPELINE_MODEL_PARALLEL_GROUP", [(p * dp + d) * tp + t for p in range(pp)])
    for desc in IDLE:
        add(desc, desc, range(ranks))
    return Job(groups, own)


def program_of(job: Job, rank: int, length: int, *, transfers: bool) -> list[Op]:
    """The first `length` operations of a rank. Without `transfers` stages meet in an all-reduce instead."""
    own = job.own[rank]
    stages = job.groups[own["pp"]][2]
    stage = stages.index(rank)
    ops: list[Op] = []
    counts: dict[tuple[int, bool], int] = {}

    def call(kind: str, name: str, size: int, peer: int | None = None) -> None:
        group = own[kind]
        if len(job.groups[group][2]) < 2:
            return
        number = counts[group, peer is None] = counts.get((group, peer is None), 0) + 1
        if peer is None:
            ways = len(job.groups[group][2])
            into = size * ways if name == "_reduce_scatter_base" else size
            out = size * ways if name == "_all_gather_base" else size
            ops.append(Op(group, name, number, (group, number), into, out))
        else:
            here, there = stage, stages.index(peer)
            arrow = f"send {here}->{there}" if name == "send" else f"recv {here}<-{there}"
            ends = (rank, peer) if name == "send" else (peer, rank)
            passed = counts[-1 - peer, name == "send"] = counts.get((-1 - peer, name == "send"), 0) + 1
            ops.append(Op(group, arrow, number, (*ends, passed, "transfer"), size, size))

    while len(ops) < length:
        if stage and transfers:
            call("pp", "recv", 1 << 20, stages[stage - 1])
        for _ in range(2):
            call("tp", "_all_gather_base", 1 << 20)
            call("tp", "_reduce_scatter_base", 1 << 20)
        if stage < len(stages) - 1 and transfers:
            call("pp", "send", 1 << 20, stages[stage + 1])
        if not transfers:
            call("pp", "all_reduce", 1 << 10)
        call("dp", "all_reduce", 1 << 24)
        call("world", "all_reduce", 1)
    return ops[:length]


def play(job: Job, programs: Sequence[list[Op]], stopped: int, at: int) -> list[int]:
    """How many operations each rank completes when one of them does not issue its operation `at`."""
    done = [0] * len(programs)
    waiting: dict[tuple[Any, ...], list[int]] = {}
    ready = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        if done[rank] == (at if rank == stopped else len(programs[rank])):
            continue
        op = programs[rank][done[rank]]
        there = waiting.setdefault(op.key, [])
        there.append(rank)
        if len(there) == (2 if op.key[-1] == "transfer" else len(job.groups[op.group][2])):
            for other in there:
                done[other] += 1
            ready.extend(there)
    return done


def write_dumps(
    folder: Path, ranks: int, entries: int, stopped: int, *, transfers: bool = True, only: Sequence[int] | None = None
) -> None:
    """Dumps of a job in which rank `stopped` stops two thirds of the way; `only`: of these ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    job = make_job(ranks)
    wanted = range(ranks) if only is None else only
    if only is None:
        programs = [program_of(job, rank, entries, transfers=transfers) for rank in range(ranks)]
        done = play(job, programs, stopped, entries * 2 // 3)
    else:
        # Of a part of a job it is only measured how long reading takes: all but `stopped` are done.
        programs = [
            program_of(job, rank, entries, transfers=transfers) if rank in wanted else [] for rank in range(ranks)
        ]
        done = [len(program) for program in programs]
        done[stopped] = min(done[stopped], entries * 2 // 3)
    names = [str(list(members)) for _, _, members in job.groups]
    for rank in wanted:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(
            torch_pickle(_dump(job, names, rank, programs[rank], done[rank], rank == stopped))
        )


def _dump(job: Job, names: Sequence[str], rank: int, program: Sequence[Op], done: int, stops: bool) -> dict[str, Any]:
    issued = program[: done if stops else done + 1 + AHEAD]
    idle = [job.own[rank][desc] for desc in IDLE]
    mine = sorted({*(op.group for op in program), *idle})
    ids = {group: index for index, group in enumerate(mine)}
    collectives = dict.fromkeys(mine, 0)
    status = {
        group: {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1}
        for group in mine
    }
    for group in idle:
        status[group].update(last_enqueued_collective=IDLE_COUNT, last_completed_collective=IDLE_COUNT)
    entries = []
    for index, op in enumerate(issued):
        transfer = op.key[-1] == "transfer"
        collectives[op.group] += not transfer
        status[op.group]["last_enqueued_collective"] = op.number
        if index < done:
            status[op.group]["last_completed_collective"] = op.number
        entries.append(
            {
                "record_id": index, "pg_id": ids[op.group], "process_group": job.groups[op.group][:2],
                "collective_seq_id": collectives[op.group], "p2p_seq_id": op.number if transfer else 0, "op_id": index + 1,
                "profiling_name": f"nccl:{op.name}", "time_created_ns": 1_700_000_000_000_000_000 + 1000 * index,
                "input_sizes": [[op.size_in]], "input_dtypes": ["BFloat16"], "output_sizes": [[op.size_out]],
                "output_dtypes": ["BFloat16"], "state": "completed" if index < done else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": 1_700_000_000_000_000_500 + 1000 * index if index < done else None,
                "retired": index < done, "timeout_ms": 600_000, "is_p2p": transfer, "thread_id": "23456244340032",
                "thread_name": "python3", "frames": [],
            }
        )  # fmt: skip
    return {
        "version": "2.10",
        "comm_lib_version": "2.29.3",
        "pg_config": {
            job.groups[g][0]: {"name": job.groups[g][0], "desc": job.groups[g][1], "ranks": names[g]} for g in mine
        },
        "pg_status": {str(ids[g]): status[g] for g in mine if status[g]["last_enqueued_collective"] >= 0},
        "entries": entries,
    }


def torch_pickle(value: Any) -> bytes:
    """Plain values as torch's own pickler writes them (torch/csrc/jit/serialization/pickler.cpp): texts alone are remembered."""
    out = [b"\x80\x02"]
    _put(value, out.append, {})
    out.append(b".")
    return b"".join(out)


def _put(value: Any, put: Callable[[bytes], None], memo: dict[str, int]) -> None:
    if isinstance(value, str):
        index = memo.get(value)
        if index is not None:
            put(b"h%c" % index if index < 256 else b"j" + struct.pack("<I", index))
            return
        index = memo[value] = len(memo)
        text = value.encode()
        put(b"X" + struct.pack("<I", len(text)) + text)
        put(b"q%c" % index if index < 256 else b"r" + struct.pack("<I", index))
    elif value is None or isinstance(value, bool):
        put({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, int):
        if 0 <= value < 256:
            put(b"K%c" % value)
        elif 0 <= value < 65536:
            put(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            put(b"J" + struct.pack("<i", value))
        else:
            put(b"\x8a\x08" + struct.pack("<q", value))
    elif isinstance(value, dict):
        put(b"}(")
        for key, item in value.items():
            _put(key, put, memo)
            _put(item, put, memo)
        put(b"u")
    else:
        put(b"](" if isinstance(value, list) else b"")
        for item in value:
            _put(item, put, memo)
        put(b"e" if isinstance(value, list) else b"\x86")
