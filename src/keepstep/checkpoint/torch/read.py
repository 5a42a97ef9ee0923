"""Everything one rank needs of a checkpoint: verified, decoded, and nothing of the training touched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.checkpoint.format.boxes import whole
from keepstep.checkpoint.format.index import BLOB_NAME, Index, RankValues, parse_index, parse_rank_values
from keepstep.checkpoint.format.layout import INDEX_NAME, PRINTS_SUFFIX, rank_file_name
from keepstep.checkpoint.format.plan import Plan, TensorMeta
from keepstep.checkpoint.format.shard import Span
from keepstep.checkpoint.restore.reader import HeldBlocks, Landing, Take, VerifiedFile, land, read_all
from keepstep.checkpoint.restore.verify import check_files, read_manifest
from keepstep.checkpoint.storage.posix import PosixFile
from keepstep.checkpoint.storage.source import Source
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.torch.load import Restored, check_names, rebuild_own, rebuild_shared, targets
from keepstep.checkpoint.torch.rng import Reseed
from keepstep.checkpoint.torch.state import survey
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.records.errors import RefuseToStartError, VerificationError

_MAX_PRINTS_BYTES = 64 << 20  # of an image of 32 TiB
_OWN_SHARE = 0.9
_THREADS = {"shm": 2, "peer": 2, "disk": 4, "object": 8}


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads, into what. `rng_on_reshard`: "refuse" or "reseed" when the number of ranks has changed."""

    state: dict[str, Any]
    per_rank: frozenset[str]
    rank: int
    world_size: int
    rng_on_reshard: str = "refuse"


class _Files:
    """The files of one checkpoint, each opened at most once, and their verified headers."""

    def __init__(self, source: Source, folder: str, manifest: Manifest, stack: contextlib.ExitStack) -> None:
        self._source = source
        self._folder = folder
        self._stack = stack
        self.facts = {file.name: file for file in manifest.files}
        self._memory = manifest.facts.memory if manifest.facts is not None else None
        self._open: dict[str, VerifiedFile] = {}
        self._spans: dict[str, dict[str, Span]] = {}
        self._held = HeldBlocks()

    def file(self, name: str) -> VerifiedFile:
        """File `name`. Raises VerificationError or StorageError."""
        held = self._open.get(name)
        if held is None:
            opened = self._source.open(self._folder, name)
            self._stack.callback(opened.close)
            if self._memory is None or name == INDEX_NAME:
                held = VerifiedFile.by_fact(opened, self.facts[name], self._held)
            else:
                held = VerifiedFile.by_fingerprints(
                    opened, self.facts[name], self._memory, self._prints(name), self._held
                )
            self._open[name] = held
        return held

    def _prints(self, name: str) -> bytes:
        opened = self._source.open(self._folder, name + PRINTS_SUFFIX)
        try:
            data = bytearray(min(opened.size_bytes, _MAX_PRINTS_BYTES))
            opened.read_into(memoryview(data), 0)
            return bytes(data)
        finally:
            opened.close()

    def spans(self, name: str) -> dict[str, Span]:
        """Verified header of file `name`."""
        if name not in self._spans:
            self._spans[name] = self.file(name).header()
        return self._spans[name]


def file_names(folder: str, manifest: Manifest) -> list[str]:
    """Names of the data files by rank. Raises VerificationError when the manifest lists others."""
    facts, listed = manifest.facts, {file.name for file in manifest.files}
    if facts is None or INDEX_NAME not in listed:
        raise VerificationError(f"{INDEX_NAME}: is not listed in the manifest")
    names = [rank_file_name(writer, facts.world) for writer in range(min(facts.world, len(listed)))]
    if listed != {INDEX_NAME, *names} or len(names) != facts.world:
        raise VerificationError(f"{folder}: the manifest does not list one file for each of {facts.world} ranks")
    return names


