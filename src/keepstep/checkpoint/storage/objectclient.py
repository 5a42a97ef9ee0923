"""Requests to an object store through obstore: errors in our terms, bounded retries, conditional creation."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.storage.source import MIN_PART_BYTES, StoreOptions, StoreUrl
from keepstep.checkpoint.storage.writer import CHUNK_BYTES, chunks
from keepstep.records.errors import ConfigError, StorageError, VerificationError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

MAX_PARTS = 10_000  # S3's limit for one upload
BACKOFF_S = (0.1, 5.0)
"""Pause before a request is repeated: from the first to the second, doubling, drawn at random below that."""

_ERROR_XML = re.compile(r"<Code>(?P<code>[^<]*)</Code>(?:.*?<Message>(?P<message>[^<]*)</Message>)?", re.DOTALL)
_jitter = random.SystemRandom()  # the script's own generator is not touched, and forked ranks must not wait in step
_STATUS = re.compile(r"status code: (?P<text>(?P<code>[0-9]{3})[A-Za-z ]*)")
_ROLE_ADDRESS = "http://169.254.169.254/"  # where the client asks for a machine's role when the environment has no keys
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class Client(msgspec.Struct, frozen=True):
    """A connection to one prefix. `store` repeats requests by itself; `once` does not: it is for conditional creation."""

    where: str
    options: StoreOptions
    store: Any
    once: Any


def open_client(url: StoreUrl, options: StoreOptions) -> Client:
    """The client for `url`; connects to nothing yet. Raises ConfigError for bad options or a missing package."""
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{url.text}: object stores need the package obstore: pip install 'keepstep[checkpoint]'"
        ) from None
    _check_options(url, options)
    return Client(url.text, options, _make_store(url, options, repeat=True), _make_store(url, options, repeat=False))


@contextlib.contextmanager
def errors(client: Client, action: str, key: str, name: str | None = None) -> Iterator[None]:
    """Turn errors of the client into ours. With `name`, an object that is not there is a VerificationError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if name is not None and "NoSuchBucket" not in str(error):
            raise VerificationError(f"{name}: is missing") from None
        raise StorageError(f"cannot {action} {client.where}/{key}: {_reason(error, action)}") from error
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(f"cannot {action} {client.where}/{key}: {_reason(error, action)}") from error


def list_names(client: Client, prefix: str) -> dict[str, int]:
    """Size by name of the objects right under `prefix`."""
    import obstore

    with errors(client, "list", prefix):
        return {
            meta["path"].rpartition("/")[2]: meta["size"]
            for meta in obstore.list(client.store, prefix, chunk_size=1000).collect()
            if meta["path"].rpartition("/")[0] == prefix
        }


def list_level(client: Client, prefix: str) -> tuple[list[str], list[str]]:
    """What lies right under `prefix`: keys of deeper prefixes, names of objects."""
    import obstore

    with errors(client, "list", prefix):
        result = obstore.list_with_delimiter(client.store, prefix or None)
    return list(result["common_prefixes"]), [meta["path"].rpartition("/")[2] for meta in result["objects"]]


def get_small(client: Client, key: str, name: str, limit_bytes: int) -> bytes | None:
    """Content of an object of at most `limit_bytes`, None when it is not there."""
    import obstore

    with errors(client, "read", key):
        try:
            result = obstore.get(client.store, key)
            size = result.meta["size"]
            if size <= limit_bytes:
                return bytes(result.bytes())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None
    raise VerificationError(f"{name}: {size} bytes are over the limit of {limit_bytes}")


