"""Restore by vote: rank 0 proposes, every rank verifies the bytes it will read, all accept or all go to the next older.

Nothing of the training is touched before the vote is over. Only rank 0 needs the key that is trusted: it tells the
others, over the side channel, the SHA-256 of the manifest whose signature it checked.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.format.index import Assembly, own_buffers, parse_index
from keepstep.checkpoint.format.layout import INDEX_NAME, LATEST_NAME, quarantine_file, rank_file_name
from keepstep.checkpoint.format.shard import parse_header
from keepstep.checkpoint.restore.lineage import Listed, list_checkpoints
from keepstep.checkpoint.restore.quarantine import QuarantineRecord, write_quarantine
from keepstep.checkpoint.restore.verify import check_files, read_manifest, read_verified
from keepstep.checkpoint.storage.source import open_root
from keepstep.checkpoint.trust.keys import key_path, signing_key
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ChannelError, ConfigError, RefuseToStartError, StorageError, VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from keepstep.checkpoint.torch.state import Restored


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
    """A candidate that was refused. `distrust`: nothing is damaged, it is signed by a key that is not trusted here."""

    record: QuarantineRecord
    distrust: bool


class Restore(msgspec.Struct, kw_only=True):
    """One restore on one rank: what it is to look at, and how it talks to the other ranks."""

    root: Path
    channel: Exchange
    rank: int
    world_size: int
    run_id: str
    attempt: int
    cycle: int
    only_run: str | None
    unsigned: bool
    timeout_s: float
    number: int = 0  # of the proposal that is open


def restore(task: Restore, state: dict[str, Any], *, fresh_start: bool) -> Life:
    """Load the newest valid checkpoint under the task's root into `state`, alike on all ranks.

    Raises RefuseToStartError, ChannelError (a rank does not answer within the time limit) or StorageError (a rank cannot
    see the root).
    """
    begin_ns = time.monotonic_ns()
    life, restored = _lead(task, fresh_start) if task.rank == 0 else _follow(task)
    if restored is not None and life.checkpoint is not None:
        from keepstep.checkpoint.torch.state import load

        load(state, restored, life.checkpoint)
    if task.rank == 0:
        fields = {
            "step": life.restored_step,
            "source": "none" if life.checkpoint is None else "disk",
            "checkpoint": life.checkpoint,
            "begin_ns": begin_ns,
            "end_ns": time.monotonic_ns(),
        }
        with contextlib.suppress(ChannelError):
            task.channel.report("restored", fields)
    return life


# ---- rank 0


def verification_key(unsigned: bool) -> EllipticCurvePublicKey | None:
    """The trusted public key; None when unsigned checkpoints are accepted and there is no key to check others with."""
    if unsigned and not key_path().exists():
        return None
    try:
        return signing_key().public_key()
    except ConfigError:
        if unsigned:
            return None
        raise


def _lead(task: Restore, fresh_start: bool) -> tuple[Life, Restored | None]:
    try:
        trusted = verification_key(task.unsigned)
        found = list_checkpoints(
            open_root(task.root), trusted_key=trusted, allow_unsigned=task.unsigned, run_id=task.only_run
        )
        made_ns = [entry.manifest.facts.created_ns for entry in found if entry.manifest and entry.manifest.facts]
        # A clock that was set back must not make this life look older than what it restores.
        started_ns = max([time.time_ns(), *(created + 1 for created in made_ns)])
        start = Life(restored_step=0, started_ns=started_ns, scope=task.only_run)
        if fresh_start and not _is_restart(task, found):
            task.channel.set("restore/0", {"start": msgspec.to_builtins(start)})
            return start, None
        return _propose_all(task, found, start, trusted)
    except BaseException as error:
        # Whatever the others wait for now, they find the error there.
        notice = {"error": f"rank 0: {error or type(error).__name__}", "refuse": isinstance(error, RefuseToStartError)}
        with contextlib.suppress(ChannelError):
            task.channel.set(f"restore/{task.number}", notice)
            task.channel.set(f"restore/{task.number}/result", notice)
        raise


def _is_restart(task: Restore, found: list[Listed]) -> bool:
    """True when an earlier cycle of this very attempt has committed: the fresh start was then, and this is its restart."""
    facts = [entry.manifest.facts for entry in found if entry.manifest is not None]
    return any(
        fact is not None and (fact.run, fact.attempt) == (task.run_id, task.attempt) and fact.cycle < task.cycle
        for fact in facts
    )


def _propose_all(
    task: Restore, found: list[Listed], start: Life, trusted: EllipticCurvePublicKey | None
) -> tuple[Life, Restored | None]:
    rejected: list[_Rejected] = []
    for entry in found:
        if not entry.candidate:
            continue
        if entry.manifest is None:
            _reject(task, rejected, entry, entry.error or "manifest", 0, distrust=entry.distrust)
            continue
        assert entry.manifest.facts is not None
        _check_world(task, entry.manifest, entry.name.text)
        life = msgspec.structs.replace(
            start, restored_step=entry.name.step, checkpoint=entry.name.text, parent=entry.manifest.digest
        )
        restored = _propose(task, life, entry, rejected)
        task.number += 1
        if restored is not None:
            for item in rejected:
                if item.distrust:
                    # One checkpoint did verify with this key, so the key is right and the others are not ours.
                    _quarantine(task, item.record)
            return life, restored
    _refuse_unless_empty(task, found, rejected)
    task.channel.set(f"restore/{task.number}", {"start": msgspec.to_builtins(start)})
    return start, None


def _check_world(task: Restore, manifest: Manifest, name: str) -> None:
    assert manifest.facts is not None
    if manifest.facts.world != task.world_size:
        raise RefuseToStartError(
            f"{name} was written by {manifest.facts.world} ranks, this job has {task.world_size}: random state and "
            "data order of ranks that are not there would be lost. Start with the same number of ranks, or start fresh"
        )


def _propose(task: Restore, life: Life, entry: Listed, rejected: list[_Rejected]) -> Restored | None:
    """Put one candidate to the vote; its values when all ranks accept."""
    number = task.number
    task.channel.set(f"restore/{number}", {"try": msgspec.to_builtins(life)})
    restored, own_vote = _examine(task, life)
    task.channel.set(f"restore/{number}/vote/0", own_vote)
    keys = [f"restore/{number}/vote/{rank}" for rank in range(task.world_size)]
    votes = task.channel.wait(keys, task.timeout_s)
    refusals = [(rank, votes[key]) for rank, key in enumerate(keys) if not votes[key]["ok"]]
    for rank, vote in refusals:
        if vote.get("absent"):
            # The others see the folder: this host's mount is at fault, and the checkpoint is not to be blamed for it.
            raise StorageError(
                f"rank {rank} cannot see {task.root / entry.name.text}: {vote['reason']}; is the checkpoint root mounted there?"
            )
    task.channel.set(f"restore/{number}/result", {"ok": not refusals})
    if not refusals:
        return restored
    rank, vote = refusals[0]
    _reject(task, rejected, entry, vote["reason"], rank, file=vote.get("file"))
    return None


def _reject(
    task: Restore,
    rejected: list[_Rejected],
    entry: Listed,
    reason: str,
    rank: int,
    *,
    file: str | None = None,
    distrust: str | None = None,
) -> None:
    record = QuarantineRecord(
        checkpoint=entry.name.text,
        step=entry.name.step,
        reason=reason,
        file=file or reason.partition(":")[0],
        by_rank=rank,
        time=rfc3339(time.time_ns()),
    )
    rejected.append(_Rejected(record, distrust == "key"))
    print(f"keepstep: checkpoint {record.checkpoint} is refused by rank {rank}: {reason}", file=sys.stderr, flush=True)
    if distrust is None:
        _quarantine(task, record)
    fields = {"checkpoint": record.checkpoint, "step": record.step, "reason": reason}
    with contextlib.suppress(ChannelError):
        task.channel.report("quarantined", fields)


def _quarantine(task: Restore, record: QuarantineRecord) -> None:
    try:
        write_quarantine(open_root(task.root), record)
    except StorageError as error:  # a root that is read-only can still be restored from
        print(f"keepstep: {error}", file=sys.stderr, flush=True)


def _refuse_unless_empty(task: Restore, found: list[Listed], rejected: list[_Rejected]) -> None:
    """Raises RefuseToStartError when the root holds anything that step 0 would put out of sight."""
    override = (
        "`keepstep run --fresh-start` (KEEPSTEP_FRESH_START=1, or restore(fresh_start=True)) starts over at step 0"
    )
    committed = [entry for entry in found if entry.committed]
    if committed:
        newest = committed[0].name.text
        why = rejected[0].record.reason if rejected else _why_not(task, committed[0])
        keys = sum(item.distrust for item in rejected)
        hint = f"; {keys} are signed by a key other than {key_path()}" if keys else ""
        raise RefuseToStartError(
            f"{task.root} holds {len(committed)} committed checkpoints, but none can be restored. "
            f"Newest: {newest}: {why}{hint}. {override}"
        )
    # Folders without a marker: the first save of this very run was cut short, and nothing is lost by starting at 0. The
    # pointer file proves that something was committed once, and another run's folder may be a copy that lost its
    # marker.
    foreign = [entry.name.text for entry in found if entry.name.run_id != task.run_id]
    if found and (foreign or (task.root / LATEST_NAME).exists()):
        example = (foreign or [found[0].name.text])[0]
        raise RefuseToStartError(
            f"{task.root} holds {len(found)} checkpoint folders without a manifest (e.g. {example}), so none can be "
            f"restored; were they copied without it? {override}"
        )
    if found:
        print(
            f"keepstep: {len(found)} unfinished saves of this run under {task.root}, starting at step 0",
            file=sys.stderr,
        )


def _why_not(task: Restore, entry: Listed) -> str:
    if entry.quarantined:
        return f"quarantined, see {quarantine_file(task.root, entry.name.text)}"
    return f"abandoned by {entry.abandoned_by}" if entry.abandoned_by else (entry.error or "unknown")


# ---- every rank


def _examine(task: Restore, life: Life) -> tuple[Restored | None, dict[str, Any]]:
    """Verify and decode everything this rank needs of a candidate; the values, and this rank's vote."""
    assert life.checkpoint is not None
    folder = task.root / life.checkpoint
    try:
        if not folder.is_dir():
            return None, {"ok": False, "absent": True, "reason": "no such folder"}
        return read_checkpoint(folder, life.parent, task.rank), {"ok": True}
    except (VerificationError, StorageError) as error:
        return None, {"ok": False, "reason": str(error), "file": str(error).partition(":")[0]}


