"""A coordinator without sockets for tests: what nodes say, and who takes it in."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.job import Job
from keepstep.launcher.coordination.journal import Journal, read_records
from keepstep.launcher.coordination.state import JobShape, JobState


class Closed(msgspec.Struct, frozen=True):
    """A node's connection is closed; its lease still runs."""


class Marker(msgspec.Struct, frozen=True):
    """The progress marker's file says this from now on."""

    value: int | None


Event = tuple[str, m.FromAgent | Closed | Marker | None]
"""A message of a node; None: the node is gone for longer than its lease."""
Ending = tuple[str, int, str]
Places = dict[str, list[int]]

STEP_NS = 10


def shape(nnodes: int = 1, **fields: Any) -> JobShape:
    known: dict[str, Any] = {"run_id": "run-1", "min_nodes": nnodes, "master_addr": "127.0.0.1", "master_port": 29500}
    return JobShape(nnodes=nnodes, **{**known, **fields})


class Lead:
    """A coordinator without sockets: state, journal, who is connected. Time is a counter."""

    def __init__(self, run_dir: Path, of: JobShape, attempt: int | None = None, marker: int | None = None) -> None:
        self.marker = marker
        self.job = Job(of, lambda: self.marker)
        self.connected: set[str] = set()
        self.last_call = False
        self.now_ns = 1_000_000
        for record in read_records(run_dir):
            record.pop("seq")
            self.job.apply(record)
        self.journal = Journal.claim(run_dir)
        new = attempt is None
        number = self.job.attempt + 1 if attempt is None else attempt
        mark = self.job.mark("run_started" if new else "gap", 7, **({} if new else {"begin_ns": 1, "end_ns": 2}))
        mark["mark"]["attempt"] = number
        opening = {"type": "open", "epoch": self.journal.epoch, "attempt": number, "marker": marker}
        self._commit([opening, mark])

    def _commit(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self.job.apply(record)
        self.journal.append(records)

    def take(self, event: Event, again: bool = False) -> m.Reply | None:
        """Handle one event as the coordinator does: apply, advance as far as it goes, journal, and only then reply.

        `again`: the event was told before; time does not pass.
        """
        node, message = event
        self.now_ns += 0 if again else STEP_NS
        records, reply = self._handle(node, message)
        if reply is not None and isinstance(message, m.Hello):
            return reply
        for record in records:
            self.job.apply(record)
        for record in (new := self.job.step_mark(self.now_ns)):
            self.job.apply(record)
        records = records + new
        while due := self.job.advance(self.now_ns, self.connected.__contains__, self.last_call):
            for record in due:
                self.job.apply(record)
            records += due
        self.journal.append(records)
        return reply

    def _handle(self, node: str, message: Any) -> tuple[list[dict[str, Any]], m.Reply | None]:
        match message:
            case None:
                self.connected.discard(node)
                return self.job.lose(node, 5_000, 4_000, "lease"), None
            case Closed():
                self.connected.discard(node)
            case Marker():
                self.marker = message.value
            case m.Hello():
                records, refused = self.job.join(message, node in self.connected, self.now_ns)
                if refused is None:
                    self.connected.add(node)
                return records, refused
            case m.Beat():
                self.job.beat(node, message)
            case m.Operator():
                return self.job.exclude(message.node, message.reason), None
            case _:
                return self.job.handle(node, message, self.now_ns)
        return [], None

    def tell(self, *events: Event) -> None:
        """Take all of them."""
        for event in events:
            self.take(event)

    def close(self) -> None:
        self.journal.close()

    @property
    def ending(self) -> Ending | None:
        v = self.job.verdict
        return (v.outcome, v.exit_code, v.cause) if v is not None else None


# --- what nodes say

_ids = itertools.count(1)


def hello(node: str, nproc: int = 2, pid: int = 100, run_id: str = "run-1", **more: Any) -> Event:
    fields: dict[str, Any] = {"host": f"host-{node}", "next_addr": "127.0.0.1", "boot_id": f"boot-{node}", **more}
    port = 21000 + ord(node[0])
    return node, m.Hello(id=next(_ids), run_id=run_id, node=node, pid=pid, nproc=nproc, next_port=port, **fields)


def started(node: str, cycle: int, ranks: list[int], expect_steps: bool = True) -> Event:
    base = 1_000 * (cycle + 1)
    pids = [{"rank": r, "local_rank": i, "pid": 500 + 10 * cycle + r} for i, r in enumerate(ranks)]
    at: dict[str, Any] = {"assigned_ns": base + ord(node), "started_ns": base + 100 + ord(node)}
    return node, m.Started(id=next(_ids), cycle=cycle, ranks=pids, expect_steps=expect_steps, **at)


def note(node: str, cycle: int, rank: int, kind: str, t_ns: int, **attrs: Any) -> Event:
    return node, m.Note(id=next(_ids), cycle=cycle, rank=rank, kind=kind, t_ns=t_ns, attrs=attrs)


def beat(node: str, cycle: int, completed: int) -> Event:
    return node, m.Beat(id=next(_ids), cycle=cycle, completed=completed, at_ns=1_000 * (cycle + 1) + 300 + completed)


def grant(node: str, cycle: int, step: int) -> Event:
    return node, m.Grant(id=next(_ids), cycle=cycle, checkpoint=f"c{cycle}-{step}", step=step)


def fault(node: str, cycle: int, rank: int, kind: str = "exit") -> Event:
    at = 1_000 * (cycle + 1) + 600
    what: dict[str, Any] = {"occurred_ns": at, "detected_ns": at + 5, "detail": f"rank {rank}: {kind}"}
    return node, m.Fault(id=next(_ids), cycle=cycle, kind=kind, rank=rank, **what)


def failure(rank: int, status: int, **fields: Any) -> m.Failure:
    return m.Failure(rank=rank, status=status, **{"time_ns": 600 + rank, **fields})


def stopped(
    node: str,
    cycle: int,
    statuses: dict[int, int],
    *failures: m.Failure,
    step: int | None = None,
    problems: tuple[str, ...] = (),
) -> Event:
    base = 1_000 * (cycle + 1)
    done: dict[str, Any] = {"completed": {}, "completed_ns": 0}
    if step is not None:
        done = {"completed": {str(r): step for r in statuses}, "completed_ns": base + 500}
        done |= {"first_step": 1, "first_step_ns": base + 250}
    return node, m.Stopped(
        id=next(_ids),
        cycle=cycle,
        statuses={str(r): s for r, s in statuses.items()},
        failures=list(failures),
        captured_ns=base + 700,
        stopped_ns=base + 800,
        next_port=22000 + cycle,
        problems=list(problems),
        **done,
    )


def stop_request(node: str, signum: int = 15) -> Event:
    return node, m.StopRequest(id=next(_ids), signum=signum, node=node)


def request(node: str, cycle: int, what: str, rank: int, reason: str = "why") -> Event:
    return node, m.WorkloadRequest(id=next(_ids), cycle=cycle, what=what, reason=reason, rank=rank, node=node)


def operator_exclude(node: str) -> Event:
    return "", m.Operator(id=next(_ids), what="exclude", run_id="run-1", node=node, reason="looks tired")


def training(
    cycle: int, steps: int, places: Places, commit: int | None = None, restored: int = 0, source: str = "disk"
) -> list[Event]:
    """The ranks of a cycle start, restore (`source`: from where) and train `steps` steps."""
    base = 1_000 * (cycle + 1)
    lead = next(iter(places))
    source = source if restored else "none"
    events = [started(node, cycle, ranks) for node, ranks in places.items()]
    events += [note(n, cycle, r, "attached", base + 200 + r) for n, ranks in places.items() for r in ranks]
    events.append(note(lead, cycle, 0, "restored", base + 240, step=restored, source=source))
    if steps:
        events.append(note(lead, cycle, 0, "first_step", base + 250, step=restored + 1))
    events += [beat(node, cycle, restored + s) for s in range(2, steps + 1) for node in places]
    if commit is not None:
        events += [grant(lead, cycle, commit)]
        events += [note(lead, cycle, 0, "committed", base + 400, step=commit, checkpoint=f"c{cycle}-{commit}")]
    return events


ONE: Places = {"a": [0, 1]}
TWO: Places = {"a": [0, 1], "b": [2, 3]}
SWAPPED: Places = {"a": [0, 1], "c": [2, 3]}
THREE: Places = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
BUG = {"error_type": "ValueError", "frame": "train.py:7 in main", "traceback": "Traceback ...\nValueError: x\n"}
TAKEN = {"error_type": "DistNetworkError", "message": "code: -98, name: EADDRINUSE, message: address already in use"}


def finish(cycle: int, places: Places, step: int | None) -> list[Event]:
    return [stopped(n, cycle, dict.fromkeys(ranks, 0), step=step) for n, ranks in places.items()]


def halted(cycle: int, places: Places, step: int | None = 3) -> list[Event]:
    """All ranks stop because they were told to."""
    return [
        stopped(n, cycle, dict.fromkeys(ranks, -15), *[failure(r, -15, stopped_by_us=True) for r in ranks], step=step)
        for n, ranks in places.items()
    ]


def broken(
    cycle: int,
    *failures: m.Failure,
    kind: str = "exit",
    step: int | None = 3,
    places: Places | None = None,
) -> list[Event]:
    """A fault, and every node stops its ranks."""
    places = places or ONE
    rank = failures[0].rank if failures else 0
    blamed = next(n for n, ranks in places.items() if rank in ranks)
    events = [fault(blamed, cycle, rank, kind)]
    for node, ranks in places.items():
        own = [f for f in failures if f.rank in ranks]
        statuses = {r: next((f.status for f in own if f.rank == r), -15) for r in ranks}
        events.append(stopped(node, cycle, statuses, *own, step=step))
    return events


def dump(job: JobState) -> dict[str, Any]:
    """All that a job's state consists of, without what is not journaled: samples of progress, the reason it waits."""
    state = _ordered({k: v for k, v in vars(job).items() if k not in ("_read_marker", "waiting", "shape")})
    if job.cycle is not None:
        state["cycle"] = _ordered({k: v for k, v in vars(job.cycle).items() if k not in ("beats", "rank_map")})
    plain: dict[str, Any] = msgspec.to_builtins(state)
    return plain


def _ordered(state: dict[str, Any]) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, set) else v for k, v in state.items()}


def replayed(run_dir: Path, of: JobShape) -> JobState:
    """The state that a journal gives."""
    state = JobState(of)
    for record in read_records(run_dir):
        record.pop("seq")
        state.apply(record)
    return state
