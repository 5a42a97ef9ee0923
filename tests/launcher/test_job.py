"""Whole lives of a job, told to `Job` as messages over a real journal; a coordinator that dies anywhere loses nothing of them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.goodput import partition
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.journal import epoch_path
from keepstep.records.codec import to_json
from keepstep.records.timeline import Mark
from tests.launcher.lives import STEP_NS, Closed, Event, Lead, Marker, dump, replayed
from tests.launcher.whole_lives import LIVES

CLOCK_MARKS = {"cycle_started", "decided", "replaced", "cycle_ended", "run_ended"}
"""Marks whose time is the coordinator's own clock and not a message's."""


def open_lead(run_dir: Path, name: str, attempt: int | None = None) -> Lead:
    return Lead(run_dir, LIVES[name].shape, attempt, LIVES[name].marker)


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


def check_told(lead: Lead, node: str, message: Any) -> None:
    """What agents do is what they were told to do."""
    command = lead.job.command_for(node)
    if isinstance(message, m.Started):
        assert isinstance(command, m.StartCycle)
        assert (command.cycle, command.first_rank) == (message.cycle, message.ranks[0]["rank"])
        assert command.world_size == sum(ranks for _, _, ranks in command.node_spans)
        assert command.nnodes == len(command.node_spans)
    elif isinstance(message, m.Stopped) and any(message.statuses.values()):
        cycle = lead.job.cycle
        assert cycle is not None
        if node not in cycle.lost:
            assert isinstance(command, m.StopCycle)
            assert command.cycle == message.cycle


@pytest.mark.parametrize("name", LIVES)
def test_a_life_ends_as_it_should(name: str, run_dir: Path) -> None:
    life = LIVES[name]
    lead = open_lead(run_dir, name)
    for node, message in life.events:
        assert lead.ending is None, f"ended before {message}"
        check_told(lead, node, message)
        reply = lead.take((node, message))
        assert reply is None or (isinstance(message, m.AgentMessage) and (reply.ok, reply.id) == (True, message.id))
    assert lead.ending == life.ending
    assert lead.job.counted == life.counted
    for node in lead.connected:
        end = lead.job.command_for(node)
        assert isinstance(end, m.End)
        assert (end.outcome, end.exit_code, end.cause) == life.ending
    kinds = Counter((k.kind, k.cycle) for k in lead.job.marks)
    once = ("run_started", "cycle_started", "assigned", "attached", "restored", "first_step", "fault", "cycle_ended")
    assert all(n == 1 for (kind, _), n in kinds.items() if kind in once)
    part = partition(lead.job.marks)
    assert sum(part.phases_ns.values()) == part.wall_ns
    lead.close()


@pytest.mark.parametrize("name", LIVES)
def test_a_message_that_comes_twice_has_no_second_effect(name: str, run_dir: Path) -> None:
    lead = open_lead(run_dir, name)
    for event in LIVES[name].events:
        lead.take(event)
        before, records = dump(lead.job), lead.journal.path.stat().st_size
        lead.take(event, again=True)
        after = dump(lead.job)
        if isinstance(event[1], m.Hello):
            # A launcher that connects again may have another port: it is written down as it is.
            after["version"] = before["version"]
        elif not isinstance(event[1], m.Grant):
            # That it was granted is on the disk before each answer that says so.
            assert lead.journal.path.stat().st_size == records
        assert after == before, event
    lead.close()


@pytest.mark.parametrize("name", LIVES)
def test_the_journal_gives_the_same_state_after_every_event(name: str, run_dir: Path) -> None:
    lead = open_lead(run_dir, name)
    for event in LIVES[name].events:
        lead.take(event)
        assert dump(replayed(run_dir, LIVES[name].shape)) == dump(lead.job)
    lead.close()


class Told:
    """A life told once without a crash: the journal after every event, and how it came out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events = LIVES[name].events
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
        lead.now_ns += STEP_NS * index
        markers = [message.value for _, message in self.events[:index] if isinstance(message, Marker)]
        lead.marker = markers[-1] if markers else lead.marker
        gone = {n for n, message in self.events[index : index + 1] if message is None or isinstance(message, Closed)}
        for node in sorted(self.connected[index] - gone):
            lead.take(self.hello_again(node, index), again=True)
        return lead

    def hello_again(self, node: str, index: int) -> Event:
        """What a node says when it connects to another coordinator: its newest Hello, and a fence is told only once."""
        said = [message for n, message in self.events[:index] if n == node and isinstance(message, m.Hello)]
        return node, msgspec.structs.replace(said[-1], fenced=False)

    def living(self, index: int) -> list[Event]:
        """All that launchers which are still there after event `index` have said before it."""
        here = self.connected[index] & self.connected[index + 1]
        events: list[Event] = []
        for node, message in self.events[:index]:
            if isinstance(message, m.Hello) and message.pid != self.pid(node, index):
                events = [e for e in events if e[0] != node]
            elif isinstance(message, m.AgentMessage) and node in here and not isinstance(message, m.Hello):
                events.append((node, message))
        return [*[self.hello_again(node, index) for node in sorted(here)], *events]

    def pid(self, node: str, index: int) -> int:
        said = [message.pid for n, message in self.events[:index] if n == node and isinstance(message, m.Hello)]
        return said[-1]


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
            for event in life.living(index) if duplicates else []:
                lead.take(event, again=True)
            lead.tell(*life.events[index:])
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
                    lead.take(again, again=True)
            lead.take(event)
            for _ in range(rng.choice([0, 0, 1])):
                lead.take(event, again=True)
        assert lead.job.verdict == life.verdict
        assert settled(lead.job.marks) == life.marks
        lead.close()
