"""What is in one committed checkpoint, for tools and plug-ins that read it outside of a restore.

The signature is checked first, then every byte before it is used; nothing is loaded into anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from keepstep.checkpoint.format.boxes import Box
from keepstep.checkpoint.format.index import BLOB_NAME, Index, RankValues, parse_index, parse_rank_values
from keepstep.checkpoint.format.layout import INDEX_NAME, rank_file_name
from keepstep.checkpoint.format.plan import Plan
from keepstep.checkpoint.format.shard import Span
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.restore.reader import Landing, VerifiedFile, allocate, land, read_all
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
        facts = manifest.facts
        listed = {file.name: file for file in manifest.files}
        names = (
            []
            if facts is None
            else [rank_file_name(rank, facts.world) for rank in range(min(facts.world, len(listed)))]
        )
        if facts is None or set(listed) != {INDEX_NAME, *names} or len(names) != facts.world:
            raise VerificationError(f"{folder}: the manifest does not list an index and one file for each rank")
        self.folder = folder
        self.manifest = manifest
        self.facts = facts
        self.names = names
        self._source = source
        self._listed = listed
        self._stack = contextlib.ExitStack()
        self._files: dict[str, VerifiedFile] = {}
        self._spans: dict[str, dict[str, Span]] = {}
        try:
            file = self._file(INDEX_NAME)
            data_bytes = sum(max(0, listed[name].size_bytes) for name in names)
            self.index: Index = parse_index(file.read(0, file.opened.size_bytes), INDEX_NAME, data_bytes=data_bytes)
            if self.index.world != facts.world:
                raise VerificationError(
                    f"{INDEX_NAME}: speaks of {self.index.world} ranks, the manifest of {facts.world}"
                )
            self.plan = Plan(self.index.tensors, self.index.meshes, self.index.world, self.index.split)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of its files. Safe to call twice."""
        self._stack.close()

    def _file(self, name: str) -> VerifiedFile:
        held = self._files.get(name)
        if held is None:
            opened = self._source.open(self.folder, name)
            self._stack.callback(opened.close)
            held = self._files[name] = VerifiedFile.by_fact(opened, self._listed[name])
        return held

    def _header(self, rank: int) -> Mapping[str, Span]:
        name = self.names[rank]
        if name not in self._spans:
            self._spans[name] = self._file(name).header()
        return self._spans[name]

    def read(
        self, wanted: Mapping[str, Box], *, threads: int = 2, room_for: Callable[[int], memoryview] = allocate
    ) -> Landing:
        """Verified bytes of the boxes `wanted` of tensors, in the memory that `room_for(n)` gives for n bytes.

        Only blocks that hold some of them are read. Parts that are left in `Landing.strided` have yet to be put in place.
        Raises VerificationError or StorageError.
        """
        landing, takes = land(self.plan, wanted, self._header, lambda rank: self.names[rank], room_for=room_for)
        jobs = [(self._file(self.names[rank]), of_rank) for rank, of_rank in sorted(takes.items())]
        read_all(jobs, threads=threads)
        return landing

    def own_values(self, rank: int) -> RankValues:
        """What rank `rank` alone has. Raises VerificationError or StorageError."""
        name, blob = self.names[rank], self._header(rank).get(BLOB_NAME)
        if blob is None or blob.dtype != "U8":
            raise VerificationError(f"{name}: has no values of its rank")
        file = self._file(name)
        return parse_rank_values(file.read(blob.begin, blob.end), name, data_bytes=file.opened.size_bytes)


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
