"""Restore by vote: rank 0 proposes, every rank verifies the bytes it will read, all accept or all go on to the next.

Candidates are tried newest step first, and each in the nearest place that holds it. Nothing of the training is touched before the
vote is over. Only rank 0 needs the key that is trusted: it tells the others, over the side channel, the SHA-256 of the manifest
whose signature it checked.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.restore.freshness import leaves_behind
from keepstep.checkpoint.restore.guard import Guard
from keepstep.checkpoint.restore.lineage import Listed, list_checkpoints, mark_abandoned
from keepstep.checkpoint.restore.quarantine import QuarantineRecord, write_quarantine
from keepstep.checkpoint.storage.memory import MemorySource
from keepstep.checkpoint.storage.source import Root, Source
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.checkpoint.trust.rollback import Ruling
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ChannelError, RefuseToStartError, StorageError, VerificationError

if TYPE_CHECKING:
    from keepstep.checkpoint.torch.load import Restored


TIERS = ("shm", "peer", "disk", "object")
"""Nearest first."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """Where this life of the job began: step (0 for a new start), the checkpoint folder it came from, and when (UTC
    nanoseconds).

    `parent` is the digest of that checkpoint's manifest; `scope` the run id when only one run was looked at.
    """

    restored_step: int
    started_ns: int
    checkpoint: str | None = None
    parent: str | None = None
    scope: str | None = None


class _Rejected(msgspec.Struct, frozen=True):
    """A candidate that was refused. `distrust`: nothing is damaged, the policy does not accept who signed it."""

    record: QuarantineRecord
    root: Root
    distrust: str | None


class Candidate(msgspec.Struct, frozen=True):
    """A checkpoint in one of the task's places."""

    place: int
    entry: Listed


