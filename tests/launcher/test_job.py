"""Whole lives of a job, told to `Job` as messages over a real journal; a coordinator that dies anywhere loses nothing of them."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.goodput import partition
from keepstep.launcher import messages as m
from keepstep.launcher.job import Job
from keepstep.launcher.journal import Journal, epoch_path, read_records
from keepstep.launcher.rules import MAX_PORT_RETRIES
from keepstep.records.codec import to_json
from keepstep.records.timeline import Mark

Event = tuple[str, m.FromAgent | None]
"""A message of a node; None: the node is gone for longer than its lease."""
Ending = tuple[str, int, str]

HOSTS = {"a": "host-a", "b": "host-b", "c": "host-c"}
CLOCK_MARKS = {"cycle_started", "decided", "cycle_ended", "run_ended"}
"""Marks whose time is the coordinator's own clock and not a message's."""


class Lead:
    """A coordinator without sockets: state, journal, who is connected. Time is a counter."""

    def __init__(self, run_dir: Path, nnodes: int, max_restarts: int = 10, attempt: int | None = None) -> None:
        self.job = Job("run-1", nnodes, max_restarts, ("127.0.0.1", 29500))
        self.connected: set[str] = set()
        self.now_ns = 1_000_000
        for record in read_records(run_dir):
            record.pop("seq")
            self.job.apply(record)
        self.journal = Journal.claim(run_dir)
        new = attempt is None
        number = self.job.attempt + 1 if attempt is None else attempt
        mark = self.job.mark("run_started" if new else "gap", 7, **({} if new else {"begin_ns": 1, "end_ns": 2}))
        mark["mark"]["attempt"] = number
        self._commit([{"type": "open", "epoch": self.journal.epoch, "attempt": number}, mark])

    def _commit(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self.job.apply(record)
        self.journal.append(records)

    def take(self, event: Event) -> m.Reply | None:
        """Handle one event as the coordinator does: apply, advance as far as it goes, journal, and only then reply."""
        node, message = event
        self.now_ns += 10
        reply: m.Reply | None = None
        records: list[dict[str, Any]] = []
        if message is None:
            self.connected.discard(node)
            if node in self.job.nodes:
                records = [{"type": "node_lost", "node": node, "t_ns": 5_000}]
        elif isinstance(message, m.Hello):
            records, refused = self.job.join(message, self.connected, self.now_ns)
            if refused is not None:
                return m.Reply(epoch=self.job.epoch, id=message.id, ok=False, error=refused)
            self.connected.add(node)
        else:
            records, reply = self.job.handle(node, message)
        for record in records:
            self.job.apply(record)
        while due := self.job.advance(self.now_ns, self.connected):
            for record in due:
                self.job.apply(record)
            records += due
        self.journal.append(records)
        return reply

    def close(self) -> None:
        self.journal.close()

    @property
    def ending(self) -> Ending | None:
        v = self.job.verdict
        return (v.outcome, v.exit_code, v.cause) if v is not None else None


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """In memory: every append is synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# --- what nodes say

_ids = itertools.count(1)


def hello(node: str, nproc: int = 2, pid: int = 100, run_id: str = "run-1") -> Event:
    fields: dict[str, Any] = {"host": HOSTS[node], "next_addr": "127.0.0.1", "next_port": 21000 + ord(node)}
    return node, m.Hello(id=next(_ids), run_id=run_id, node=node, pid=pid, nproc=nproc, **fields)


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


def stopped(node: str, cycle: int, statuses: dict[int, int], *failures: m.Failure, step: int | None = None) -> Event:
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
        **done,
    )


def stop_request(node: str, signum: int = 15) -> Event:
    return node, m.StopRequest(id=next(_ids), signum=signum, node=node)


