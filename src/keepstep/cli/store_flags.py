"""Flags that say how to reach an object store, alike for `keepstep run` and `keepstep ckpt`.

A flag goes before its variable (KEEPSTEP_STORE_ENDPOINT and so on, see checkpoint/storage/source.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from keepstep.checkpoint.storage.source import StoreOptions, store_options
from keepstep.records.errors import ConfigError

STORE_FLAGS: dict[str, dict[str, Any]] = {
    "--store-endpoint": {"default": None, "metavar": "URL", "help": "Address of an S3-compatible server."},
    "--store-region": {"default": None, "metavar": "REGION", "help": "Region of the bucket."},
    "--store-allow-http": {"is_flag": True, "help": "Accept an endpoint without TLS."},
    "--kms-key": {"default": None, "metavar": "KEY", "help": "Key of SSE-KMS that objects are encrypted with."},
}
"""Name -> arguments of click.option."""


def given_store(flags: Mapping[str, Any]) -> StoreOptions:
    """What the flags alone say. Raises ConfigError: an endpoint that is no URL, or one without TLS that was not allowed."""
    options = StoreOptions(
        endpoint=flags["store_endpoint"] or None,
        region=flags["store_region"] or None,
        kms_key=flags["kms_key"] or None,
        allow_http=bool(flags["store_allow_http"]),
    )
    if options.endpoint is None:
        return options
    where = f"--store-endpoint {options.endpoint!r}"
    url = urlsplit(options.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc:
        raise ConfigError(f"{where}: give https://HOST[:PORT], without user and password")
    if url.scheme == "http" and not store_options(options).allow_http:
        raise ConfigError(f"{where} has no TLS; use https://, or --store-allow-http for a server on this machine")
    return options


def shown_flags(options: StoreOptions) -> list[str]:
    """The flags that say what `options` say, for a command line that is shown; a value with spaces is not quoted yet."""
    pairs = (
        ("--store-endpoint", options.endpoint),
        ("--store-region", options.region),
        ("--kms-key", options.kms_key),
    )
    flags = [text for flag, value in pairs if value for text in (flag, value)]
    return [*flags, *(["--store-allow-http"] if options.allow_http else [])]
