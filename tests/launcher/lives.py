"""A coordinator without sockets for tests: what nodes say, whole lives of a job as lists of it, and who takes it in."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.job import Job
from keepstep.launcher.journal import Journal, read_records
from keepstep.launcher.rules import MAX_PORT_RETRIES
from keepstep.launcher.state import JobShape


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
    cycle: int, steps: int, places: Places, commit: int | None = None, restored: int = 0
) -> list[Event]:
    """The ranks of a cycle start, restore and train `steps` steps."""
    base = 1_000 * (cycle + 1)
    lead = next(iter(places))
    source = "disk" if restored else "none"
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


# --- whole lives


class Life(msgspec.Struct, frozen=True):
    """Events and how they end. `counted`: restarts that count; `marker`: the marker's file at the start."""

    shape: JobShape
    events: list[Event]
    ending: Ending
    counted: int = 0
    marker: int | None = None


DONE: Ending = ("succeeded", 0, "finished")
killed = failure(1, -9)
other = failure(0, 1, time_ns=700, cascade=True, error_type="DistBackendError")
peer = failure(0, 1, cascade=True, error_type="DistBackendError")


def one_node_lives() -> dict[str, Life]:
    one = [hello("a")]
    given_back = [
        [fault("a", c, 0, "spawn"), stopped("a", c, {}, failure(0, 1, **TAKEN))] for c in range(MAX_PORT_RETRIES + 1)
    ]
    bug = failure(1, 1, **BUG)
    every = [failure(r, 1, time_ns=600 + r, **BUG) for r in (0, 1)]
    interrupted = broken(0, killed)
    return {
        "finished": Life(shape(), [*one, *training(0, 4, ONE, 2), *finish(0, ONE, 4)], DONE),
        "hung, then killed": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), *broken(0, kind="hang"), *training(1, 0, ONE)),
                *(*broken(1, killed, step=None), *training(2, 2, ONE, 1), *finish(2, ONE, 2)),
            ],
            DONE,
            2,
        ),
        "exit 42": Life(
            shape(),
            [*one, *training(0, 2, ONE), *broken(0, failure(1, 42), step=2)],
            ("failed", 42, "config_or_code_bug"),
        ),
        "exit 43": Life(
            shape(),
            [*one, *training(0, 2, ONE, 1), *broken(0, failure(1, 43), step=2)],
            ("failed", 43, "numerical_guard"),
        ),
        "the same failure twice": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), *broken(0, bug, other)),
                *(*training(1, 3, ONE), *broken(1, bug, other)),
            ],
            ("failed", 42, "code_bug"),
            1,
        ),
        "the same failure at another step, then the end of the budget": Life(
            shape(max_restarts=3),
            [*one, *[e for c in range(4) for e in (*training(c, 3 + c, ONE), *broken(c, bug, step=3 + c))]],
            ("failed", 1, "budget_exhausted"),
            3,
        ),
        "interrupted while a fault is handled": Life(
            shape(),
            [*one, *training(0, 3, ONE), interrupted[0], stop_request("a", 2), *interrupted[1:]],
            ("stopped", 130, "interrupted"),
        ),
        "ports that are taken": Life(
            shape(),
            [*one, *itertools.chain(*given_back), *training(4, 2, ONE), *finish(4, ONE, 2)],
            DONE,
            1,
        ),
        "one rank leaves early": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), fault("a", 0, 1)),
                stopped("a", 0, {0: 0, 1: 1}, failure(1, 1, cascade=True, error_type="DistBackendError"), step=3),
                *(*training(1, 3, ONE), *finish(1, ONE, 3)),
            ],
            DONE,
            1,
        ),
        "a script that reports no steps": Life(
            shape(), [*one, started("a", 0, [0, 1], expect_steps=False), *finish(0, ONE, None)], DONE
        ),
        "every rank fails before the first step": Life(
            shape(),
            [*one, *training(0, 0, ONE), *broken(0, *every, step=None)],
            ("failed", 42, "code_bug"),
        ),
        "a launcher that was started again": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE, 2), ("a", Closed()), hello("a", pid=101)),
                *(*training(1, 4, ONE), *finish(1, ONE, 4)),
            ],
            DONE,
        ),
        "no progress by a marker's file": Life(
            shape(marker_file=True),
            [
                *(*one, *training(0, 2, ONE), *broken(0, killed, step=2)),
                *(*training(1, 3, ONE), ("", Marker(101)), *broken(1, killed)),
                *(*training(2, 2, ONE), *broken(2, killed, step=2)),
                *(*training(3, 2, ONE), ("", Marker(None)), *broken(3, killed, step=2)),
                *(*training(4, 2, ONE), ("", Marker(101)), *broken(4, killed, step=2)),
                *(*training(5, 2, ONE), *broken(5, killed, step=2)),
            ],
            ("no_restart", 93, "no_progress"),
            5,
            100,
        ),
        "no progress by its own checkpoints": Life(
            shape(no_restart_exit_code=17),
            [
                *(*one, *training(0, 3, ONE, 2), *broken(0, killed)),
                *[e for c in (1, 2, 3) for e in (*training(c, 2, ONE, restored=2), *broken(c, killed, step=4))],
            ],
            ("no_restart", 17, "no_progress"),
            3,
        ),
        "a rollback that was announced": Life(
            shape(marker_file=True, max_no_progress_cycles=2),
            [
                *(*one, *training(0, 2, ONE), *broken(0, killed, step=2), *training(1, 2, ONE), ("", Marker(50))),
                *(note("a", 1, 0, "rollback_announced", 2_450, to_step=50, reason="spike"), *broken(1, killed, step=2)),
                *(*training(2, 3, ONE), ("", Marker(51)), *broken(2, killed)),
                *(*training(3, 4, ONE), *finish(3, ONE, 4)),
            ],
            DONE,
            3,
            100,
        ),
    }


