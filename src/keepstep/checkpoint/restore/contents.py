"""What is in one committed checkpoint, for tools and plug-ins that read it outside of a restore.

The signature is checked first, then every byte before it is used; nothing is loaded into anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from keepstep.checkpoint.format.boxes import Box
from keepstep.checkpoint.format.index import RankValues
from keepstep.checkpoint.restore.files import CheckpointFiles
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.restore.reader import Landing, allocate, land, read_all
from keepstep.checkpoint.restore.verify import check_files, check_marker
from keepstep.checkpoint.storage.source import Source
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.errors import ConfigError, VerificationError


class Contents:
    """One checkpoint, open: its index, and verified bytes of its tensors. Close it after use."""

    def __init__(self, source: Source, folder: str, manifest: Manifest) -> None:
        """`manifest` is one whose signature was checked. Raises VerificationError or StorageError."""
        check_files(source, folder, manifest)
        self.manifest = manifest
        self._files = CheckpointFiles(source, folder, manifest)
        self.folder, self.facts, self.names = folder, self._files.facts, self._files.names
        self.index, self.plan = self._files.index, self._files.plan

    def close(self) -> None:
        """Let go of its files. Safe to call twice."""
        self._files.close()

    def read(
        self, wanted: Mapping[str, Box], *, threads: int = 2, room_for: Callable[[int], memoryview] = allocate
    ) -> Landing:
        """Verified bytes of the boxes `wanted` of tensors, in the memory that `room_for(n)` gives for n bytes.

        Only blocks that hold some of them are read. Parts that are left in `Landing.strided` have yet to be put in place.
        Raises VerificationError or StorageError.
        """
        landing, takes = land(self.plan, wanted, self._files.header_of, self._files.name_of, room_for=room_for)
        jobs = [(self._files.file(self.names[rank]), of_rank) for rank, of_rank in sorted(takes.items())]
        read_all(jobs, threads=threads)
        return landing

    def own_values(self, rank: int) -> RankValues:
        """What rank `rank` alone has. Raises VerificationError or StorageError."""
        return self._files.own_values(self.names[rank])


def open_contents(source: Source, folder: str, policy: TrustPolicy) -> Contents:
    """Open checkpoint `folder`, once `policy` accepts who signed it. Raises VerificationError or StorageError."""
    found = source.marker(folder)
    if found is None:
        raise VerificationError(f"{folder}: no manifest, the checkpoint is not committed")
    return Contents(source, folder, check_marker(folder, *found, policy=policy))


def choose(source: Source, policy: TrustPolicy, *, step: int | None = None, run_id: str | None = None) -> str:
    """The newest committed checkpoint of the surviving lineage; with `step` the newest one of that step, abandoned or not.

    Raises ConfigError when there is none, saying what there is; StorageError.
    """
    found = list_checkpoints(source, policy=policy, run_id=run_id)
    usable = [entry for entry in found if entry.committed and not entry.quarantined and not entry.tombstoned]
    if step is None:
        usable = [entry for entry in usable if entry.candidate]
    else:
        usable = [entry for entry in usable if entry.name.step == step]
    for entry in usable:
        if entry.manifest is not None:
            return entry.name.text
    why = f" (newest: {usable[0].name.text}: {usable[0].error})" if usable else ""
    of_step = "" if step is None else f" of step {step}"
    steps = sorted({entry.name.step for entry in found if entry.committed})[-5:]
    raise ConfigError(
        f"{source.where}: no committed checkpoint{of_step} that can be trusted{why}; "
        f"newest committed steps there: {', '.join(map(str, steps)) or 'none'}"
    )