def read_checkpoint(folder: Path, manifest_digest: str | None, rank: int) -> Restored:
    """Verify and decode all replicated values and those of `rank`. Raises VerificationError or StorageError.

    The signature is not checked here: `manifest_digest` is the SHA-256 of a manifest whose signature was.
    """
    from keepstep.checkpoint.torch.state import rebuild

    source, text = open_root(folder.parent), folder.name
    manifest = read_manifest(source, text, trusted_key=None, allow_unsigned=True, expected_digest=manifest_digest)
    check_files(source, text, manifest)
    facts, files = manifest.facts, {file.name: file for file in manifest.files}
    if facts is None or INDEX_NAME not in files:
        raise VerificationError(f"{INDEX_NAME}: is not listed in the manifest")
    names = [rank_file_name(writer, facts.world) for writer in range(min(facts.world, len(files)))]
    if set(files) != {INDEX_NAME, *names} or len(names) != facts.world:
        raise VerificationError(f"{folder.name}: the manifest does not list one file for each of {facts.world} ranks")
    data_bytes = sum(files[name].size_bytes for name in names)
    index = parse_index(read_verified(source, text, files[INDEX_NAME]), INDEX_NAME, data_bytes=data_bytes)
    if index.world != facts.world:
        raise VerificationError(f"{INDEX_NAME}: speaks of {index.world} ranks, the manifest of {facts.world}")
    assembly = Assembly(index)
    own = None
    for writer, name in enumerate(names):
        data = read_verified(source, text, files[name])
        spans = parse_header(data, len(data), name)
        assembly.add(writer, data, spans, name)
        if writer == rank:
            own = own_buffers(data, spans, name)
    if own is None:
        raise VerificationError(f"{folder.name}: has no file of rank {rank}")
    return rebuild(index, assembly.buffers, own[0], own[1], names[rank])


# ---- the other ranks


def _follow(task: Restore) -> tuple[Life, Restored | None]:
    while True:
        number = task.number
        proposal = _await(task, f"restore/{number}")
        if "start" in proposal:
            return msgspec.convert(proposal["start"], Life), None
        life = msgspec.convert(proposal["try"], Life)
        restored, vote = _examine(task, life)
        task.channel.set(f"restore/{number}/vote/{task.rank}", vote)
        if _await(task, f"restore/{number}/result")["ok"]:
            return life, restored
        task.number += 1


def _await(task: Restore, key: str) -> dict[str, Any]:
    """What rank 0 says at `key`. Raises what made rank 0 give up."""
    # Rank 0 itself waits `timeout_s` for the slowest rank and then says that it gives up.
    value: dict[str, Any] = task.channel.wait([key], 2 * task.timeout_s)[key]
    if "error" in value:
        raise RefuseToStartError(value["error"]) if value["refuse"] else StorageError(value["error"])
    return value