def training(cycle: int, steps: int, places: dict[str, list[int]], commit: int | None = None) -> list[Event]:
    """The ranks of a cycle start, restore and train `steps` steps."""
    base = 1_000 * (cycle + 1)
    lead = next(iter(places))
    events = [started(node, cycle, ranks) for node, ranks in places.items()]
    events += [note(n, cycle, r, "attached", base + 200 + r) for n, ranks in places.items() for r in ranks]
    events.append(note(lead, cycle, 0, "restored", base + 240, step=0, source="none"))
    if steps:
        events.append(note(lead, cycle, 0, "first_step", base + 250, step=1))
    events += [beat(node, cycle, s) for s in range(2, steps + 1) for node in places]
    if commit is not None:
        events += [grant(lead, cycle, commit)]
        events += [note(lead, cycle, 0, "committed", base + 400, step=commit, checkpoint=f"c{cycle}-{commit}")]
    return events


ONE = {"a": [0, 1]}
TWO = {"a": [0, 1], "b": [2, 3]}
BUG = {"error_type": "ValueError", "frame": "train.py:7 in main", "traceback": "Traceback ...\nValueError: x\n"}
TAKEN = {"error_type": "DistNetworkError", "message": "code: -98, name: EADDRINUSE, message: address already in use"}


def finish(cycle: int, places: dict[str, list[int]], step: int | None) -> list[Event]:
    return [stopped(n, cycle, dict.fromkeys(ranks, 0), step=step) for n, ranks in places.items()]


