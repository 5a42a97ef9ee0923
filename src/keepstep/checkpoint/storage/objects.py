"""Checkpoints in an object store (S3 and what speaks its protocol, Google Cloud Storage, Azure), through obstore.

    <4 hex digits of SHA-256(run/rank)>/<folder>/<file>   data; index.json counts as rank 0's
    commits/<folder>/<marker>                             the commit
    records/<kind>/<name>.json                            side records; kind "claims" holds whose folder is whose

The digits come first and stay the same from save to save, so the writes of one save spread over prefixes that the store
has split already. The trainer uses put, get (with head) and list; it never deletes, renames or copies. Objects are made
by conditional create (`If-None-Match: *`), so nothing is overwritten. Files that go up in parts are the exception: the
client has no condition for those. There the claim of the folder, made conditionally, keeps other writers away. When such
an upload fails the client asks the store to drop the parts that went through; a trainer need not be allowed to do that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from keepstep.checkpoint.format.layout import (
    MARKERS,
    MAX_MANIFEST_BYTES,
    FolderName,
    is_plain_file_name,
    parse_folder_name,
)
from keepstep.checkpoint.storage.objectclient import (
    Client,
    create,
    errors,
    get_small,
    list_level,
    list_names,
    open_client,
    put_parts,
    put_stream,
)
from keepstep.checkpoint.storage.source import MAX_RECORD_BYTES, StoreOptions, StoreUrl, check_record_name
from keepstep.checkpoint.storage.writer import FileFact, chunks
from keepstep.records.codec import rfc3339, to_json
from keepstep.records.errors import ConfigError, StorageError, VerificationError

CLAIMS = "claims"
CONDITIONAL_BYTES = 64 << 20
"""Files up to this size go up as one conditional request; larger ones in parts."""

_COMMITS = "commits"
_RECORDS = "records"
_MAX_TRIES = 1000
_LISTS_AT_ONCE = 16
_MAX_WORLD = 1 << 20
_PREFIX = re.compile(r"[0-9a-f]{4}")
_RANK_FILE = re.compile(r"rank-(?P<rank>[0-9]{5,9})-of-(?P<world>[0-9]{5,9})\.safetensors")


def data_prefix(run_id: str, rank: int) -> str:
    """First part of the keys of what `rank` of run `run_id` writes: 4 hexadecimal digits."""
    return hashlib.sha256(f"{run_id}/{rank}".encode()).hexdigest()[:4]


def data_key(folder: str, name: str) -> str:
    """Key of file `name` of `folder`. Raises VerificationError when either is no name of ours."""
    parsed = parse_folder_name(folder)
    if parsed is None or not is_plain_file_name(name):
        raise VerificationError(f"{folder}/{name} is not the name of a checkpoint's file")
    match = _RANK_FILE.fullmatch(name)
    return f"{data_prefix(parsed.run_id, int(match['rank']) if match else 0)}/{folder}/{name}"


class ObjectFile:
    """One object, whose size is known; every read is a request of its own."""

    def __init__(self, client: Client, key: str, name: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._name = name
        self.size_bytes = size_bytes

    def read_into(self, view: memoryview, offset: int) -> None:
        """See source.Opened. A view over `part_bytes` is read by several requests at once."""
        end = offset + len(view)
        if end > self.size_bytes:
            raise VerificationError(f"{self._name}: ends at byte {self.size_bytes}, expected {end}")
        options = self._client.options
        spans = [(at, min(options.part_bytes, len(view) - at)) for at in range(0, len(view), options.part_bytes)]
        if len(spans) <= 1:
            for at, count in spans:
                self._read(view[at : at + count], offset + at)
            return
        with ThreadPoolExecutor(min(options.parallel, len(spans)), thread_name_prefix="keepstep-get") as pool:
            futures = [pool.submit(self._read, view[at : at + count], offset + at) for at, count in spans]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _read(self, view: memoryview, offset: int) -> None:
        import obstore

        with errors(self._client, "read", self._key, self._name):
            data = obstore.get_range(self._client.store, self._key, start=offset, length=len(view))
        if len(data) != len(view):
            raise VerificationError(f"{self._name}: ends at byte {offset + len(data)}, expected {offset + len(view)}")
        view[:] = memoryview(data)

    def close(self) -> None:
        """See source.Opened."""


class ObjectRoot(msgspec.Struct, frozen=True):
    """Source and Sink over a prefix of an object store."""

    client: Client

    @property
    def tier(self) -> Literal["object"]:
        """See source.Source."""
        return "object"

    @property
    def where(self) -> str:
        """See source.Source."""
        return self.client.where

    # ---- reading

    def folders(self) -> list[str]:
        """See source.Source. One that is not committed shows by its claim."""
        committed = {prefix.rpartition("/")[2] for prefix in list_level(self.client, _COMMITS)[0]}
        names = committed | self.record_names(CLAIMS)
        return [name for name in names if parse_folder_name(name) is not None]

    def marker(self, folder: str) -> tuple[str, bytes] | None:
        """See source.Source."""
        for name in MARKERS:
            data = get_small(self.client, f"{_COMMITS}/{folder}/{name}", name, MAX_MANIFEST_BYTES)
            if data is not None:
                return name, data
        return None

    def files(self, folder: str) -> dict[str, int] | None:
        """See source.Source. A listing for each rank's prefix; how many ranks there are, rank 0's file tells."""
        parsed = parse_folder_name(folder)
        if parsed is None:
            return None
        listing = functools.partial(list_names, self.client)
        found = listing(f"{data_prefix(parsed.run_id, 0)}/{folder}")
        worlds = [int(match["world"]) for name in found if (match := _RANK_FILE.fullmatch(name))]
        if worlds and max(worlds) <= _MAX_WORLD:
            prefixes = {data_prefix(parsed.run_id, rank) for rank in range(1, max(worlds))}
        else:  # rank 0 wrote nothing: the folder can be under any prefix there is
            prefixes = {prefix for prefix in list_level(self.client, "")[0] if _PREFIX.fullmatch(prefix)}
        with ThreadPoolExecutor(_LISTS_AT_ONCE, thread_name_prefix="keepstep-list") as pool:
            for more in pool.map(listing, [f"{prefix}/{folder}" for prefix in sorted(prefixes)]):
                found.update(more)
        if not found and folder not in self.folders():
            return None
        return found

    def open(self, folder: str, name: str) -> ObjectFile:
        """See source.Source."""
        import obstore

        key = data_key(folder, name)
        with errors(self.client, "read", key, name):
            return ObjectFile(self.client, key, name, obstore.head(self.client.store, key)["size"])

    def records(self, kind: str) -> dict[str, bytes]:
        """See source.Source."""

        def content(name: str) -> bytes:
            try:
                key = f"{_RECORDS}/{check_record_name(kind, name)}"
                return get_small(self.client, key, name, MAX_RECORD_BYTES) or b""
            except (VerificationError, ConfigError):
                return b""

        names = sorted(self.record_names(kind))
        with ThreadPoolExecutor(_LISTS_AT_ONCE, thread_name_prefix="keepstep-get") as pool:
            return dict(zip(names, pool.map(content, names), strict=True))

    def record_names(self, kind: str) -> frozenset[str]:
        """See source.Source."""
        names = list_level(self.client, f"{_RECORDS}/{kind}")[1]
        return frozenset(name[: -len(".json")] for name in names if name.endswith(".json"))

    # ---- writing

    def committed_once(self) -> bool:
        """See source.Source. There is no pointer: the trainer's identity may not overwrite an object."""
        return False

    def note_latest(self, step: int) -> None:
        """See source.Sink. Nothing, for the same reason."""

    def make_folder(self, name: FolderName) -> str:
        """See source.Sink. The claim is an object made conditionally, so of two writers one goes on to the next number."""
        claim = to_json(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "token": uuid.uuid4().hex,
                "time": rfc3339(time.time_ns()),
            }
        )
        for retry in range(_MAX_TRIES):
            text = FolderName(name.step, name.cycle, name.attempt, retry, name.run_id).text
            # A copy of a root may hold the commit without the claim.
            if not list_names(self.client, f"{_COMMITS}/{text}") and create(
                self.client, f"{_RECORDS}/{CLAIMS}/{text}.json", [claim]
            ):
                return text
        raise StorageError(f"cannot create a checkpoint folder in {self.where}: {_MAX_TRIES} tries exist")

    def put_file(
        self, folder: str, name: str, parts: Iterable[bytes | memoryview], *, sha256: str | None = None
    ) -> FileFact:
        """See source.Sink. The bytes are hashed while they go up."""
        key = data_key(folder, name)
        views = [memoryview(part).cast("B") for part in parts]
        views = [view for view in views if len(view)]
        size = sum(len(view) for view in views)
        with ThreadPoolExecutor(1, thread_name_prefix="keepstep-hash") as pool:
            digest = pool.submit(_sha256, views)
            whole = size <= CONDITIONAL_BYTES
            created = create(self.client, key, views) if whole else put_parts(self.client, key, views, size)
            text = digest.result()
        if not created:
            raise StorageError(f"{self.where}/{key} is there already with other content; nothing is overwritten")
        if sha256 is not None and text != sha256:
            raise StorageError(f"{folder}/{name}: its bytes changed while they were written")
        return FileFact(name=name, size_bytes=size, sha256=text)

    def put_checked(self, folder: str, name: str, chunks: Iterable[bytearray], size_bytes: int) -> None:
        """Write one new file of `size_bytes` from `chunks`, which are compared with a digest while they are made.

        What that raises ends the upload, and no object comes to be. Raises StorageError.
        """
        key = data_key(folder, name)
        if size_bytes <= CONDITIONAL_BYTES:
            created = create(self.client, key, [memoryview(chunk) for chunk in chunks])
        else:
            created = put_stream(self.client, key, chunks, size_bytes)
        if not created:
            raise StorageError(f"{self.where}/{key} is there already; nothing is overwritten")

    def publish(self, folder: str, marker: str, data: bytes, *, may_publish: Callable[[], None] = lambda: None) -> None:
        """See source.Sink."""
        others = set(list_names(self.client, f"{_COMMITS}/{folder}")) - {marker}
        if others or not create(self.client, f"{_COMMITS}/{folder}/{marker}", [data], before=may_publish):
            name = min(others) if others else marker
            raise StorageError(f"{folder}: another writer committed ({name} is there with other content)")

    def put_record(self, kind: str, name: str, data: bytes) -> str:
        """See source.Sink."""
        key = f"{_RECORDS}/{check_record_name(kind, name)}"
        if not create(self.client, key, [data]):
            raise StorageError(f"{self.where}/{key} is there with other content; a record is written once")
        return f"{self.where}/{key}"


