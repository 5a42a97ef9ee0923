"""Everything one rank needs of a checkpoint: verified, decoded, and nothing of the training touched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.checkpoint.format.boxes import whole
from keepstep.checkpoint.format.plan import Plan, TensorMeta
from keepstep.checkpoint.restore.files import CheckpointFiles
from keepstep.checkpoint.restore.reader import Landing, Take, VerifiedFile, land, read_all
from keepstep.checkpoint.restore.verify import check_files, read_manifest
from keepstep.checkpoint.storage.posix import PosixFile
from keepstep.checkpoint.storage.source import Source
from keepstep.checkpoint.torch.load import Restored, check_names, rebuild_own, rebuild_shared, targets
from keepstep.checkpoint.torch.rng import Reseed
from keepstep.checkpoint.torch.state import survey
from keepstep.records.errors import RefuseToStartError, VerificationError

_OWN_SHARE = 0.9
_THREADS = {"shm": 2, "peer": 2, "disk": 4, "object": 8}


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads, into what. `rng_on_reshard`: "refuse" or "reseed" when the number of ranks has changed."""

    state: dict[str, Any]
    per_rank: frozenset[str]
    rank: int
    world_size: int
    rng_on_reshard: str = "refuse"


def read_checkpoint(source: Source, folder: str, manifest_digest: str | None, want: Want) -> Restored:
    """Verify and decode what `want.rank` needs. Raises VerificationError, StorageError or RefuseToStartError.

    The signature is not checked here: `manifest_digest` is the SHA-256 of a manifest whose signature was. Of every file only the
    blocks that hold something needed are read.
    """
    manifest = read_manifest(source, folder, trusted_key=None, allow_unsigned=True, expected_digest=manifest_digest)
    if source.tier != "shm":
        # Fingerprints find accidents, not intent: whoever could put such a manifest there could put anything beside it.
        if manifest.facts is not None and manifest.facts.memory is not None:
            raise VerificationError(f"{folder}: its manifest speaks of images in memory, and counts for nothing else")
        if want.rank == 0:  # one listing is enough; what a rank opens is checked once more
            check_files(source, folder, manifest)
    with CheckpointFiles(source, folder, manifest) as files:
        index = files.index
        check_names(want.state, [*index.values, *_own_names(files, want)], folder)
        live = survey(want.state, want.per_rank, rank=want.rank, world_size=want.world_size)
        wanted = targets(index, want.state, live, want.rank, folder)
        landings, takes = [], dict[int, list[Take]]()
        for group in _by_state(wanted).values():
            boxes = {name: wanted[name].box for name in group}
            landing, wanted_bytes = land(files.plan, boxes, files.header_of, files.name_of)
            landings.append(landing)
            for rank, more in wanted_bytes.items():
                takes.setdefault(rank, []).extend(more)
        own = _read_own(files, want)
        jobs = [(files.file(files.name_of(rank)), of_rank) for rank, of_rank in sorted(takes.items())]
        _bypass_cache(jobs)
        read_all(jobs, threads=threads_for(source.tier))
        values = rebuild_shared(index, _joined(landings), wanted, [item for part in landings for item in part.strided])
        for name in own.values:
            if name in values:
                raise VerificationError(f"{folder}: state {name!r} is both shared and of one rank")
        return Restored(values={**values, **own.values}, rng=own.rng)


def _bypass_cache(jobs: Sequence[tuple[VerifiedFile, Sequence[Take]]]) -> None:
    """Read past the page cache what no other process is going to read: a file that nearly all this rank needs comes from.

    Then the state is sharded as it was, and every rank has such a file of its own. Replicated tensors come from all files alike,
    and the cache spares the other ranks of the host reading them from the disk again.
    """
    sizes = [sum(take.end - take.begin for take in takes) for _, takes in jobs]
    for (file, _), size in zip(jobs, sizes, strict=True):
        if size >= _OWN_SHARE * sum(sizes) and isinstance(file.opened, PosixFile):
            file.opened.bypass_cache()


def threads_for(tier: str) -> int:
    """Threads that read and verify in one rank: the cores of this host shared by its ranks, more where reading waits."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(_THREADS[tier], min(8, (os.cpu_count() or 1) // ranks))


def _joined(landings: list[Landing]) -> dict[str, memoryview]:
    return {name: buffer for landing in landings for name, buffer in landing.buffers.items()}


def _by_state(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensor names by the top-level name of the state: what is copied on loading lets its memory go, the rest keeps it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return groups


# ---- what belongs to one rank


def _own_names(files: CheckpointFiles, want: Want) -> list[str]:
    """Names of the state that ranks have of their own; the same in every file."""
    name = files.names[want.rank if want.rank < len(files.names) else 0]
    return [key for key in files.own_values(name).values if key != "rng"]


def _decode_own(files: CheckpointFiles, name: str, only: frozenset[str] | None = None) -> dict[str, Any]:
    """Values of one rank (those called `only`, when given), with their tensors read and verified."""
    values = files.own_values(name)
    if only is not None:
        values = msgspec.structs.replace(values, values={k: v for k, v in values.values.items() if k in only})
    needed = {key: meta for key, meta in values.tensors.items() if only is None or key.split("/")[1] in only}
    landing, takes = land(
        Plan({key: _owned(meta) for key, meta in needed.items()}, (), 1),
        {key: whole(meta.shape) for key, meta in needed.items()},
        lambda _rank: files.header(name),
        lambda _rank: name,
    )
    read_all([(files.file(name), takes.get(0, []))], threads=1)
    return rebuild_own(values, landing.buffers, name)


def _owned(meta: TensorMeta) -> TensorMeta:
    return msgspec.structs.replace(meta, owner=0)


def _read_own(files: CheckpointFiles, want: Want) -> Restored:
    """Values of this rank: its own, or on another number of ranks what its objects make of those of all old ranks."""
    names = files.names
    if len(names) == want.world_size:
        values = _decode_own(files, names[want.rank])
        return Restored(values=values, rng=values.pop("rng", None))
    _refuse_unless_movable(want, files.folder, len(names))
    result = {}
    every = [_decode_own(files, name, want.per_rank) for name in names] if want.per_rank else []
    for name in sorted(want.per_rank):
        states = [values[name] for values in every]
        result[name] = want.state[name].repartition(states, want.rank, want.world_size)
    saved = _decode_own(files, names[0], frozenset({"rng"})).get("rng")
    return Restored(values=result, rng=Reseed(saved=saved, step=files.facts.step))


def _refuse_unless_movable(want: Want, folder: str, old_world: int) -> None:
    """Raises RefuseToStartError when something that belongs to a rank cannot be carried over to another number of ranks."""
    here = f"{folder} was written by {old_world} ranks, this job has {want.world_size}"
    stuck = [name for name in sorted(want.per_rank) if not callable(getattr(want.state[name], "repartition", None))]
    if stuck:
        raise RefuseToStartError(
            f"{here}: {stuck[0]!r} is state of each rank and has no repartition(states, rank, world_size) method; "
            f"start with {old_world} ranks, give it that method (ks.ResumableSampler has it), or start fresh"
        )
    if want.rng_on_reshard != "reseed":
        raise RefuseToStartError(
            f"{here}: the random state (rng) of one rank cannot be divided; start with {old_world} ranks, or give "
            "Checkpointer(rng_on_reshard='reseed') to derive new random states from rank 0's, the step and the rank"
        )