def broken(
    cycle: int,
    *failures: m.Failure,
    kind: str = "exit",
    step: int | None = 3,
    places: dict[str, list[int]] | None = None,
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


def lives() -> dict[str, tuple[int, list[Event], Ending, int]]:
    """name -> (nodes, events, how it ends, restarts that count)."""
    one, two = [hello("a")], [hello("a"), hello("b")]
    killed = failure(1, -9)
    other = failure(0, 1, time_ns=700, cascade=True, error_type="DistBackendError")
    given_back = [
        [fault("a", c, 0, "spawn"), stopped("a", c, {}, failure(0, 1, **TAKEN))] for c in range(MAX_PORT_RETRIES + 1)
    ]
    return {
        "finished": (1, [*one, *training(0, 4, ONE, 2), *finish(0, ONE, 4)], ("succeeded", 0, "finished"), 0),
        "killed once": (
            2,
            [
                *two,
                *training(0, 3, TWO, 2),
                *broken(0, failure(2, -9), other, places=TWO),
                *training(1, 4, TWO),
                *finish(1, TWO, 4),
            ],
            ("succeeded", 0, "finished"),
            1,
        ),
        "hung, then killed": (
            1,
            [
                *one,
                *training(0, 3, ONE),
                *broken(0, kind="hang"),
                *training(1, 0, ONE),
                *broken(1, killed, step=None),
                *training(2, 2, ONE, 1),
                *finish(2, ONE, 2),
            ],
            ("succeeded", 0, "finished"),
            2,
        ),
        "exit 42": (
            1,
            [*one, *training(0, 2, ONE), *broken(0, failure(1, 42), step=2)],
            ("failed", 42, "config_or_code_bug"),
            0,
        ),
        "exit 43": (
            1,
            [*one, *training(0, 2, ONE, 1), *broken(0, failure(1, 43), step=2)],
            ("failed", 43, "numerical_guard"),
            0,
        ),
        "the same failure twice": (
            1,
            [
                *one,
                *training(0, 3, ONE),
                *broken(0, failure(1, 1, **BUG), other),
                *training(1, 3, ONE),
                *broken(1, failure(1, 1, **BUG), other),
            ],
            ("failed", 42, "code_bug"),
            1,
        ),
        "the same failure at another step, then the end of the budget": (
            1,
            [
                *one,
                *[
                    e
                    for c in range(4)
                    for e in (
                        *training(c, 3 + c, ONE),
                        *broken(c, failure(1, 1, **BUG), step=3 + c),
                    )
                ],
            ],
            ("failed", 1, "budget_exhausted"),
            3,
        ),
        "asked to stop while training": (
            2,
            [*two, *training(0, 3, TWO, 2), stop_request("b"), *finish(0, TWO, 3)],
            ("stopped", 143, "preempted"),
            0,
        ),
        "interrupted while a fault is handled": (
            1,
            [*one, *training(0, 3, ONE), *(e := broken(0, killed))[:1], stop_request("a", 2), *e[1:]],
            ("stopped", 130, "interrupted"),
            0,
        ),
        "asked to stop before anything ran": (2, [two[0], stop_request("a")], ("stopped", 143, "preempted"), 0),
        "a node is lost and another takes its place": (
            2,
            [
                *two,
                *training(0, 3, TWO, 2),
                ("b", None),
                stopped("a", 0, {0: 1, 1: 1}, other, step=3),
                hello("c"),
                *training(1, 4, {"a": [0, 1], "c": [2, 3]}),
                *finish(1, {"a": [0, 1], "c": [2, 3]}, 4),
            ],
            ("succeeded", 0, "finished"),
            0,
        ),
        "ports that are taken": (
            1,
            [*one, *itertools.chain(*given_back), *training(4, 2, ONE), *finish(4, ONE, 2)],
            ("succeeded", 0, "finished"),
            1,
        ),
        "one rank leaves early": (
            1,
            [
                *one,
                *training(0, 3, ONE),
                fault("a", 0, 1),
                stopped("a", 0, {0: 0, 1: 1}, failure(1, 1, cascade=True, error_type="DistBackendError"), step=3),
                *training(1, 3, ONE),
                *finish(1, ONE, 3),
            ],
            ("succeeded", 0, "finished"),
            1,
        ),
        "a script that reports no steps": (
            1,
            [*one, started("a", 0, [0, 1], expect_steps=False), *finish(0, ONE, None)],
            ("succeeded", 0, "finished"),
            0,
        ),
    }


LIVES = lives()
BUDGET = {"the same failure at another step, then the end of the budget": 3}


def open_lead(run_dir: Path, name: str, attempt: int | None = None) -> Lead:
    return Lead(run_dir, LIVES[name][0], BUDGET.get(name, 10), attempt)


def settled(marks: list[Mark]) -> tuple[Counter[Any], dict[int, Any]]:
    """What accounting depends on: all marks but samples of progress, and the highest step of each cycle."""
    counts = Counter(
        (k.kind, k.cycle, k.attempt, None if k.kind in CLOCK_MARKS else k.t_ns, to_json(k.attrs))
        for k in marks
        if k.kind not in ("gap", "step")
    )
    # A node that is lost takes the samples with it that the coordinator knew and had not written down yet.
    lost = {k.cycle for k in marks if k.kind == "fault" and k.attrs["kind"] == "node_lost"}
    last = {k.cycle: (k.t_ns, k.attrs["step"]) for k in marks if k.kind == "step" and k.cycle not in lost}
    return counts, last


@pytest.mark.parametrize("name", LIVES)
def test_a_life_ends_as_it_should(name: str, run_dir: Path) -> None:
    _, events, ending, counted = LIVES[name]
    lead = open_lead(run_dir, name)
    for node, message in events:
        assert lead.ending is None, f"ended before {message}"
        if isinstance(message, m.Started | m.Stopped | m.StopRequest):
            # What agents do is what they were told to do.
            command = lead.job.command_for(node)
            if isinstance(message, m.Started):
                assert isinstance(command, m.StartCycle)
                assert (command.cycle, command.world_size) == (
                    message.cycle,
                    sum(2 for _ in command.record["active_nodes"]),
                )
                assert command.first_rank == message.ranks[0]["rank"]
            elif isinstance(message, m.Stopped) and any(message.statuses.values()):
                assert command == m.StopCycle(epoch=1, cycle=message.cycle, reason=command.reason)  # type: ignore[union-attr]
        reply = lead.take((node, message))
        assert reply is None or (reply.ok, reply.id) == (True, message.id if message is not None else 0)
    assert lead.ending == ending
    assert lead.job.counted == counted
    for node in lead.connected:
        end = lead.job.command_for(node)
        assert isinstance(end, m.End)
        assert (end.outcome, end.exit_code, end.cause) == ending
    kinds = Counter((k.kind, k.cycle) for k in lead.job.marks)
    once = ("run_started", "cycle_started", "assigned", "attached", "restored", "first_step", "fault", "cycle_ended")
    assert all(n == 1 for (kind, _), n in kinds.items() if kind in once)
    part = partition(lead.job.marks)
    assert sum(part.phases_ns.values()) == part.wall_ns
    lead.close()


class Told:
    """A life told once without a crash: the journal after every event, and how it came out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events = LIVES[name][1]
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            lead = open_lead(Path(folder), name)
            self.files = [lead.journal.path.read_bytes()]
            self.connected = [set(lead.connected)]
            for event in self.events:
                lead.take(event)
                self.files.append(lead.journal.path.read_bytes())
                self.connected.append(set(lead.connected))
            self.verdict, self.marks = lead.job.verdict, settled(lead.job.marks)
            lead.close()

    def cuts(self, index: int) -> list[int]:
        """Ends of every record written for event `index`, and where it began."""
        before, after = len(self.files[index]), self.files[index + 1]
        return [before, *(i + 1 for i in range(before, len(after)) if after[i] == 10)]

    def crash(self, run_dir: Path, index: int, cut: int) -> Lead:
        """A new coordinator after one that died while it handled event `index`, with `cut` bytes on the disk."""
        shutil.rmtree(run_dir / "journal", ignore_errors=True)
        (run_dir / "journal").mkdir()
        epoch_path(run_dir, 1).write_bytes(self.files[index + 1][:cut])
        return self.next_lead(run_dir, index)

    def next_lead(self, run_dir: Path, index: int) -> Lead:
        lead = open_lead(run_dir, self.name, attempt=0)
        dead = {node for node, message in self.events[index : index + 1] if message is None}
        for node in sorted(self.connected[index] - dead):
            first = next(e for e in self.events if e[0] == node and isinstance(e[1], m.Hello))
            lead.take(first)
        return lead

    def living(self, index: int) -> list[Event]:
        """Everything that nodes which are still there after it have said before event `index`."""
        return [e for e in self.events[:index] if e[0] in self.connected[index + 1] and e[1] is not None]


_told: dict[str, Told] = {}


def told(name: str) -> Told:
    if name not in _told:
        _told[name] = Told(name)
    return _told[name]


@pytest.mark.parametrize("duplicates", [False, True], ids=["unanswered", "everything again"])
@pytest.mark.parametrize("name", LIVES)
def test_a_coordinator_killed_at_any_record_loses_nothing(name: str, duplicates: bool, run_dir: Path) -> None:
    life = told(name)
    for index in range(len(life.events)):
        for cut in life.cuts(index):
            lead = life.crash(run_dir, index, cut)
            for event in [*(life.living(index) if duplicates else []), *life.events[index:]]:
                lead.take(event)
            assert lead.job.verdict == life.verdict, f"event {index}, cut at {cut}"
            assert settled(lead.job.marks) == life.marks, f"event {index}, cut at {cut}"
            lead.close()


@given(name=st.sampled_from(sorted(LIVES)), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_any_number_of_crashes_and_any_duplicates_change_nothing(name: str, seed: int) -> None:
    life, rng = told(name), random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run_dir = Path(folder)
        lead = open_lead(run_dir, name)
        for index, event in enumerate(life.events):
            for _ in range(rng.choice([0, 0, 0, 1, 2])):
                # It dies while it handles this event: any part of what that wrote is on the disk.
                before = lead.journal.path.stat().st_size
                lead.take(event)
                after = lead.journal.path.stat().st_size
                lead.close()
                os.truncate(lead.journal.path, rng.randint(before, after))
                lead = life.next_lead(run_dir, index)
            for again in life.living(index):
                if rng.random() < 0.2:
                    lead.take(again)
            lead.take(event)
            for _ in range(rng.choice([0, 0, 1])):
                lead.take(event)
        assert lead.job.verdict == life.verdict
        assert settled(lead.job.marks) == life.marks
        lead.close()


class TestJoin:
    def test_another_run_is_refused(self, run_dir: Path) -> None:
        reply = Lead(run_dir, 1).take(hello("a", run_id="other"))
        assert reply is not None
        assert reply.error == "this is run 'run-1', not 'other'"

    def test_a_name_that_is_taken_says_by_whom(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        lead.take(hello("a", pid=100))
        reply = lead.take(hello("a", pid=200))
        assert reply is not None
        assert "'a' is taken by host host-a pid 100; start this one with another --node-name" in (reply.error or "")

    def test_a_node_more_than_the_job_has_is_refused(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        lead.take(hello("a"))
        lead.take(hello("b"))
        reply = lead.take(hello("c"))
        assert reply is not None
        assert reply.error == "the job has its 2 nodes: a, b"
        assert set(lead.job.nodes) == {"a", "b"}

    def test_no_cycle_before_every_node_is_connected(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        lead.take(hello("a"))
        assert (lead.job.phase, lead.job.command_for("a")) == ("forming", None)
        lead.take(hello("b"))
        commands = [lead.job.command_for(n) for n in ("a", "b")]
        assert [c.first_rank for c in commands if isinstance(c, m.StartCycle)] == [0, 2]
        assert [c.node_index for c in commands if isinstance(c, m.StartCycle)] == [0, 1]

    def test_a_launcher_started_again_under_its_name_has_lost_its_ranks(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO)]:
            lead.take(event)
        lead.connected.discard("b")
        lead.take(hello("b", pid=101))
        assert isinstance(lead.job.command_for("a"), m.StopCycle)
        lead.take(stopped("a", 0, {0: 0, 1: 0}, step=3))
        assert [type(lead.job.command_for(n)) for n in ("a", "b")] == [m.StartCycle] * 2
        assert lead.job.counted == 0

    def test_when_the_others_never_come_the_job_ends_and_says_who_was_there(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 3)
        lead.take(hello("b"))
        for record in lead.job.give_up_joining(9, 60):
            lead.job.apply(record)
        assert lead.ending == ("failed", 1, "join_timeout")
        assert lead.job.verdict is not None
        assert "1 of 3 nodes within 60 s (b)" in (lead.job.verdict.message or "")

    def test_the_same_launcher_that_connects_again_has_lost_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), hello("b")]:
            lead.take(event)
        assert lead.job.phase == "running"


class TestCycles:
    def test_the_given_port_is_for_the_first_cycle_only(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE)]:
            lead.take(event)
        first = lead.job.cycle
        for event in broken(0, failure(1, -9)):
            lead.take(event)
        second = lead.job.cycle
        assert first is not None
        assert second is not None
        assert (first.master_port, second.master_port, second.number) == (29500, 22000, 1)

    def test_only_the_first_fault_of_a_cycle_counts(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), fault("b", 0, 3), fault("a", 0, 0, "hang")]:
            lead.take(event)
        assert lead.job.cycle is not None
        assert lead.job.cycle.fault is not None
        assert (lead.job.cycle.fault.rank, lead.job.cycle.fault.kind) == (3, "exit")

    def test_messages_of_an_old_cycle_are_refused_and_change_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE), *broken(0, failure(1, -9)), *training(1, 3, ONE)]:
            lead.take(event)
        before = (lead.job.marks[:], lead.journal.path.stat().st_size)
        old: list[m.FromAgent] = [
            m.KvSet(id=1, cycle=0, key="k", value=1),
            m.Grant(id=2, cycle=0, checkpoint="c", step=3),
            m.Beat(id=3, cycle=0, completed=9, at_ns=9),
            m.Note(id=4, cycle=0, rank=0, kind="committed", t_ns=9, attrs={"step": 3}),
        ]
        for message in old:
            reply = lead.take(("a", message))
            assert reply == m.Reply(epoch=1, id=message.id, ok=False, error="cycle 0 is over (current: 1)")
        assert (lead.job.marks, lead.journal.path.stat().st_size) == before

    def test_nothing_may_be_published_once_the_cycle_is_being_stopped(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE)]:
            lead.take(event)
        granted = lead.take(grant("a", 0, 3))
        lead.take(fault("a", 0, 1))
        refused = lead.take(grant("a", 0, 3))
        assert granted is not None
        assert refused is not None
        assert (granted.result, refused.result) == ({"granted": True}, {"granted": False})
        assert [r["step"] for r in read_records(run_dir) if r["type"] == "grant"] == [3]

    def test_a_rank_cannot_make_the_coordinators_own_marks(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE)]:
            lead.take(event)
        marks = lead.job.marks[:]
        for kind in ("run_ended", "fault", "cycle_started", "no_such_kind"):
            reply = lead.take(note("a", 0, 0, kind, 9))
            assert reply is not None
            assert (reply.ok, reply.error) == (False, f"no mark {kind!r} from a rank")
        assert lead.job.marks == marks

    def test_progress_is_that_of_the_slowest_node_and_only_rises(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 1, TWO)]:
            lead.take(event)
        for node, completed in [("a", 5), ("b", 3), ("b", 4), ("b", 9), ("a", 5), ("a", 7)]:
            lead.take(beat(node, 0, completed))
        assert [k.attrs["step"] for k in lead.job.marks if k.kind == "step"] == [3, 4, 5, 7]

    def test_attached_counts_when_the_last_rank_is_there(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), started("a", 0, [0, 1])]:
            lead.take(event)
        lead.take(note("a", 0, 1, "attached", 900))
        assert [k for k in lead.job.marks if k.kind == "attached"] == []
        lead.take(note("a", 0, 0, "attached", 800))
        assert [k.t_ns for k in lead.job.marks if k.kind == "attached"] == [900]


class TestSharedKeys:
    @pytest.fixture
    def lead(self, run_dir: Path) -> Iterator[Lead]:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 2, ONE)]:
            lead.take(event)
        yield lead
        lead.close()

    @staticmethod
    def result(lead: Lead, message: m.FromAgent) -> Any:
        reply = lead.take(("a", message))
        assert reply is not None
        return reply.result

    @pytest.mark.parametrize("value", [1, "x", None, False, 0, {}, [None]])
    def test_the_first_compare_and_set_wins_whatever_its_value(self, lead: Lead, value: Any) -> None:
        first = m.KvSet(id=1, cycle=0, key="k", value=value, only_if_absent=True)
        second = m.KvSet(id=2, cycle=0, key="k", value="later", only_if_absent=True)
        assert self.result(lead, first) == {"value": value}
        assert self.result(lead, second) == {"value": value}
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": True, "value": value}

    def test_a_set_replaces(self, lead: Lead) -> None:
        self.result(lead, m.KvSet(id=1, cycle=0, key="k", value=1))
        assert self.result(lead, m.KvSet(id=2, cycle=0, key="k", value=2)) == {"value": 2}
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": True, "value": 2}

    def test_an_absent_key(self, lead: Lead) -> None:
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": False, "value": None}

    def test_keys_end_with_their_cycle(self, lead: Lead) -> None:
        self.result(lead, m.KvSet(id=1, cycle=0, key="k", value=1))
        for event in broken(0, failure(1, -9)):
            lead.take(event)
        assert self.result(lead, m.KvGet(id=2, cycle=1, key="k")) == {"found": False, "value": None}


class TestStopRequest:
    """In every phase of a cycle."""

    def test_between_two_cycles(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), *finish(0, ONE, 3)]:
            lead.take(event)
        assert lead.job.phase == "forming"
        lead.take(stop_request("a", 2))
        assert lead.ending == ("stopped", 130, "interrupted")
        assert [k.cycle for k in lead.job.marks if k.kind == "cycle_ended"] == [0]

    def test_before_the_ranks_were_started(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), started("a", 0, [0, 1]), stop_request("a")]:
            lead.take(event)
        assert [lead.job.command_for(n) for n in ("a", "b")] == [m.AskStop(epoch=1, cycle=0, signum=15)] * 2
        lead.take(stopped("b", 0, {}))
        lead.take(stopped("a", 0, {0: -15, 1: -15}, failure(0, -15, stopped_by_us=True)))
        assert lead.ending == ("stopped", 143, "preempted")

    def test_the_first_signal_names_the_exit_code(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE), stop_request("a", 15), stop_request("a", 2)]:
            lead.take(event)
        for event in finish(0, ONE, 3):
            lead.take(event)
        assert lead.ending == ("stopped", 143, "preempted")

    def test_after_the_verdict_it_changes_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE), *finish(0, ONE, 3), stop_request("a")]:
            lead.take(event)
        assert lead.ending == ("succeeded", 0, "finished")


class TestAttempts:
    def test_a_new_attempt_forms_again_and_goes_on_counting_cycles(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE, 2), *broken(0, failure(1, -9)), *training(1, 2, ONE)]:
            lead.take(event)
        lead.close()
        lead = Lead(run_dir, 1)
        assert (lead.job.attempt, lead.job.phase, lead.job.counted, lead.job.nodes) == (1, "forming", 0, {})
        assert lead.job.last_committed == 2
        lead.take(hello("a", pid=101))
        assert lead.job.cycle is not None
        assert (lead.job.cycle.number, lead.job.cycle.started) == (2, {})

    def test_the_same_attempt_goes_on_with_its_cycle(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 1)
        for event in [hello("a"), *training(0, 3, ONE)]:
            lead.take(event)
        lead.close()
        lead = Lead(run_dir, 1, attempt=0)
        assert (lead.job.phase, lead.job.epoch) == ("running", 2)
        assert lead.job.command_for("a") is None


class TestFaultMark:
    def test_the_first_failing_rank_is_named_and_not_the_loudest(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        quiet = failure(3, -9, time_ns=600)
        loud = failure(0, 1, time_ns=590, cascade=True, error_type="DistBackendError", traceback="long\n" * 50)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), *broken(0, loud, quiet, places=TWO)]:
            lead.take(event)
        (mark,) = [k for k in lead.job.marks if k.kind == "fault"]
        assert (mark.attrs["rank"], mark.attrs["node"], mark.attrs["cause"]) == (3, "b", "unknown")
        assert mark.attrs["detail"] == "rank 3: SIGKILL"

    def test_a_loss_names_the_node(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), *finish(0, ONE, 3)]:
            lead.take(event)
        (mark,) = [k for k in lead.job.marks if k.kind == "fault"]
        assert (mark.attrs["kind"], mark.attrs["node"], mark.t_ns) == ("node_lost", "b", 5_000)

    def test_a_node_that_was_lost_may_still_say_that_it_stopped(self, run_dir: Path) -> None:
        lead = Lead(run_dir, 2)
        for event in [hello("a"), hello("b"), *training(0, 3, TWO), ("b", None)]:
            lead.take(event)
        reply = lead.take(stopped("b", 0, {2: -9, 3: -9}))
        assert reply is not None
        assert reply.ok
        assert "b" not in lead.job.nodes
