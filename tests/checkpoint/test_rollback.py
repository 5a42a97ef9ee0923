"""A job never goes back without a reason somebody answers for, and never fails to start for a reason that it has."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.restore.freshness import judge, leaves_behind
from keepstep.checkpoint.restore.lineage import Listed, mark_abandoned
from keepstep.checkpoint.save.commit import writer_facts
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.permits import Permit
from keepstep.checkpoint.trust.rollback import (
    Mark,
    Position,
    after_commit,
    after_refusal,
    after_restore,
    check_rollback,
    check_start_at_zero,
    how_to_allow,
    is_dead,
    position_of,
)

Damage = Literal["none", "bytes", "marker"]


class Stored(msgspec.Struct):
    """A checkpoint in the root of the model; `damage` is what is really wrong with it."""

    listed: Listed
    damage: Damage = "none"
    unmarked: bool = False

    @property
    def name(self) -> str:
        return self.listed.name.text


class Job:
    """A job, its root and its mark, with the restore loop over the real rules. Time is counted, not measured."""

    def __init__(self) -> None:
        self.root: dict[str, Stored] = {}
        self.quarantine: set[str] = set()
        self.mark: Mark | None = None
        self.permits: list[Permit] = []
        self.now_ns = 1
        self.cycle = -1
        self.step = 0
        self.life_ns = 0
        self.life_step = 0
        self.timeline: list[str] = []  # what really led to the present weights, oldest first
        self.pending: list[str] | None = []
        self.refused = ""

    def tick(self) -> int:
        self.now_ns += 10
        return self.now_ns

    def begin(self, step: int) -> None:
        self.cycle += 1
        self.life_ns, self.life_step, self.step = self.tick(), step, step

    def commit(self, *, mark_lost: bool = False) -> Stored:
        self.step += 1
        name = FolderName(self.step, self.cycle, 1, 0, "r")
        facts = writer_facts(
            name, world=1, parent=None, restored_step=self.life_step, restored_from=None, scope="r", life_started_ns=0
        )
        facts = msgspec.structs.replace(facts, life_started_ns=self.life_ns, created_ns=self.tick())
        digest = hashlib.sha256(name.text.encode()).hexdigest()
        manifest = Manifest(files=(), facts=facts, root_digest="", signed=True, digest=digest)
        listed = Listed(name=name, committed=True, manifest=manifest, marker_sha256=digest)
        stored = Stored(listed, unmarked=mark_lost)
        self.root[name.text] = stored
        if self.pending is not None:
            self.timeline, self.pending = self.pending, None
        self.timeline.append(name.text)
        if not mark_lost:
            self.mark = after_commit(self.mark, position_of(manifest, name.text), self.life_step)
        return stored

    def listing(self) -> list[Listed]:
        found = [
            msgspec.structs.replace(
                stored.listed,
                quarantined=name in self.quarantine,
                manifest=None if stored.damage == "marker" else stored.listed.manifest,
                error="damaged" if stored.damage == "marker" else None,
                marker_sha256="broken" if stored.damage == "marker" else stored.listed.marker_sha256,
            )
            for name, stored in self.root.items()
        ]
        return mark_abandoned(sorted(found, key=lambda listed: listed.name, reverse=True))

    def restore(self, *, die_after_quarantine: bool = False) -> str | None:
        """As rank 0 does it; the folder restored, None when nothing was (then `refused` may say why)."""
        self.refused = ""
        found, rejected = self.listing(), set[str]()
        for entry in found:
            name = entry.name.text
            if not entry.candidate:
                continue
            permit = None
            if entry.manifest is not None:
                ruling = judge(entry, found, self.mark, self.permits, rejected)
                if ruling.action == "skip":
                    continue
                if ruling.action == "refuse":
                    self.refused = ruling.reason
                    return None
                permit = ruling.permit
            if self.root[name].damage != "none":
                rejected.add(name)
                if self.mark is not None:
                    self.mark = after_refusal(self.mark, name)
                self.quarantine.add(name)
                if die_after_quarantine:
                    return None
                continue
            assert entry.manifest is not None
            at = position_of(entry.manifest, name)
            self.begin(entry.name.step)
            self.mark = after_restore(
                self.mark,
                at,
                run="r",
                life_started_ns=self.life_ns,
                permit=permit,
                left_behind=leaves_behind(entry, found, self.mark),
            )
            assert not is_dead(at, self.mark.turns)
            return name
        return None

    def permit(self, target: str, nonce: str) -> Permit:
        assert self.mark is not None
        manifest = self.root[target].listed.manifest
        assert manifest is not None
        return permit_for(self.mark, position_of(manifest, target), nonce, self.tick())


def permit_for(mark: Mark, target: Position, nonce: str, created_ns: int = 1) -> Permit:
    return Permit(
        from_checkpoint=mark.at.checkpoint,
        from_step=mark.at.step,
        from_digest=mark.at.digest,
        to_checkpoint=target.checkpoint,
        to_step=target.step,
        to_digest=target.digest,
        reason="loss spike",
        by="somebody@host",
        created_at="",
        created_ns=created_ns,
        nonce=nonce,
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.booleans()),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("damage"), st.integers(0, 5), st.sampled_from(["bytes", "marker"])),
        st.tuples(st.just("fresh")),
    ),
    max_size=25,
)


def play(job: Job, operations: list[tuple[Any, ...]]) -> None:
    """Carry out an honest history: saves, restarts, damage of any of the last checkpoints, fresh starts.

    Each restart must take the newest undamaged checkpoint of those that led to the present.
    """
    job.begin(0)
    for operation in operations:
        if operation[0] == "commit":
            job.commit(mark_lost=operation[1])
        elif operation[0] == "damage":
            names = list(job.root)
            if names:
                hit = job.root[names[-1 - operation[1] % len(names)]]
                # A life whose mark was lost and whose only marker is unreadable left no trace; nothing can know of it.
                hit.damage = "bytes" if hit.unmarked else operation[2]
        elif operation[0] == "fresh":
            job.begin(0)
            job.pending = []
        else:
            restart(job, die=operation[1])


def restart(job: Job, *, die: bool) -> None:
    good = [name for name in job.timeline if job.root[name].damage == "none" and name not in job.quarantine]
    got = job.restore(die_after_quarantine=die)
    assert job.refused == ""
    if got is None and die:
        got = job.restore()
        assert job.refused == ""
    assert got == (good[-1] if good else None)
    if got is None:
        job.begin(0)  # a fresh start, by a person's word
        job.timeline, job.pending = [], []
    else:
        job.timeline, job.pending = job.timeline[: job.timeline.index(got) + 1], None


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_damage_and_crashes_never_stop_an_honest_job(operations: list[tuple[Any, ...]]) -> None:
    play(Job(), operations)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.data())
def test_what_disappears_is_missed_until_it_is_permitted_once(operations: list[tuple[Any, ...]], data: Any) -> None:
    job = Job()
    play(job, [*operations, ("commit", False)])
    assert job.mark is not None
    older = [n for n in job.timeline if n != job.mark.at.checkpoint and job.root[n].damage == "none"]
    older = [n for n in older if n not in job.quarantine]
    if not older:
        return
    target = data.draw(st.sampled_from(older))
    kept = dict(job.root)
    # Somebody puts the root back to what it was when `target` was the newest.
    job.root = {n: s for n, s in job.root.items() if s.listed.name <= kept[target].listed.name or n == target}
    job.root.pop(job.mark.at.checkpoint, None)
    before = job.mark
    assert job.restore() is None
    assert "has disappeared" in job.refused
    assert job.mark == before
    permit = job.permit(target, "n1")
    job.permits = [permit]
    assert job.restore() == target
    assert job.mark.used[-1] == "n1"
    # The lost checkpoints come back: they are dead now. Training goes on, and the same is tried again.
    job.root = kept
    assert job.restore() == target
    newest = job.commit()
    job.root = {n: s for n, s in kept.items() if n != newest.name}
    assert job.restore() is None
    assert "has disappeared" in job.refused


def history(steps: int = 3) -> tuple[Job, list[Stored]]:
    """A job that committed step 1, 2, ... in one life."""
    job = Job()
    job.begin(0)
    return job, [job.commit() for _ in range(steps)]


def test_without_a_mark_the_newest_is_taken_as_before() -> None:
    job, stored = history()
    job.mark = None
    assert job.restore() == stored[-1].name
    assert msgspec.to_builtins(job.mark)["at"]["step"] == 3


def test_a_planted_quarantine_record_does_not_send_a_job_back() -> None:
    job, stored = history()
    job.quarantine.add(stored[-1].name)
    assert job.restore() is None
    assert "is quarantined by a record that this job did not write" in job.refused
    job.quarantine.clear()
    assert job.restore() == stored[-1].name


def test_a_lost_marker_is_damage_and_a_tombstone_is_a_deletion() -> None:
    job, stored = history()
    stored[-1].listed = msgspec.structs.replace(stored[-1].listed, tombstoned=True)
    assert job.restore() is None
    assert "has a tombstone" in job.refused
    stored[-1].listed = msgspec.structs.replace(
        stored[-1].listed, tombstoned=False, committed=False, manifest=None, marker_sha256=None
    )
    assert job.restore() == stored[-2].name


@pytest.mark.parametrize("distrust", ["key", "unsigned"])
def test_a_newest_checkpoint_that_is_not_trusted_is_not_passed_over(distrust: Any) -> None:
    """The replay of an older one beside a newest whose signature was stripped or replaced."""
    job, stored = history()
    stored[-1].listed = msgspec.structs.replace(stored[-1].listed, manifest=None, error="x", distrust=distrust)
    found = job.listing()
    older = next(entry for entry in found if entry.name.text == stored[-2].name)
    ruling = judge(older, found, job.mark, [], set())
    assert (ruling.action, "signed by nobody who is trusted" in ruling.reason) == ("refuse", True)
    # A marker that is not the one that was committed is a forgery: damage, which a job outlives.
    stored[-1].listed = msgspec.structs.replace(stored[-1].listed, marker_sha256="5" * 64)
    assert judge(older, job.listing(), job.mark, [], set()).action == "restore"


def with_digest(stored: Stored, digest: str) -> Listed:
    assert stored.listed.manifest is not None
    manifest = msgspec.structs.replace(stored.listed.manifest, digest=digest)
    return msgspec.structs.replace(stored.listed, manifest=manifest, marker_sha256=digest)


def test_another_valid_marker_in_the_same_folder_is_no_reason_to_go_back() -> None:
    job, stored = history()
    found = [with_digest(stored[2], "0" * 64), stored[1].listed]
    assert judge(found[0], found, job.mark, [], set()).action == "restore"
    ruling = judge(found[1], found, job.mark, [], set())
    assert ruling.action == "refuse" and "has another marker than the one that was committed" in ruling.reason


def test_the_same_save_in_memory_is_as_new_as_the_mark() -> None:
    job, stored = history()
    in_memory = with_digest(stored[2], "1" * 64)  # its marker lists fingerprints of memory
    found = [entry.listed for entry in stored]
    assert judge(in_memory, found, job.mark, [], set()).action == "restore"
    assert judge(in_memory, [], job.mark, [], set()).action == "restore"
    older = with_digest(stored[1], "2" * 64)
    assert judge(older, found[:2], job.mark, [], set()).action == "refuse"


def test_copies_in_several_places() -> None:
    """Damaged here and whole there, unfinished there, damaged in both."""
    job, stored = history()
    older, whole = stored[1].listed, stored[2].listed
    damaged = msgspec.structs.replace(whole, manifest=None, error="bad", marker_sha256=None)
    unfinished = msgspec.structs.replace(whole, manifest=None, committed=False)
    planted = msgspec.structs.replace(whole, quarantined=True)
    buried = msgspec.structs.replace(whole, tombstoned=True)
    for copies, action in (
        ([damaged, whole], "refuse"),
        ([unfinished, damaged], "restore"),
        ([damaged, damaged], "restore"),
        ([damaged, planted], "refuse"),
        ([unfinished], "restore"),
        ([buried], "refuse"),
    ):
        assert judge(older, [*copies, older], job.mark, [], set()).action == action, copies


def test_a_permit_goes_past_an_intact_newest_checkpoint_and_keeps_it_out() -> None:
    job, stored = history(5)
    job.permits = [job.permit(stored[1].name, "a")]
    assert job.restore() == stored[1].name
    assert job.restore() == stored[1].name  # a restart before the first save does not return to step 5
    again = job.commit()
    assert job.restore() == again.name
    # Even when the new life's checkpoint is damaged, what was rolled back from stays out.
    again.damage = "marker"
    assert job.restore() == stored[1].name


def test_what_a_restore_left_behind_stays_out_although_the_mark_never_knew_it() -> None:
    job, stored = history(2)
    lost = job.commit(mark_lost=True)
    lost.damage = "bytes"
    assert job.restore() == stored[1].name
    job.commit().damage = "marker"
    lost.damage = "none"  # the disk was repaired and the quarantine record deleted
    job.quarantine.clear()
    assert job.restore() == stored[1].name


def test_what_was_passed_over_may_come_back_until_there_is_newer_progress() -> None:
    """A key was forgotten on a host that knew no mark, and is given again."""
    job, stored = history(3)
    job.mark = None
    good = stored[2].listed
    stored[2].listed = msgspec.structs.replace(good, manifest=None, error="x", distrust="key")
    stored[2].damage = "bytes"  # for the model: passed over
    assert job.restore() == stored[1].name
    stored[2].listed, stored[2].damage = good, "none"
    job.quarantine.clear()
    assert job.restore() == stored[2].name


@pytest.mark.parametrize("known", [True, False])
def test_a_fresh_start_is_not_undone_by_damage(known: bool) -> None:
    job, _ = history(3)
    if not known:
        job.mark = None
    job.begin(0)
    first = job.commit()
    first.damage = "marker"
    assert (job.restore(), job.refused) == (None, "")


def test_a_permit_is_void_after_newer_progress_and_cannot_be_used_twice() -> None:
    job, stored = history(3)
    early = job.permit(stored[0].name, "a")
    newest = job.commit()
    job.permits = [early]
    assert job.restore() == newest.name
    there, back = job.permit(stored[0].name, "b"), None
    job.permits = [there]
    assert job.restore() == stored[0].name
    back = job.permit(newest.name, "c")  # forward again, to what was left behind
    job.permits = [there, back]
    assert job.restore() == newest.name
    assert job.mark is not None and job.mark.at.checkpoint == newest.name and set(job.mark.used) == {"b", "c"}
    assert job.restore() == newest.name  # the mark is what `there` names, but that one is used up


def test_a_permit_allows_its_target_only() -> None:
    job, stored = history(3)
    job.permits = [job.permit(stored[1].name, "a")]
    del job.root[stored[1].name]
    assert job.restore() is None
    assert "which is intact and newer, and the permit is for step 2 only" in job.refused


def test_the_way_out_is_named() -> None:
    job, stored = history(2)
    assert job.mark is not None and stored[0].listed.manifest is not None
    command = how_to_allow("/data/my root", position_of(stored[0].listed.manifest, stored[0].name), job.mark)
    assert command == (
        "keepstep ckpt pin '/data/my root' --allow-rollback r-step-00000001-c0000-a0001 "
        f"--from r-step-00000002-c0000-a0001:{job.mark.at.digest} --reason TEXT"
    )


def test_an_empty_root_is_missed_by_the_run_that_filled_it() -> None:
    job, _ = history()
    assert check_start_at_zero(None, "r") is None
    assert check_start_at_zero(job.mark, "another") is None
    assert "is the checkpoint root mounted?" in (check_start_at_zero(job.mark, "r") or "")


def at(run: str, step: int, life_ns: int, created_ns: int) -> Position:
    return Position(
        checkpoint=f"{run}-{step}",
        digest=f"{run}{step}{created_ns}",
        run=run,
        step=step,
        cycle=0,
        attempt=1,
        life_started_ns=life_ns,
        created_ns=created_ns,
    )


def test_two_runs_that_share_a_root() -> None:
    """The further one is restored although the other saved later; but not when the other's has disappeared."""
    far, late = at("a", 1000, 10, 50), at("b", 10, 20, 60)
    mark = Mark(at=late)
    assert check_rollback(far, mark, "intact", []).action == "restore"
    assert check_rollback(far, mark, "absent", []).action == "refuse"
    assert check_rollback(at("a", 1001, 10, 70), mark, "absent", []).action == "restore"


def test_a_left_behind_mark_of_another_store_does_not_block() -> None:
    """This host's mark is of a life that another host's life went back before, as its signed manifest says."""
    assert check_rollback(at("a", 1, 10, 11), Mark(at=at("a", 5, 10, 15)), "abandoned", []).action == "restore"


def test_marks_are_json() -> None:
    job, stored = history(3)
    job.permits = [job.permit(stored[0].name, "a")]
    job.restore()
    assert job.mark is not None and job.mark.turns and job.mark.used
    assert msgspec.json.decode(msgspec.json.encode(job.mark), type=Mark) == job.mark
