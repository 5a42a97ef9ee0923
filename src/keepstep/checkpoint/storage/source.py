"""What reading and writing code sees of a place that holds checkpoints: protocols, options, and `open_root`.

A root is a folder of a file system or a prefix of an object store. Reading code takes a Source, saving code a Sink, and
only pruning takes a Deleter: on object stores that is another identity, and the trainer's has put, get and list alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import ConfigError

Tier = Literal["shm", "peer", "disk", "object"]

MAX_RECORD_BYTES = 1 << 20
"""A side record is small; a larger one is read as empty."""
MIN_PART_BYTES = 5 << 20  # the smallest part S3 takes
OBJECT_SCHEMES = ("s3", "gs", "az")

_COLLAPSED = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/(?P<rest>[^/].*)")  # what Path() makes of s3://bucket
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_SEGMENT = re.compile(r"[A-Za-z0-9_=+@~.-]{1,255}")
_RECORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,229}")


class Opened(Protocol):
    """One file, opened once. Several threads may read it at the same time."""

    @property
    def size_bytes(self) -> int:
        """Its size."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes from `offset`.

        Raises VerificationError when the file ends before, StorageError when it cannot be read.
        """

    def close(self) -> None:
        """Let it go; safe to call twice."""


class Source(Protocol):
    """Where checkpoints are read from. Every method may raise StorageError."""

    @property
    def tier(self) -> Tier:
        """How near it is."""

    @property
    def where(self) -> str:
        """Path or URL, for messages."""

    def folders(self) -> list[str]:
        """Names of the checkpoint folders, committed or not, in no order; a root that is not there has none."""

    def marker(self, folder: str) -> tuple[str, bytes] | None:
        """File name and content of the commit marker; None when the checkpoint is not committed.

        The signed marker wins over an unsigned one. Raises VerificationError when it is no regular file or too large.
        """

    def files(self, folder: str) -> dict[str, int] | None:
        """Size in bytes of every entry but the marker, -1 for what is no regular file; None without such a folder."""

    def open(self, folder: str, name: str) -> Opened:
        """Open file `name`. Raises VerificationError when it is missing or no regular file."""

    def records(self, kind: str) -> dict[str, bytes]:
        """Side records of `kind` by name. One that cannot be read as a small file is there with empty content."""

    def record_names(self, kind: str) -> frozenset[str]:
        """Names of the side records of `kind`, for those whose presence alone counts."""

    def committed_once(self) -> bool:
        """True when something beside the folders says that a checkpoint was committed here before."""


class Sink(Protocol):
    """Where checkpoints are written. Every method raises StorageError when it fails; nothing is ever overwritten."""

    def make_folder(self, name: FolderName) -> str:
        """Claim a folder for `name` that nobody used before, numbered when an older try exists; its name."""

    def put_file(
        self, folder: str, name: str, parts: Iterable[bytes | memoryview], *, sha256: str | None = None
    ) -> FileFact:
        """Write `parts` as one new file; durable on return. `sha256`: their digest, when it is known already."""

    def publish(self, folder: str, marker: str, data: bytes, *, may_publish: Callable[[], None] = lambda: None) -> None:
        """Commit: put the marker in place, last of all. `may_publish` is asked right before and raises StorageError.

        A marker with the same bytes is our own earlier try and counts as success; with others, another writer committed.
        """

    def note_latest(self, step: int) -> None:
        """Write the pointer that other tools look for, where there is one. Never read back as truth, so failing is only said."""

    def put_record(self, kind: str, name: str, data: bytes) -> str:
        """Write a side record, once: other content under a name that is taken is an error. Returns where it lies."""


class Root(Source, Sink, Protocol):
    """A place that checkpoints are read from and written to."""


class Deleter(Protocol):
    """Deletion, for pruning alone. What is not there is no error. Raises StorageError."""

    def delete_marker(self, folder: str) -> None:
        """Take back the commit, durably: always first, so that no half-deleted folder is ever a candidate."""

    def delete_file(self, folder: str, name: str) -> None:
        """Delete one file of a folder that is not committed."""

    def remove_folder(self, folder: str) -> None:
        """Remove what is left of a folder whose files are gone."""

    def delete_record(self, kind: str, name: str) -> None:
        """Delete one side record."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to talk to an object store. Credentials are never here: they come from the environment or the machine's role.

    `endpoint`: URL of an S3-compatible server. `region`: of the bucket. `kms_key`: key of SSE-KMS, sent with every write.
    `allow_http`: accept an endpoint without TLS. `checksum`: what the server is to check each upload by (the payload is
    hashed for the request's signature anyway, so SHA-256 costs nothing more). `request_timeout_s` bounds one request,
    `retry_for_s` all tries of one. Files over `part_bytes` go up in parts of that size, `parallel` of them at once.
    """

    endpoint: str | None = None
    region: str | None = None
    kms_key: str | None = None
    allow_http: bool = False
    checksum: Literal["sha256", "crc64nvme", "none"] = "sha256"
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 60.0
    retry_for_s: float = 120.0
    part_bytes: int = 16 << 20
    parallel: int = 8


ENV_STORE_ENDPOINT = "KEEPSTEP_STORE_ENDPOINT"
ENV_STORE_REGION = "KEEPSTEP_STORE_REGION"
ENV_STORE_KMS_KEY = "KEEPSTEP_STORE_KMS_KEY"
ENV_STORE_ALLOW_HTTP = "KEEPSTEP_STORE_ALLOW_HTTP"
"""1: an endpoint without TLS is accepted."""


def store_options(given: StoreOptions | None = None, environ: Mapping[str, str] | None = None) -> StoreOptions:
    """`given`, and what the environment says where that says nothing. Raises ConfigError."""
    env = os.environ if environ is None else environ
    options = given or StoreOptions()
    allow_http = env.get(ENV_STORE_ALLOW_HTTP, "")
    if allow_http not in ("", "0", "1"):
        raise ConfigError(f"{ENV_STORE_ALLOW_HTTP}={allow_http!r}: give 1 or 0")
    return msgspec.structs.replace(
        options,
        endpoint=options.endpoint or env.get(ENV_STORE_ENDPOINT) or None,
        region=options.region or env.get(ENV_STORE_REGION) or None,
        kms_key=options.kms_key or env.get(ENV_STORE_KMS_KEY) or None,
        allow_http=options.allow_http or allow_http == "1",
    )


def store_environment(options: StoreOptions) -> dict[str, str]:
    """The variables that say what `options` say; nothing for what is not set."""
    variables = {
        ENV_STORE_ENDPOINT: options.endpoint or "",
        ENV_STORE_REGION: options.region or "",
        ENV_STORE_KMS_KEY: options.kms_key or "",
        ENV_STORE_ALLOW_HTTP: "1" if options.allow_http else "",
    }
    return {name: value for name, value in variables.items() if value}


class StoreUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An object store's prefix: `scheme`://`bucket`/`prefix`, the prefix without slashes at its ends."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def text(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_root(root: str | Path) -> Path | StoreUrl:
    """The path or the object store that `root` names. Raises ConfigError, naming what was seen and what is valid."""
    text = os.fspath(root)
    valid = "a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    if not text:
        raise ConfigError(f"checkpoint root is empty; give {valid}")
    collapsed = _COLLAPSED.fullmatch(text)
    if collapsed is not None and collapsed["scheme"] in (*OBJECT_SCHEMES, "file", "http", "https"):
        if collapsed["scheme"] == "file":
            return Path("/" + collapsed["rest"])
        raise ConfigError(
            f"checkpoint root {text!r} is a URL with one slash (pathlib.Path does that); "
            f"give {collapsed['scheme']}://{collapsed['rest']} as a string"
        )
    if "://" not in text:
        return Path(text)
    url = urlsplit(text)
    if url.query or url.fragment or "@" in url.netloc:
        raise ConfigError(
            f"checkpoint root {url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}: "
            "no user, password, query or fragment may be in it; credentials come from the environment"
        )
    if url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
            raise ConfigError(f"checkpoint root {text!r} names a host; a file URL is file:///absolute/path")
        return Path(unquote(url.path))
    if url.scheme in ("http", "https"):
        raise ConfigError(
            f"checkpoint root {text!r} is the address of a server; give s3://bucket/prefix and that address as endpoint"
        )
    if url.scheme not in OBJECT_SCHEMES:
        raise ConfigError(f"checkpoint root {text!r} has scheme {url.scheme!r}; give {valid}")
    prefix = url.path.strip("/")
    segments = prefix.split("/") if prefix else []
    bad = [segment for segment in segments if not _SEGMENT.fullmatch(segment) or set(segment) == {"."}]
    if not _BUCKET.fullmatch(url.netloc) or bad:
        what = f"the prefix part {bad[0]!r}" if bad else f"the bucket name {url.netloc!r}"
        raise ConfigError(f"checkpoint root {text!r}: {what} is not valid; use A-Z a-z 0-9 . _ - and no empty parts")
    return StoreUrl(scheme=url.scheme, bucket=url.netloc, prefix=prefix)


def open_root(root: str | Path, options: StoreOptions | None = None) -> Root:
    """The root at a path or URL. Nothing is read, written or connected to yet.

    Raises ConfigError: a bad URL, an endpoint without TLS that was not allowed, options that do not fit, a missing package.
    """
    place = parse_root(root)
    if isinstance(place, Path):
        from keepstep.checkpoint.storage.posix import PosixRoot

        return PosixRoot(place)
    from keepstep.checkpoint.storage.objects import open_object_root

    return open_object_root(place, options or StoreOptions())


def open_deleter(root: str | Path, options: StoreOptions | None = None) -> Deleter:
    """The right to delete under `root`. On object stores it acts as whoever the environment says: not the trainer.

    Raises ConfigError as `open_root` does.
    """
    place = parse_root(root)
    if isinstance(place, Path):
        from keepstep.checkpoint.storage.posix import PosixRoot

        return PosixRoot(place)
    from keepstep.checkpoint.storage.objects import open_object_deleter

    return open_object_deleter(place, options or StoreOptions())


def check_record_name(kind: str, name: str) -> str:
    """`<kind>/<name>.json` when both are plain names. Raises ConfigError."""
    if not _RECORD.fullmatch(kind) or not _RECORD.fullmatch(name):
        raise ConfigError(f"{kind}/{name} cannot name a side record; use A-Z a-z 0-9 . _ -")
    return f"{kind}/{name}.json"