def many_node_lives() -> dict[str, Life]:
    a, b, c = hello("a"), hello("b"), hello("c")
    two, three = [a, b], [a, b, c]
    spare = shape(2, spares=1)
    swapped = [*training(1, 4, SWAPPED), *finish(1, SWAPPED, 4)]
    lost_b = [("b", None), stopped("a", 0, {0: 1, 1: 1}, peer, step=3)]
    return {
        "killed once": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO, 2), *broken(0, failure(2, -9), other, places=TWO)),
                *(*training(1, 4, TWO), *finish(1, TWO, 4)),
            ],
            DONE,
            1,
        ),
        "asked to stop while training": Life(
            shape(2),
            [*two, *training(0, 3, TWO, 2), stop_request("b"), *finish(0, TWO, 3)],
            ("stopped", 143, "preempted"),
        ),
        "asked to stop before anything ran": Life(shape(2), [a, stop_request("a")], ("stopped", 143, "preempted")),
        "a node is lost and another takes its place": Life(
            shape(2), [*two, *training(0, 3, TWO, 2), *lost_b, hello("c"), *swapped], DONE
        ),
        "a node is lost and a spare takes its place": Life(
            spare, [*three, *training(0, 3, TWO, 2), *lost_b, *swapped], DONE
        ),
        "a lost node comes back and is the next spare": Life(
            spare,
            [
                *(*three, *training(0, 3, TWO, 2), *lost_b, *training(1, 2, SWAPPED), hello("b", fenced=True, cycle=0)),
                *(("a", None), stopped("c", 1, {2: 1, 3: 1}, failure(2, 1, cascade=True), step=2)),
                *(*training(2, 3, {"b": [0, 1], "c": [2, 3]}), *finish(2, {"b": [0, 1], "c": [2, 3]}, 3)),
            ],
            DONE,
        ),
        "shrinks, and grows again": Life(
            shape(3, min_nodes=2),
            [
                *(*three, *training(0, 3, THREE, 2), ("c", None)),
                *(stopped("a", 0, {0: 1, 1: 1}, peer, step=3), stopped("b", 0, {2: 1, 3: 1}, step=3)),
                *(*training(1, 3, TWO), hello("c", pid=101), *broken(1, killed, places=TWO)),
                *(*training(2, 4, THREE), *finish(2, THREE, 4)),
            ],
            DONE,
            1,
        ),
        "checks fail before the first cycle": Life(
            shape(2),
            [
                *(a, hello("b", problems=["gpu 3 does not answer"]), c, *training(0, 3, SWAPPED)),
                *finish(0, SWAPPED, 3),
            ],
            DONE,
        ),
        "checks fail after a cycle": Life(
            spare,
            [
                *(*three, *training(0, 3, TWO, 2), fault("b", 0, 2)),
                *(stopped("a", 0, {0: -15, 1: -15}, step=3),),
                stopped("b", 0, {2: 1, 3: -15}, failure(2, 1, **BUG), step=3, problems=("gpu 3 is gone", "disk full")),
                *swapped,
            ],
            DONE,
        ),
        "a rank asks for its node to be left out": Life(
            spare, [*three, *training(0, 3, TWO, 2), request("b", 0, "exclude", 2), *halted(0, TWO), *swapped], DONE
        ),
        "a person takes a node out": Life(
            spare, [*three, *training(0, 3, TWO, 2), operator_exclude("b"), *halted(0, TWO), *swapped], DONE
        ),
        "a person takes a spare out": Life(
            spare, [*three, *training(0, 3, TWO), operator_exclude("c"), *training(0, 4, TWO)[-2:], *finish(0, TWO, 4)], DONE
        ),
        "a rank asks for the end": Life(
            shape(2),
            [*two, *training(0, 3, TWO, 2), request("b", 0, "stop", 2, "loss diverged"), *halted(0, TWO)],
            ("no_restart", 93, "workload_request"),
        ),
        "a node that flaps": Life(
            shape(2),
            [
                *two,
                *[
                    e
                    for cycle in range(3)
                    for e in (
                        *training(cycle, 2, TWO),
                        ("b", None),
                        stopped("a", cycle, {0: 1, 1: 1}, peer, step=2),
                        hello("b", fenced=True, cycle=cycle),
                    )
                ],
                *(hello("c"), *training(3, 4, SWAPPED), *finish(3, SWAPPED, 4)),
            ],
            DONE,
        ),
        "a node stops its ranks at the end of its lease and comes back": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO, 2), ("b", Closed()), hello("b", fenced=True, cycle=0)),
                stopped("b", 0, {2: -9, 3: -9}, failure(2, -9, stopped_by_us=True), step=3),
                stopped("a", 0, {0: -15, 1: -15}, peer, step=3),
                *(*training(1, 4, TWO), *finish(1, TWO, 4)),
            ],
            DONE,
        ),
        "a late node waits as a spare": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO), c, *broken(0, failure(2, -9), places=TWO), *training(1, 2, TWO)),
                *(("b", None), stopped("a", 1, {0: 1, 1: 1}, peer, step=2)),
                *(*training(2, 4, SWAPPED), *finish(2, SWAPPED, 4)),
            ],
            DONE,
            1,
        ),
        "two nodes lost at once, one spare": Life(
            shape(3, min_nodes=2, spares=1),
            [
                *(*three, hello("d"), *training(0, 3, THREE, 2), ("b", None), ("c", None)),
                stopped("a", 0, {0: 1, 1: 1}, peer, step=3),
                *(*training(1, 4, {"a": [0, 1], "d": [2, 3]}), *finish(1, {"a": [0, 1], "d": [2, 3]}, 4)),
            ],
            DONE,
        ),
    }


LIVES = {**one_node_lives(), **many_node_lives()}