def read_checkpoint(source: Source, folder: str, manifest_digest: str | None, want: Want) -> Restored:
    """Verify and decode what `want.rank` needs. Raises VerificationError, StorageError or RefuseToStartError.

    The signature is not checked here: `manifest_digest` is the SHA-256 of a manifest whose signature was. Of every file only the
    blocks that hold something needed are read.
    """
    manifest = read_manifest(source, folder, trusted_key=None, allow_unsigned=True, expected_digest=manifest_digest)
    names = file_names(folder, manifest)
    assert manifest.facts is not None
    if source.tier != "shm":
        # Fingerprints find accidents, not intent: whoever could put such a manifest there could put anything beside it.
        if manifest.facts.memory is not None:
            raise VerificationError(f"{folder}: its manifest speaks of images in memory, and counts for nothing else")
        if want.rank == 0:  # one listing is enough; what a rank opens is checked once more
            check_files(source, folder, manifest)
    with contextlib.ExitStack() as stack:
        files = _Files(source, folder, manifest, stack)
        index = read_index(files.file(INDEX_NAME), files.facts, names)
        if index.world != manifest.facts.world:
            raise VerificationError(
                f"{INDEX_NAME}: speaks of {index.world} ranks, the manifest of {manifest.facts.world}"
            )
        check_names(want.state, [*index.values, *_own_names(files, names, want)], folder)
        live = survey(want.state, want.per_rank, rank=want.rank, world_size=want.world_size)
        wanted = targets(index, want.state, live, want.rank, folder)
        plan = Plan(index.tensors, index.meshes, index.world, index.split)
        landings, takes = [], dict[int, list[Take]]()
        for group in _by_state(wanted).values():
            boxes = {name: wanted[name].box for name in group}
            landing, wanted_bytes = land(plan, boxes, lambda rank: files.spans(names[rank]), lambda rank: names[rank])
            landings.append(landing)
            for rank, more in wanted_bytes.items():
                takes.setdefault(rank, []).extend(more)
        own = _read_own(files, names, want, folder, manifest.facts.step)
        jobs = [(files.file(names[rank]), of_rank) for rank, of_rank in sorted(takes.items())]
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


def read_index(file: VerifiedFile, facts: Mapping[str, FileFact], names: list[str]) -> Index:
    """The index, verified before it is parsed. Raises VerificationError."""
    data_bytes = sum(max(0, facts[name].size_bytes) for name in names)
    return parse_index(file.read(0, file.opened.size_bytes), INDEX_NAME, data_bytes=data_bytes)


def _joined(landings: list[Landing]) -> dict[str, memoryview]:
    return {name: buffer for landing in landings for name, buffer in landing.buffers.items()}


def _by_state(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensor names by the top-level name of the state: what is copied on loading lets its memory go, the rest keeps it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return groups


# ---- what belongs to one rank


def own_values(file: VerifiedFile, spans: Mapping[str, Span], name: str) -> RankValues:
    """What one rank alone has, from its file. Raises VerificationError."""
    blob = spans.get(BLOB_NAME)
    if blob is None or blob.dtype != "U8":
        raise VerificationError(f"{name}: has no values of its rank")
    return parse_rank_values(file.read(blob.begin, blob.end), name, data_bytes=file.opened.size_bytes)


def _own_names(files: _Files, names: list[str], want: Want) -> list[str]:
    """Names of the state that ranks have of their own; the same in every file."""
    name = names[want.rank if want.rank < len(names) else 0]
    return [key for key in own_values(files.file(name), files.spans(name), name).values if key != "rng"]


def _decode_own(files: _Files, name: str, only: frozenset[str] | None = None) -> dict[str, Any]:
    """Values of one rank (those called `only`, when given), with their tensors read and verified."""
    file, spans = files.file(name), files.spans(name)
    values = own_values(file, spans, name)
    if only is not None:
        values = msgspec.structs.replace(values, values={k: v for k, v in values.values.items() if k in only})
    needed = {key: meta for key, meta in values.tensors.items() if only is None or key.split("/")[1] in only}
    landing, takes = land(
        Plan({key: _owned(meta) for key, meta in needed.items()}, (), 1),
        {key: whole(meta.shape) for key, meta in needed.items()},
        lambda _rank: spans,
        lambda _rank: name,
    )
    read_all([(file, takes.get(0, []))], threads=1)
    return rebuild_own(values, landing.buffers, name)


def _owned(meta: TensorMeta) -> TensorMeta:
    return msgspec.structs.replace(meta, owner=0)


def _read_own(files: _Files, names: list[str], want: Want, folder: str, step: int) -> Restored:
    """Values of this rank: its own, or on another number of ranks what its objects make of those of all old ranks."""
    if len(names) == want.world_size:
        values = _decode_own(files, names[want.rank])
        return Restored(values=values, rng=values.pop("rng", None))
    _refuse_unless_movable(want, folder, len(names))
    result = {}
    every = [_decode_own(files, name, want.per_rank) for name in names] if want.per_rank else []
    for name in sorted(want.per_rank):
        states = [values[name] for values in every]
        result[name] = want.state[name].repartition(states, want.rank, want.world_size)
    saved = _decode_own(files, names[0], frozenset({"rng"})).get("rng")
    return Restored(values=result, rng=Reseed(saved=saved, step=step))


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