class ObjectDeleter(msgspec.Struct, frozen=True):
    """Deleter over the same layout, for the identity that prunes. Bucket policies should give it to nobody else."""

    root: ObjectRoot

    def delete_marker(self, folder: str) -> None:
        """See source.Deleter."""
        for name in MARKERS:
            self._delete(f"{_COMMITS}/{folder}/{name}")

    def delete_file(self, folder: str, name: str) -> None:
        """See source.Deleter."""
        if list_names(self.root.client, f"{_COMMITS}/{folder}"):
            raise StorageError(f"{folder} is committed; its files are not deleted before its marker")
        try:
            self._delete(data_key(folder, name))
        except VerificationError as error:
            raise StorageError(f"{error}; it is not deleted") from None

    def remove_folder(self, folder: str) -> None:
        """See source.Deleter. What is left of a folder is its claim."""
        self.delete_record(CLAIMS, folder)

    def delete_record(self, kind: str, name: str) -> None:
        """See source.Deleter."""
        self._delete(f"{_RECORDS}/{check_record_name(kind, name)}")

    def _delete(self, key: str) -> None:
        import obstore

        with errors(self.root.client, "delete", key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.root.client.store, key)


# ---- opening


def open_object_root(url: StoreUrl, options: StoreOptions) -> ObjectRoot:
    """The root at `url`. Raises ConfigError for options that do not fit or a missing package."""
    return ObjectRoot(open_client(url, options))


def open_object_deleter(url: StoreUrl, options: StoreOptions) -> ObjectDeleter:
    """The right to delete under `url`, as whoever the environment says. Raises ConfigError as `open_object_root` does."""
    return ObjectDeleter(open_object_root(url, options))


def _sha256(views: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks(views):
        digest.update(chunk)
    return digest.hexdigest()
