"""A run folder that a real journal wrote: two nodes and a spare, a fault, a node lost, its ranks taken over by the spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from keepstep.cli.main import main
from keepstep.launcher.coordination.journal import Journal
from keepstep.records.codec import rfc3339, to_json
from keepstep.records.cycle import Cycle, RankPlace

S = 1_000_000_000
BASE_NS = 1_700_006_400 * S
Record = dict[str, Any]


def mark(t_s: float, kind: str, cycle: int = 0, attempt: int = 0, /, **attrs: Any) -> Record:
    t_ns = BASE_NS + int(t_s * S)
    return {"type": "mark", "mark": {"t_ns": t_ns, "kind": kind, "cycle": cycle, "attempt": attempt, "attrs": attrs}}


def opening(epoch: int = 1, attempt: int = 0, read: int = 0) -> Record:
    anchor = {"boot_id": "b", "utc_ns": 1, "boot_ns": 0}
    return {"type": "open", "epoch": epoch, "attempt": attempt, "launch": "l", "read": read, "pid": 7, "anchor": anchor}


def joined(node: str) -> Record:
    return {"type": "node", "node": node, "host": f"host-{node}", "nproc": 2, "pid": 100, "levels": ["rack", node]}


def started(node: str, *ranks: int) -> Record:
    return {"type": "started", "node": node, "cycle": 0, "ranks": [{"rank": r, "pid": 1000 + r} for r in ranks]}


def stopped(node: str, statuses: dict[str, int], completed: int, t_s: float) -> Record:
    body = {
        "type": "stopped",
        "statuses": statuses,
        "failures": [{"rank": int(r), "status": s, "time_ns": 1} for r, s in statuses.items() if s],
        "completed": dict.fromkeys(statuses, completed),
        "stopped_ns": BASE_NS + int(t_s * S),
    }
    return {"type": "stopped", "node": node, "stopped": body}


def cycle_record(number: int, *nodes: str, spares: tuple[str, ...] = (), path: str = "respawn") -> Record:
    layout = [[n, f"host-{n}", 2] for n in nodes]
    return {"type": "cycle", "cycle": number, "layout": layout, "spares": list(spares), "path": path}


FAULT_ATTRS = {"rank": 2, "node": "b", "kind": "exit", "cause": "unknown", "detail": "rank 2: SIGKILL"}
FIRST: list[Record] = [
    opening(),
    mark(0, "run_started"),
    *(joined(n) for n in ("a", "b", "c")),
    cycle_record(0, "a", "b", spares=("c",)),
    mark(1, "cycle_started"),
    started("a", 0, 1),
    started("b", 2, 3),
    mark(2, "assigned"),
    mark(3, "attached"),
    mark(4, "restored", step=0, source="none"),
    mark(5, "first_step", step=1),
    mark(9, "committed", step=3, checkpoint="c3", persist_ns=250_000_000),
    mark(14, "committed", step=8, checkpoint="c8"),
    mark(15, "step", step=11),
]
FAULT: list[Record] = [
    {
        "type": "fault",
        "node": "b",
        "fault": {"kind": "exit", "rank": 2, "detected_ns": BASE_NS + 16 * S, "detail": "SIGKILL"},
    },
    stopped("a", {"0": -15, "1": -15}, 11, 17),
    {"type": "node_lost", "node": "b", "t_ns": BASE_NS + 17 * S, "why": "lease ran out"},
    mark(16, "fault", occurred_ns=BASE_NS + 15 * S, detected_ns=BASE_NS + 16 * S, completed_step=11, **FAULT_ATTRS),
    mark(17, "stopped"),
    mark(18, "decided", action="restart", counted=True),
    mark(18, "cycle_ended", reason="unknown"),
    {
        "type": "decision",
        "cycle": 0,
        "outcome": {
            "rule": "restart",
            "action": "restart",
            "counted": True,
            "cause": "unknown",
            "verdict": "succeeded",
        },
    },
]
SECOND: list[Record] = [
    cycle_record(1, "a", "c", path="spare"),
    mark(19, "cycle_started", 1),
    started("a", 0, 1),
    started("c", 2, 3),
    mark(20, "attached", 1),
    {"type": "kv", "cycle": 1, "key": "k", "value": 1},
    mark(22, "restored", 1, step=3, source="disk", checkpoint="c3"),
    mark(23, "first_step", 1, step=4),
    mark(27, "step", 1, step=12),
]
END: list[Record] = [
    mark(30, "drain", 1, completed_step=13),
    mark(31, "cycle_ended", 1, reason="finished"),
    mark(32, "run_ended", 1, outcome="succeeded", exit_code=0),
    {"type": "verdict", "verdict": {"outcome": "succeeded", "exit_code": 0, "cause": "finished", "attempt": 0}},
]


def places(*nodes: str, exits: dict[int, str] | None = None) -> list[RankPlace]:
    return [
        RankPlace(
            rank=2 * i + local,
            local_rank=local,
            node=node,
            host=f"host-{node}",
            pid=1000 + 2 * i + local,
            exit=(exits or {}).get(2 * i + local),
        )
        for i, node in enumerate(nodes)
        for local in range(2)
    ]


CYCLES = [
    Cycle(
        run_id="job-1",
        attempt=0,
        cycle=0,
        started_at=rfc3339(BASE_NS + S),
        ended_at=rfc3339(BASE_NS + 18 * S),
        end_reason="unknown",
        fault={**FAULT_ATTRS, "completed_step": 11},
        restored_step=0,
        ranks=places("a", "b", exits={0: "SIGTERM", 1: "SIGTERM", 2: "SIGKILL"}),
        active_nodes=["a", "b"],
        spare_nodes=["c"],
        counted=True,
    ),
    Cycle(
        run_id="job-1",
        attempt=0,
        cycle=1,
        started_at=rfc3339(BASE_NS + 19 * S),
        restored_step=3,
        restored_from="disk",
        restored_checkpoint="c3",
        recovery="spare",
        ranks=places("a", "c"),
        active_nodes=["a", "c"],
    ),
]


def write_run(run_dir: Path, *epochs: list[Record], cycles: list[Cycle] | None = None) -> Path:
    """A run folder whose journal has one file an epoch."""
    for name in ("cycles", "logs", "evidence", "incidents"):
        (run_dir / name).mkdir(parents=True)
    for records in epochs:
        journal = Journal.claim(run_dir)
        journal.append(records)
        journal.close()
    (run_dir / "run.json").write_bytes(
        to_json(
            {"run_id": run_dir.name, "script": "train.py", "args": ["--x"], "nproc": 2, "origins": {"nproc": "flag"}}
        )
    )
    for cycle in CYCLES if cycles is None else cycles:
        (run_dir / "cycles" / f"cycle-{cycle.cycle:04d}.json").write_bytes(to_json(cycle))
    return run_dir


def keepstep(*args: str | Path, **kwargs: Any) -> Result:
    """Run the command line in this process; standard output is a pipe."""
    return CliRunner().invoke(main, [*map(str, args)], **kwargs)


def rows(text: str) -> list[list[str]]:
    """Words of each line."""
    return [line.split() for line in text.splitlines() if line.strip()]