def create(
    client: Client, key: str, views: Sequence[bytes | memoryview], *, before: Callable[[], None] = lambda: None
) -> bool:
    """Make an object, unless there is one; False when there is one with other content.

    `before` is called right before each try, and what it raises ends them. A conditional write that got no answer may have
    arrived or not; it is repeated, and when the first try did arrive, the next finds these very bytes.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError

    payload: Any = b"" if not views else views[0] if len(views) == 1 else list(views)
    end_s = time.monotonic() + client.options.retry_for_s
    number = 0
    while True:
        before()
        try:
            with errors(client, "write", key):
                try:
                    obstore.put(client.once, key, payload, mode="create", use_multipart=False)
                    return True
                except AlreadyExistsError:
                    # Also the answer while another write of the key is under way; then nothing is there yet.
                    if size_of(client, key) is not None:
                        return holds(client, key, views)
                    raise
        except StorageError as error:
            if time.monotonic() >= end_s or not _may_pass(error.__cause__):
                raise
        time.sleep(_jitter.uniform(0, min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** min(number, 16))))
        number += 1


def put_parts(client: Client, key: str, views: Sequence[memoryview], size: int) -> bool:
    """Make a large object from parts that go up side by side; False when there is one with other content."""
    import obstore

    if size_of(client, key) is not None:
        return holds(client, key, views)
    options = client.options
    part = max(options.part_bytes, -(-size // MAX_PARTS))
    payload: Any = views[0] if len(views) == 1 else list(chunks(views, min(part, CHUNK_BYTES)))
    try:
        with errors(client, "write", key):
            obstore.put(
                client.store, key, payload, use_multipart=True, chunk_size=part, max_concurrency=options.parallel
            )
    except StorageError as error:
        # The last answer may have been lost on its way, and the object be there.
        with contextlib.suppress(StorageError):
            if size_of(client, key) is not None and holds(client, key, views):
                return True
        raise _of_parts(client, key, error) from error
    return True


def put_stream(client: Client, key: str, chunks: Iterable[bytearray], size: int) -> bool:
    """Make a large object of `size` bytes from chunks that are made as they go up; False when there is one already.

    What making them raises is raised here, and then no object comes to be: one appears only with its last part. A few parts are in
    memory at a time (`parallel` and two more).
    """
    import obstore

    if size_of(client, key) is not None:
        return False
    options = client.options
    part = max(options.part_bytes, -(-size // MAX_PARTS))
    problems: list[Exception] = []

    def handed_over() -> Iterator[bytearray]:
        try:
            yield from chunks
        except Exception as error:
            problems.append(error)
            raise

    try:
        with errors(client, "write", key):
            obstore.put(
                client.store,
                key,
                handed_over(),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=options.parallel,
            )
    except Exception as error:
        if problems:  # the client may tell of a part it could not drop instead
            raise problems[0] from None
        if not isinstance(error, StorageError):
            raise
        # The last answer may have been lost on its way. Nobody else writes here, and parts become an object all at once.
        with contextlib.suppress(StorageError):
            if size_of(client, key) == size:
                return True
        raise _of_parts(client, key, error) from error
    return True


def _of_parts(client: Client, key: str, error: StorageError) -> StorageError:
    """What to say of an upload in parts that failed."""
    if "Error performing DELETE" not in str(error.__cause__):
        return error
    # obstore then asks the store to drop the parts, and tells of that request's failure in place of the first.
    return StorageError(
        f"cannot write {client.where}/{key}: a part did not go through in {client.options.retry_for_s:g} s; "
        "the others stay hidden in the bucket until its rule for incomplete uploads drops them"
    )


def size_of(client: Client, key: str) -> int | None:
    """Size of the object at `key`, None when there is none."""
    import obstore

    with errors(client, "look at", key):
        try:
            return int(obstore.head(client.store, key)["size"])
        except FileNotFoundError:
            return None


def holds(client: Client, key: str, views: Sequence[bytes | memoryview]) -> bool:
    """True when the object at `key` is, byte for byte, `views`."""
    import obstore

    expected = [memoryview(view).cast("B") for view in views]
    if size_of(client, key) != sum(len(view) for view in expected):
        return False
    at = 0
    for chunk in chunks(expected):
        with errors(client, "read", key):
            if memoryview(obstore.get_range(client.store, key, start=at, length=len(chunk))) != chunk:
                return False
        at += len(chunk)
    return True


def _check_options(url: StoreUrl, options: StoreOptions) -> None:
    if url.scheme != "s3":
        for name in ("endpoint", "kms_key"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} {getattr(options, name)!r} is for s3:// roots; {url.text} is not one")
    if options.part_bytes < MIN_PART_BYTES or options.parallel < 1:
        raise ConfigError(
            f"part_bytes={options.part_bytes}, parallel={options.parallel}: "
            f"parts have at least {MIN_PART_BYTES} bytes and at least one goes up at a time"
        )
    if url.scheme == "s3" and not options.allow_http:
        named = {"endpoint": options.endpoint or ""}
        if options.endpoint is None:
            named = {name: os.environ.get(name, "") for name in _ENDPOINT_VARIABLES}
        for origin, address in named.items():
            if address and not address.lower().startswith("https://"):
                raise ConfigError(
                    f"{origin} {address!r} has no TLS: weights and credentials would cross the network in the clear. "
                    "Use https://, or allow http explicitly (allow_http) for a server on this machine"
                )


def _make_store(url: StoreUrl, options: StoreOptions, *, repeat: bool) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    client: ClientConfig = {
        "allow_http": options.allow_http,
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "timeout": timedelta(seconds=options.request_timeout_s),
        "user_agent": "keepstep",
    }
    retry: RetryConfig = {
        "backoff": {"init_backoff": timedelta(seconds=BACKOFF_S[0]), "max_backoff": timedelta(seconds=BACKOFF_S[1])},
        "max_retries": 1000 if repeat else 0,  # time is what ends it
        "retry_timeout": timedelta(seconds=options.retry_for_s),
    }
    prefix = url.prefix or None
    if url.scheme == "gs":
        return GCSStore(url.bucket, prefix=prefix, client_options=client, retry_config=retry)
    if url.scheme == "az":
        return AzureStore(url.bucket, prefix=prefix, client_options=client, retry_config=retry)
    config: dict[str, Any] = {"disable_bulk_delete": True}  # pruning deletes one object at a time, marker first
    if options.endpoint is not None:
        config["endpoint"] = options.endpoint
    if options.region is not None:
        config["region"] = options.region
    if options.kms_key is not None:
        config |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.kms_key}
    if options.checksum != "none":
        config["checksum_algorithm"] = options.checksum
    return S3Store(url.bucket, prefix=prefix, client_options=client, retry_config=retry, **config)


def _reason(error: BaseException, action: str) -> str:
    """The store's own words, in one line."""
    text = str(error)
    if _ROLE_ADDRESS in text:
        return "no credentials: none in the environment, and this machine gives none for a role"
    match = _ERROR_XML.search(text)
    status = _STATUS.search(text)
    if match is not None:
        words = ": ".join(part for part in (match["code"], match["message"]) if part)
        text = f"{status['text'].strip()}: {words}" if status else words
    elif "HTTP error: " in text:  # nobody answered; what follows is the HTTP library's description of itself
        text = "no answer: " + text.partition("HTTP error: ")[2].partition("Debug source")[0]
    text = " ".join(text.split())[:300]
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        right = "the right to delete" if action == "delete" else "put, get and list"
        text += f"; this identity needs {right} under the prefix"
    return text


def _may_pass(error: BaseException | None) -> bool:
    """True for errors that another try may not meet: no answer, a cut connection, a server's own failure, a conflict."""
    if type(error).__name__ not in ("GenericError", "AlreadyExistsError"):
        return False
    status = _STATUS.search(str(error))
    return status is None or status["code"][0] == "5" or status["code"] in ("408", "409", "429")
