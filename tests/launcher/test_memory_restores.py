"""What a job remembers of restores that came from memory: progress, what is durable, the cycle's record, the high-water mark."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.runfolder import cycle_record
from keepstep.launcher.views.runstate import read_state
from tests.launcher.lives import (
    ONE,
    SWAPPED,
    TWO,
    Event,
    Lead,
    broken,
    dump,
    failure,
    finish,
    halted,
    hello,
    replayed,
    shape,
    training,
)

KILLED = failure(1, -9)
DIGEST = "ab" * 32
_ids = itertools.count(1)


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    made = Lead(tmp_path, shape())
    made.tell(hello("a"))
    return made


def crash(cycle: int, restored: int, source: str, steps: int = 3, commit: int | None = None) -> list[Event]:
    return [*training(cycle, steps, ONE, commit, restored, source), *broken(cycle, KILLED, step=restored + steps)]


@pytest.mark.parametrize("source", ["shm", "peer", "disk", "object"])
def test_the_record_of_a_cycle_says_where_it_went_on_from(source: str, lead: Lead) -> None:
    lead.tell(*training(0, 3, ONE, commit=2), *broken(0, KILLED))
    lead.tell(*training(1, 2, ONE, restored=2, source=source))
    record = cycle_record(lead.job, ended=False)
    assert (record.restored_step, record.restored_from) == (2, source)
    assert record.recovery == ("checkpoint" if source in ("disk", "object") else "respawn")
    lead.close()


def test_a_source_that_is_no_tier_is_none(lead: Lead) -> None:
    lead.tell(*training(0, 2, ONE, restored=2, source="tape"))
    assert cycle_record(lead.job, ended=False).restored_from == "none"
    lead.close()


def test_a_spare_that_went_on_from_its_peers_memory_is_a_swap(tmp_path: Path) -> None:
    lead = Lead(tmp_path, shape(2, spares=1))
    lead.tell(hello("a"), hello("b"), hello("c"))
    lead.tell(*training(0, 3, TWO, commit=2), ("b", None), *halted(0, {"a": [0, 1]}))
    lead.tell(*training(1, 2, SWAPPED, restored=3, source="peer"))
    record = cycle_record(lead.job, ended=False)
    assert (record.recovery, record.restored_from) == ("spare", "peer")
    lead.close()


class TestProgress:
    """Failed cycles of a job that saves to memory often and to disk once."""

    def test_each_restore_from_memory_at_a_higher_step_is_progress(self, lead: Lead) -> None:
        lead.tell(*crash(0, 0, "none", commit=2))
        for cycle in range(1, 8):
            lead.tell(*crash(cycle, 2 + 3 * cycle, "shm"))
            assert lead.ending is None
        assert lead.job.progress.count == 0
        lead.close()

    def test_going_on_from_the_same_step_of_memory_again_and_again_is_none(self, lead: Lead) -> None:
        lead.tell(*crash(0, 0, "none", commit=2))
        lead.tell(*crash(1, 50, "shm"))
        assert lead.job.progress.count == 0
        for cycle in (2, 3, 4):
            assert lead.ending is None
            # Each time a little further, so that it is the marker that ends it and no repeated failure.
            lead.tell(*crash(cycle, 50, "shm", steps=3 + cycle))
        assert lead.ending == ("no_restart", 93, "no_progress")
        lead.close()

    def test_memory_alone_counts_before_anything_was_committed(self, lead: Lead) -> None:
        lead.tell(*crash(0, 0, "none"))
        for cycle in (1, 2, 3, 4):
            assert lead.ending is None
            lead.tell(*crash(cycle, 5, "shm", steps=3 + cycle))
        assert lead.ending == ("no_restart", 93, "no_progress")
        assert lead.job.last_committed is None
        lead.close()


class TestDurable:
    def test_what_only_memory_had_is_never_called_committed(self, lead: Lead, tmp_path: Path) -> None:
        lead.tell(*crash(0, 0, "none", commit=2), *crash(1, 7, "shm"), *training(2, 2, ONE, restored=9, source="peer"))
        assert read_state(tmp_path).committed_step == 2
        lead.tell(*finish(2, ONE, 11))
        assert lead.job.verdict is not None
        assert lead.job.verdict.last_committed_step == 2
        lead.close()

    def test_a_commit_beyond_the_memory_it_went_on_from_was_refused(self, lead: Lead, tmp_path: Path) -> None:
        lead.tell(*crash(0, 0, "none", commit=8), *training(1, 2, ONE, restored=5, source="shm"))
        assert lead.job.last_committed is None
        assert read_state(tmp_path).committed_step is None
        lead.close()

    def test_a_restore_from_an_object_store_is_durable(self, lead: Lead, tmp_path: Path) -> None:
        lead.tell(*training(0, 2, ONE, restored=5, source="object"))
        assert (lead.job.last_committed, read_state(tmp_path).committed_step) == (5, 5)
        lead.close()


class TestHighWater:
    @staticmethod
    def put(
        lead: Lead, step: int, rebase: str = "", root: str = "root", digest: str = DIGEST, cycle: int = 0
    ) -> m.Reply:
        mark = m.HighWater(step=step, cycle=0, digest=digest)
        reply = lead.take(("a", m.MarkSet(id=next(_ids), cycle=cycle, root_id=root, mark=mark, rebase=rebase)))
        assert reply is not None
        return reply

    @staticmethod
    def get(lead: Lead, root: str = "root") -> m.HighWater | None:
        reply = lead.take(("a", m.MarkGet(id=next(_ids), cycle=lead.job.last_cycle, root_id=root)))
        assert reply is not None and reply.ok
        found = reply.result["mark"]
        assert found is None or isinstance(found, m.HighWater)
        return found

    def test_it_rises_and_goes_back_only_with_a_reason(self, lead: Lead, tmp_path: Path) -> None:
        assert self.get(lead) is None
        assert self.put(lead, 10).ok
        assert self.put(lead, 20).ok
        refused = self.put(lead, 10)
        assert not refused.ok and "step 20" in str(refused.error) and "signed rollback" in str(refused.error)
        assert self.get(lead) == m.HighWater(step=20, cycle=0, digest=DIGEST)
        assert self.put(lead, 10, rebase="corrupt data since step 12").ok
        assert self.get(lead) == m.HighWater(step=10, cycle=0, digest=DIGEST)
        assert self.get(lead, "another") is None
        lead.close()
        journal = "".join(p.read_text() for p in (tmp_path / "journal").glob("*.jsonl"))
        assert journal.count('"high_water"') == 3 and "corrupt data since step 12" in journal

    def test_it_outlives_coordinators_and_attempts(self, lead: Lead, tmp_path: Path) -> None:
        self.put(lead, 10)
        self.put(lead, 10)
        lead.close()
        assert dump(replayed(tmp_path, shape())) == dump(lead.job)
        again = Lead(tmp_path, shape())
        assert again.job.attempt == 1
        again.tell(hello("a"))
        assert self.get(again) == m.HighWater(step=10, cycle=0, digest=DIGEST)
        again.close()

    def test_a_cycle_that_is_over_sets_nothing(self, lead: Lead) -> None:
        lead.tell(*crash(0, 0, "none"))
        reply = self.put(lead, 10, cycle=0)
        assert not reply.ok and "cycle 0 is over" in str(reply.error)
        lead.close()

    @pytest.mark.parametrize(
        ("step", "root", "digest"), [(-1, "root", DIGEST), (1, "a/b", DIGEST), (1, "", DIGEST), (1, "root", "x")]
    )
    def test_what_is_no_mark_is_refused(self, step: int, root: str, digest: str, lead: Lead) -> None:
        assert not self.put(lead, step, root=root, digest=digest).ok
        lead.close()