class Restore(msgspec.Struct, kw_only=True):
    """One restore on one rank: what it is to look at, and how it talks to the other ranks.

    `roots` are where checkpoints last, nearest first: where this job saves, and maybe the object store that it uploads to. `memory`
    is what the job's nodes hold in memory, None when that is not asked. `policy` says whose checkpoints count; rank 0 alone needs
    it. `guard` and `upload_guard` are rank 0's of these two roots, from the restore on.
    """

    roots: tuple[Root, ...]
    memory: Source | None = None
    channel: Exchange
    rank: int
    world_size: int
    run_id: str
    attempt: int
    cycle: int
    only_run: str | None
    policy: TrustPolicy | None
    per_rank: frozenset[str]
    rng_on_reshard: str = "refuse"
    timeout_s: float
    guard: Guard | None = None
    upload_guard: Guard | None = None
    lost_root: bool = False
    """The first root holds nothing that was committed, another one does."""
    number: int = 0  # of the proposal that is open

    @property
    def places(self) -> tuple[Source, ...]:
        """Everywhere a checkpoint may be read from, nearest first; the same on every rank."""
        return self.roots if self.memory is None else (self.memory, *self.roots)

    @property
    def where(self) -> str:
        """The roots, for messages."""
        return " and ".join(root.where for root in self.roots)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a restore ended: the life that begins, and the tier it was read from ("none" at step 0)."""

    life: Life
    tier: str


def restore(task: Restore, state: dict[str, Any], *, fresh_start: bool) -> Outcome:
    """Load the newest valid checkpoint in the task's places into `state`, alike on all ranks.

    Raises RefuseToStartError, ChannelError (a rank does not answer within the time limit) or StorageError (a rank cannot see the
    root).
    """
    begin_ns = time.monotonic_ns()
    life, restored, tier = _lead(task, state, fresh_start) if task.rank == 0 else _follow(task, state)
    if restored is not None and life.checkpoint is not None:
        from keepstep.checkpoint.torch.load import load

        load(state, restored, life.checkpoint, task.rank)
    if task.rank == 0:
        fields = {
            "step": life.restored_step,
            "source": tier,
            "checkpoint": life.checkpoint,
            "begin_ns": begin_ns,
            "end_ns": time.monotonic_ns(),
        }
        with contextlib.suppress(ChannelError):
            task.channel.report("restored", fields)
    return Outcome(life=life, tier=tier)


_Result = tuple[Life, "Restored | None", str]
"""Where the life begins, its values, and the farthest tier from which a rank read them."""


# ---- rank 0


_OVERRIDE = "`keepstep run --fresh-start` (KEEPSTEP_FRESH_START=1, or restore(fresh_start=True)) starts over at step 0"


def _lead(task: Restore, state: dict[str, Any], fresh_start: bool) -> _Result:
    try:
        assert task.policy is not None, "rank 0 has the policy"
        found = _list_all(task, task.policy)
        _open_guards(task, found, task.policy)
        facts = [item.entry.manifest.facts for item in found if item.entry.manifest and item.entry.manifest.facts]
        # A clock that was set back must not make this life look older than what it restores.
        started_ns = max([time.time_ns(), *(fact.created_ns + 1 for fact in facts)])
        start = Life(restored_step=0, started_ns=started_ns, scope=task.only_run)
        # When an earlier cycle of this very attempt has committed, the fresh start was then, and this is its restart.
        restart = any(
            (fact.run, fact.attempt) == (task.run_id, task.attempt) and fact.cycle < task.cycle for fact in facts
        )
        if fresh_start and not restart:
            task.channel.set("restore/0", {"start": msgspec.to_builtins(start)})
            return start, None, "none"
        return _propose_all(task, state, found, start)
    except BaseException as error:
        # Whatever the others wait for now, they find the error there.
        notice = {"error": f"rank 0: {error or type(error).__name__}", "refuse": isinstance(error, RefuseToStartError)}
        with contextlib.suppress(ChannelError):
            task.channel.set(f"restore/{task.number}", notice)
            task.channel.set(f"restore/{task.number}/result", notice)
        raise


def _list_all(task: Restore, policy: TrustPolicy) -> list[Candidate]:
    """Every checkpoint in every place, newest first, each in the nearest place first; lives of all places count."""
    found: list[Candidate] = []
    for place, source in enumerate(task.places):
        try:
            listed = list_checkpoints(source, policy=policy, run_id=task.only_run)
        except StorageError as error:
            nearer = any(item.entry.candidate and task.places[item.place] is task.roots[0] for item in found)
            if source in (task.memory, task.roots[0]) or not nearer:
                raise
            # What is uploaded is a copy of what the first root has, or had.
            print(f"keepstep: not looked at for checkpoints: {error}", file=sys.stderr, flush=True)
            continue
        found += [Candidate(place, entry) for entry in listed]
    marked = mark_abandoned([item.entry for item in found])
    found = [Candidate(item.place, entry) for item, entry in zip(found, marked, strict=True)]
    found.sort(key=lambda item: item.place)
    found.sort(key=lambda item: item.entry.name, reverse=True)
    return found


def _open_guards(task: Restore, found: list[Candidate], policy: TrustPolicy) -> None:
    """The guards of the roots, and whether the first one is lost as a whole.

    Then the mark of what was uploaded rules: a disk that is gone is no reason to refuse the copies made for that case. As long as
    anything committed is left in the first root, going back behind its mark stays refused. Raises StorageError or ChannelError.
    """
    task.guard = Guard(task.roots[0], task.channel, task.only_run, policy)
    if len(task.roots) < 2:
        return
    committed = {task.places[item.place].where for item in found if item.entry.committed}
    task.lost_root = task.roots[0].where not in committed and task.roots[1].where in committed
    try:
        task.upload_guard = Guard(task.roots[1], task.channel, task.only_run, policy)
    except StorageError as error:
        if task.lost_root:
            raise
        print(f"keepstep: {error}", file=sys.stderr, flush=True)
    if task.lost_root:
        known = task.guard.mark
        newest = "" if known is None else f"; the newest known one there was {known.at.checkpoint}"
        print(
            f"keepstep: {task.roots[0].where} holds no committed checkpoint, so training goes on from what "
            f"{task.roots[1].where} holds{newest}",
            file=sys.stderr,
            flush=True,
        )


def _propose_all(task: Restore, state: dict[str, Any], found: list[Candidate], start: Life) -> _Result:
    assert task.guard is not None
    rejected: list[_Rejected] = []
    lasting = [item.entry for item in found if task.places[item.place] is not task.memory]
    bare = task.guard.lost_marker(lasting)
    for item in found:
        entry = item.entry
        if entry is bare:
            _reject(task, rejected, item, f"{entry.name.text}: was committed, and its manifest is gone", 0)
        if not entry.candidate:
            continue
        if entry.manifest is None:
            _reject(task, rejected, item, entry.error or "manifest", 0, distrust=entry.distrust)
            continue
        ruling = _ruling(task, item, lasting, rejected)
        if ruling.action == "skip":
            print(
                f"keepstep: checkpoint {entry.name.text} is passed over: {ruling.reason}", file=sys.stderr, flush=True
            )
            continue
        # Of a checkpoint that also lasts somewhere, the marker that lasts is the parent of what comes next.
        same = next((other for other in lasting if other.name == entry.name and other.manifest is not None), entry)
        assert same.manifest is not None
        life = msgspec.structs.replace(
            start, restored_step=entry.name.step, checkpoint=entry.name.text, parent=same.manifest.digest
        )
        taken = _propose(task, state, life, item, rejected)
        task.number += 1
        if taken is not None:
            _accept(task, life, item, lasting, rejected, ruling)
            return life, *taken
    _refuse_unless_empty(task, found, rejected)
    task.guard.check_start(task.run_id, _OVERRIDE)
    task.channel.set(f"restore/{task.number}", {"start": msgspec.to_builtins(start)})
    return start, None, "none"


def _ruling(task: Restore, item: Candidate, lasting: list[Listed], rejected: list[_Rejected]) -> Ruling:
    """What the mark says about a candidate. Raises RefuseToStartError when it would be an unexplained step back."""
    assert task.guard is not None
    damaged = frozenset(refused.record.checkpoint for refused in rejected if not refused.distrust)
    guard = task.upload_guard if task.lost_root and task.upload_guard is not None else task.guard
    ruling = guard.rule(item.entry, lasting, damaged)
    if ruling.action != "refuse":
        return ruling
    if task.places[item.place] is task.memory:
        return Ruling(action="skip", reason=ruling.reason)  # something newer lasts elsewhere
    raise RefuseToStartError(ruling.reason)


def _accept(
    task: Restore,
    life: Life,
    item: Candidate,
    lasting: list[Listed],
    rejected: list[_Rejected],
    ruling: Ruling,
) -> None:
    """All ranks took the candidate: move the mark, and settle what became of those that were refused before it."""
    for refused in rejected:
        if refused.distrust == "key":
            # One checkpoint did verify with this policy, so the policy is right and the others are not ours.
            _quarantine(task, refused)
    if task.places[item.place] is not task.memory:
        assert task.guard is not None
        uploaded = len(task.roots) > 1 and task.places[item.place] is task.roots[1]
        for guard in (task.guard, task.upload_guard if uploaded else None):
            if guard is not None:
                guard.restored(
                    item.entry,
                    run=task.run_id,
                    life_started_ns=life.started_ns,
                    permit=ruling.permit,
                    left_behind=leaves_behind(item.entry, lasting, guard.mark),
                )


def _propose(
    task: Restore, state: dict[str, Any], life: Life, item: Candidate, rejected: list[_Rejected]
) -> tuple[Restored, str] | None:
    """Put one candidate to the vote; when all ranks accept its values, and the farthest tier that a rank read from."""
    assert item.entry.manifest is not None and life.checkpoint is not None
    number, source, digest = task.number, task.places[item.place], item.entry.manifest.digest
    task.channel.set(f"restore/{number}", {"try": msgspec.to_builtins(life), "place": item.place, "digest": digest})
    restored, own_vote = _examine(task, state, life.checkpoint, digest, source)
    task.channel.set(f"restore/{number}/vote/0", own_vote)
    keys = [f"restore/{number}/vote/{rank}" for rank in range(task.world_size)]
    votes = task.channel.wait(keys, task.timeout_s)
    refusals = [(rank, votes[key]) for rank, key in enumerate(keys) if not votes[key]["ok"]]
    for rank, vote in refusals:
        if vote.get("refuse"):
            raise RefuseToStartError(vote["reason"] if rank == 0 else f"rank {rank}: {vote['reason']}")
        if vote.get("absent"):
            # The others see the folder: this host's mount is at fault, and the checkpoint is not to be blamed for it.
            raise StorageError(
                f"rank {rank} cannot see {source.where}/{item.entry.name.text}: {vote['reason']}; "
                "is the checkpoint root mounted there?"
            )
    if not refusals:
        assert restored is not None
        tier = max((votes[key]["tier"] for key in keys), key=TIERS.index)
        task.channel.set(f"restore/{number}/result", {"ok": True, "tier": tier})
        return restored, tier
    task.channel.set(f"restore/{number}/result", {"ok": False})
    rank, vote = refusals[0]
    _reject(task, rejected, item, vote["reason"], rank, file=vote.get("file"))
    return None


def _reject(
    task: Restore,
    rejected: list[_Rejected],
    item: Candidate,
    reason: str,
    rank: int,
    *,
    file: str | None = None,
    distrust: str | None = None,
) -> None:
    source, name = task.places[item.place], item.entry.name
    record = QuarantineRecord(
        checkpoint=name.text,
        step=name.step,
        reason=reason,
        file=file or reason.partition(":")[0],
        by_rank=rank,
        time=rfc3339(time.time_ns()),
    )
    where = " in memory" if source is task.memory else ""
    print(
        f"keepstep: checkpoint {record.checkpoint}{where} is refused by rank {rank}: {reason}",
        file=sys.stderr,
        flush=True,
    )
    if source is not task.memory:
        # What memory holds ends with the job; the same checkpoint may still be whole where it lasts.
        refused = _Rejected(record, task.roots[item.place - len(task.places)], distrust)
        rejected.append(refused)
        if distrust is None:
            _quarantine(task, refused)
    fields: dict[str, Any] = {
        "checkpoint": record.checkpoint,
        "step": record.step,
        "reason": reason,
        "tier": source.tier,
    }
    if distrust is not None:
        fields["distrust"] = distrust
    with contextlib.suppress(ChannelError):
        task.channel.report("quarantined" if source is not task.memory else "image_refused", fields)


def _quarantine(task: Restore, refused: _Rejected) -> None:
    guard = task.upload_guard if len(task.roots) > 1 and refused.root is task.roots[1] else task.guard
    if guard is not None:
        guard.refused(refused.record.checkpoint)
    try:
        write_quarantine(refused.root, refused.record)
    except StorageError as error:  # a root that is read-only can still be restored from
        print(f"keepstep: {error}", file=sys.stderr, flush=True)


def _refuse_unless_empty(task: Restore, candidates: list[Candidate], rejected: list[_Rejected]) -> None:
    """Raises RefuseToStartError when a root holds anything that step 0 would put out of sight."""
    found = [item for item in candidates if task.places[item.place] is not task.memory]
    committed = [item for item in found if item.entry.committed]
    if committed:
        newest = committed[0]
        why = rejected[0].record.reason if rejected else _why_not(task.places[newest.place], newest.entry)
        keys = sum(item.distrust == "key" for item in rejected)
        hint = f"; {keys} are signed by somebody who is not trusted here (--trust-key)" if keys else ""
        raise RefuseToStartError(
            f"{task.where} holds {len(committed)} committed checkpoints, but none can be restored. "
            f"Newest: {newest.entry.name.text}: {why}{hint}. {_OVERRIDE}"
        )
    # Folders without a marker: the first save of this very run was cut short, and nothing is lost by starting at 0. The pointer
    # file proves that something was committed once, and another run's folder may be a copy that lost its marker.
    names = [item.entry.name for item in found]
    foreign = [name.text for name in names if name.run_id != task.run_id]
    if names and (foreign or any(root.committed_once() for root in task.roots)):
        example = (foreign or [names[0].text])[0]
        raise RefuseToStartError(
            f"{task.where} holds {len(names)} checkpoint folders without a manifest (e.g. {example}), so none can be "
            f"restored; were they copied without it? {_OVERRIDE}"
        )
    if names:
        print(
            f"keepstep: {len(names)} unfinished saves of this run under {task.where}, starting at step 0",
            file=sys.stderr,
        )


def _why_not(source: Source, entry: Listed) -> str:
    if entry.quarantined:
        return f"quarantined, see its record in {source.where}"
    if entry.tombstoned:
        return "its deletion was begun"
    return f"abandoned by {entry.abandoned_by}" if entry.abandoned_by else (entry.error or "unknown")


# ---- every rank


def _examine(
    task: Restore, state: dict[str, Any], checkpoint: str, digest: str, source: Source
) -> tuple[Restored | None, dict[str, Any]]:
    """Verify and decode everything this rank needs of a candidate; the values, and this rank's vote.

    `digest` is the SHA-256 of its marker.
    """
    from keepstep.checkpoint.torch.read import Want, read_checkpoint

    want = Want(
        state=state,
        per_rank=task.per_rank,
        rank=task.rank,
        world_size=task.world_size,
        rng_on_reshard=task.rng_on_reshard,
    )
    try:
        if source is not task.memory and source.marker(checkpoint) is None:
            return None, {"ok": False, "absent": True, "reason": "no such folder, or no manifest in it"}
        restored = read_checkpoint(source, checkpoint, digest, want)
        tier = source.tier_read(checkpoint) if isinstance(source, MemorySource) else source.tier
        return restored, {"ok": True, "tier": tier}
    except RefuseToStartError as error:
        return None, {"ok": False, "refuse": True, "reason": error.message}
    except (VerificationError, StorageError, ChannelError) as error:
        return None, {"ok": False, "reason": str(error), "file": str(error).partition(":")[0]}


# ---- the other ranks


def _follow(task: Restore, state: dict[str, Any]) -> _Result:
    while True:
        number = task.number
        proposal = _await(task, f"restore/{number}")
        if "start" in proposal:
            return msgspec.convert(proposal["start"], Life), None, "none"
        life, place = msgspec.convert(proposal["try"], Life), int(proposal["place"])
        assert life.checkpoint is not None
        restored, vote = _examine(task, state, life.checkpoint, proposal["digest"], task.places[place])
        task.channel.set(f"restore/{number}/vote/{task.rank}", vote)
        result = _await(task, f"restore/{number}/result")
        if result["ok"]:
            return life, restored, result["tier"]
        task.number += 1


def _await(task: Restore, key: str) -> dict[str, Any]:
    """What rank 0 says at `key`. Raises what made rank 0 give up."""
    # Rank 0 itself waits `timeout_s` for the slowest rank and then says that it gives up.
    value: dict[str, Any] = task.channel.wait([key], 2 * task.timeout_s)[key]
    if "error" in value:
        raise RefuseToStartError(value["error"]) if value["refuse"] else StorageError(value["error"])
    return value
