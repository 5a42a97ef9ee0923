"""The head of the surviving lineage: an abandoned branch is never chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    checkpointer,
    restore_value,
    save_steps,
)

from keepstep.checkpoint.format.layout import FolderName, check_run_id, parse_folder_name
from keepstep.checkpoint.restore.lineage import Listed, mark_abandoned
from keepstep.checkpoint.trust.manifest import Facts, Manifest, Writer
from keepstep.records.errors import ConfigError


def test_folder_names_have_one_spelling() -> None:
    name = FolderName(1200, 3, 1, 0, "job-step-7")
    assert name.text == "job-step-7-step-00001200-c0003-a0001"
    assert parse_folder_name(name.text) == name
    retry = FolderName(1200, 3, 1, 2, "job7")
    assert retry.text.endswith("-a0001r2")
    assert parse_folder_name(retry.text) == retry
    for bad in [
        "job7-step-1200-c0003-a0001",
        "job7-step-000001200-c0003-a0001",
        "job7-step-00001200-c0003-a0001r0",
        "job7-step-00001200-c0003-a0001r01",
        "../job7-step-00001200-c0003-a0001",
        ".job7-step-00001200-c0003-a0001",
        "job7-step-00001200-c0003-a0001\n",
        "latest",
    ]:
        assert parse_folder_name(bad) is None, bad


@pytest.mark.parametrize("bad", ["", "a/b", "..", ".hidden", "a b", "x" * 129, "a\n"])
def test_run_ids_that_cannot_be_in_a_folder_name_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        check_run_id(bad)


def _entry(name: FolderName, restored: int, life_ns: int, created_ns: int, scope: str | None = None) -> Listed:
    facts = Facts(
        run=name.run_id,
        step=name.step,
        cycle=name.cycle,
        attempt=name.attempt,
        world=1,
        parent=None,
        writer=Writer(host="h", pid=1),
        created_at="",
        created_ns=created_ns,
        restored_step=restored,
        life_started_ns=life_ns,
        scope=scope,
    )
    manifest = Manifest(files=(), facts=facts, root_digest="", signed=True, digest=name.text)
    return Listed(name=name, committed=True, manifest=manifest)


class _Disk:
    """Replays lives of a job and knows, independently, which checkpoints are ancestors of the current state."""

    def __init__(self) -> None:
        self.entries: list[Listed] = []
        self.dead: set[str] = set()
        self.clock_ns = 0
        self.lost: set[str] = set()

    def candidates(self) -> list[Listed]:
        marked = mark_abandoned(sorted(self.entries, key=lambda entry: entry.name, reverse=True))
        return [entry for entry in marked if entry.candidate and entry.name.text not in self.lost]

    def live(self, run: str, cycle: int, attempt: int, saves: list[int], fresh: bool) -> None:
        self.clock_ns += 10
        life_ns = self.clock_ns
        found = [] if fresh else self.candidates()
        start = found[0].name.step if found else 0
        before = list(self.entries)
        step = start
        for at, gap in enumerate(saves):
            step += gap
            self.clock_ns += 1
            if at == 0:
                # The first commit of this life is what abandons everything that it went back over.
                self.dead |= {entry.name.text for entry in before if entry.name.step > start}
            same = [entry.name for entry in self.entries if entry.name.step == step and entry.name.run_id == run]
            retry = sum((name.cycle, name.attempt) == (cycle, attempt) for name in same)
            self.entries.append(_entry(FolderName(step, cycle, attempt, retry, run), start, life_ns, self.clock_ns))


lives = st.lists(
    st.tuples(
        st.lists(st.integers(1, 30), max_size=4),  # gaps between saves; empty: died before its first commit
        st.booleans(),  # a new attempt begins
        st.sampled_from([False, False, False, True]),  # fresh start
        st.integers(0, 3),  # how many of the newest candidates turn out to be damaged first
        st.sampled_from(["same", "same", "other"]),  # run id
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(lives, st.booleans())  # does the cycle counter work (a launcher), or stay at 0 (plain python)?
def test_an_abandoned_branch_is_never_a_candidate(
    story: list[tuple[list[int], bool, bool, int, str]], counted: bool
) -> None:
    disk = _Disk()
    run, cycle, attempt = "run0", 0, 0
    for number, (saves, new_attempt, fresh, damaged, identity) in enumerate(story):
        attempt += new_attempt
        cycle = cycle + 1 if counted else 0
        if identity == "other":
            run, cycle = f"run{number}", 0
        for entry in disk.candidates()[:damaged]:
            disk.lost.add(entry.name.text)
        disk.live(run, cycle, attempt, saves, fresh)
        found = disk.candidates()
        assert not {entry.name.text for entry in found} & disk.dead
        alive = {entry.name.text for entry in disk.entries} - disk.dead - disk.lost
        assert {entry.name.text for entry in found} == alive, "a live ancestor was lost"


def test_a_life_that_looked_at_one_run_abandons_nothing_of_others() -> None:
    entries = [
        _entry(FolderName(500, 0, 0, 0, "a"), 0, 10, 11),
        _entry(FolderName(100, 0, 0, 0, "b"), 0, 20, 21, scope="b"),
    ]
    assert [entry.abandoned_by for entry in mark_abandoned(entries)] == [None, None]


def test_rollback_on_disk_hides_the_newer_branch(root: Path) -> None:
    save_steps(root, [10, 20, 30], cycle=0)
    newest = sorted(root.glob("*step-00000030*"))[0]
    (newest / "index.json").write_bytes(b"{}")
    assert restore_value(root, cycle=1) == [(20, 20.0)]
    save_steps(root, [25], cycle=2)
    # Repaired and taken out of quarantine, the old branch is still not the one training is on.
    (root / ".keepstep" / "quarantine" / f"{newest.name}.json").unlink()
    assert restore_value(root, cycle=3) == [(25, 25.0)]


def test_fresh_start_begins_a_lineage_that_wins_over_higher_steps(root: Path) -> None:
    save_steps(root, [100], cycle=0)
    run = FakeRun(RecordingChannel(), cycle=1, attempt=2)
    ckpt = checkpointer(root, {"w": torch.full((40_000,), 5.0), "loader": Loader(0)}, run)
    assert ckpt.restore(fresh_start=True) == 0
    ckpt.save(5)
    ckpt.close()
    # The launcher restarts the ranks with the same environment: that must not throw the new lineage away.
    run = FakeRun(RecordingChannel(), cycle=2, attempt=2)
    again = checkpointer(root, {"w": torch.zeros(40_000), "loader": Loader(0)}, run)
    assert again.restore(fresh_start=True) == 5
    again.close()
    assert restore_value(root, cycle=3) == [(5, 5.0)]
