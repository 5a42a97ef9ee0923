"""The files of one checkpoint, each opened at most once; its index and headers, verified before they are parsed."""

from __future__ import annotations

import contextlib
from types import TracebackType

from keepstep.checkpoint.format.index import BLOB_NAME, Index, RankValues, parse_index, parse_rank_values
from keepstep.checkpoint.format.layout import INDEX_NAME, PRINTS_SUFFIX, rank_file_name
from keepstep.checkpoint.format.plan import Plan
from keepstep.checkpoint.format.shard import Span
from keepstep.checkpoint.restore.reader import HeldBlocks, VerifiedFile
from keepstep.checkpoint.storage.source import Source
from keepstep.checkpoint.trust.manifest import Facts, Manifest
from keepstep.records.errors import VerificationError

_MAX_PRINTS_BYTES = 64 << 20  # of an image of 32 TiB


class CheckpointFiles:
    """An open checkpoint: `names` are its data files by rank, `index` and `plan` say what is in them. Close it after use."""

    def __init__(self, source: Source, folder: str, manifest: Manifest) -> None:
        """`manifest` is one whose signature, or digest, was checked. Raises VerificationError or StorageError."""
        self.folder = folder
        self.facts, self.names = _file_names(folder, manifest)
        self._source = source
        self._listed = {file.name: file for file in manifest.files}
        self._stack = contextlib.ExitStack()
        self._open: dict[str, VerifiedFile] = {}
        self._spans: dict[str, dict[str, Span]] = {}
        self._held = HeldBlocks()
        try:
            self.index = self._read_index()
        except BaseException:
            self.close()
            raise
        self.plan = Plan(self.index.tensors, self.index.meshes, self.index.world, self.index.split)

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of its files. Safe to call twice."""
        self._stack.close()

    def file(self, name: str) -> VerifiedFile:
        """File `name`. Raises VerificationError or StorageError."""
        held = self._open.get(name)
        if held is None:
            opened = self._source.open(self.folder, name)
            self._stack.callback(opened.close)
            fact, algorithm = self._listed[name], self.facts.memory
            if algorithm is None or name == INDEX_NAME:
                held = VerifiedFile.by_fact(opened, fact, self._held)
            else:
                held = VerifiedFile.by_fingerprints(opened, fact, algorithm, self._prints(name), self._held)
            self._open[name] = held
        return held

    def header(self, name: str) -> dict[str, Span]:
        """Verified header of file `name`."""
        if name not in self._spans:
            self._spans[name] = self.file(name).header()
        return self._spans[name]

    def header_of(self, rank: int) -> dict[str, Span]:
        """Verified header of the file of `rank`."""
        return self.header(self.names[rank])

    def name_of(self, rank: int) -> str:
        """Name of the file of `rank`."""
        return self.names[rank]

    def own_values(self, name: str) -> RankValues:
        """What the rank that wrote file `name` alone has. Raises VerificationError or StorageError."""
        blob = self.header(name).get(BLOB_NAME)
        if blob is None or blob.dtype != "U8":
            raise VerificationError(f"{name}: has no values of its rank")
        file = self.file(name)
        return parse_rank_values(file.read(blob.begin, blob.end), name, data_bytes=file.opened.size_bytes)

    def _read_index(self) -> Index:
        file = self.file(INDEX_NAME)
        data_bytes = sum(max(0, self._listed[name].size_bytes) for name in self.names)
        index = parse_index(file.read(0, file.opened.size_bytes), INDEX_NAME, data_bytes=data_bytes)
        if index.world != self.facts.world:
            raise VerificationError(f"{INDEX_NAME}: speaks of {index.world} ranks, the manifest of {self.facts.world}")
        return index

    def _prints(self, name: str) -> bytes:
        opened = self._source.open(self.folder, name + PRINTS_SUFFIX)
        try:
            data = bytearray(min(opened.size_bytes, _MAX_PRINTS_BYTES))
            opened.read_into(memoryview(data), 0)
            return bytes(data)
        finally:
            opened.close()


def _file_names(folder: str, manifest: Manifest) -> tuple[Facts, list[str]]:
    """Facts, and names of the data files by rank. Raises VerificationError when the manifest lists others."""
    facts, listed = manifest.facts, {file.name for file in manifest.files}
    if facts is None or INDEX_NAME not in listed:
        raise VerificationError(f"{INDEX_NAME}: is not listed in the manifest")
    names = [rank_file_name(writer, facts.world) for writer in range(min(facts.world, len(listed)))]
    if listed != {INDEX_NAME, *names} or len(names) != facts.world:
        raise VerificationError(f"{folder}: the manifest does not list one file for each of {facts.world} ranks")
    return facts, names
