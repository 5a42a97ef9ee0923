"""What the verbs of `keepstep ckpt` that look at a root share: its flags, whose manifests are trusted, how sizes print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from keepstep.checkpoint.keeping.retention import Entry
from keepstep.checkpoint.storage.source import Root, StoreOptions, open_root, store_options
from keepstep.checkpoint.trust.keys import key_path, public_key_path
from keepstep.checkpoint.trust.policy import TrustPolicy, load_policy
from keepstep.cli.output import NotFoundError, note
from keepstep.cli.store_flags import STORE_FLAGS, given_store
from keepstep.cli.trust_flags import trust_options
from keepstep.launcher.files import keepstep_home
from keepstep.records.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

ROOT_HELP = "ROOT is a path, or s3://bucket/prefix, gs://bucket/prefix, az://container/prefix."


def root_argument(function: F) -> F:
    """Add ROOT and how to reach it; the function receives `root` (text) and `store` (StoreOptions), by flags and environment."""

    def gather(**values: Any) -> Any:
        given = {name: values.pop(name) for name in map(_parameter, STORE_FLAGS)}
        return function(store=store_options(given_store(given)), **values)

    gather.__name__, gather.__doc__ = function.__name__, function.__doc__
    gather.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
    decorated: Any = gather
    for name, kwargs in reversed(STORE_FLAGS.items()):
        decorated = click.option(name, **kwargs)(decorated)
    return click.argument("root", metavar="ROOT")(decorated)  # type: ignore[no-any-return]


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def open_existing(root: str, store: StoreOptions) -> Root:
    """The root. Raises NotFoundError when it is a path with nothing there, ConfigError."""
    opened = open_root(root, store)
    if opened.tier == "disk" and not Path(opened.where).is_dir():
        raise NotFoundError(f"{opened.where}: no such folder")
    return opened


def reader_policy(flags: Mapping[str, Any], *, needed: bool) -> TrustPolicy:
    """Whose manifests verify, by the flags and the environment. Where nobody is trusted signatures are not checked, and that
    is said; with `needed`, it is an error unless --unsigned allows it. Never makes a key. Raises ConfigError or StorageError.
    """
    options = trust_options(flags)
    named = options.trust_key or options.trust_identity or options.ckpt_signer or options.unsigned
    if not named and not key_path().exists():
        if needed:
            raise ConfigError(
                f"there is no key to check signatures with ({public_key_path()} is not there); give --trust-key FILE, the "
                "public key of whoever signs, or --unsigned to check hashes only"
            )
        policy = TrustPolicy(allow_unsigned=True)
    else:
        policy = load_policy(options)
    if policy.is_empty:
        note("signatures are NOT checked: nobody is trusted here")
    return policy


def ended_runs(entries: list[Entry], named: tuple[str, ...]) -> frozenset[str]:
    """Runs that no process saves for any more: those a person named, and those whose run folder here has a verdict."""
    runs = {entry.name.run_id for entry in entries if not entry.committed}
    return frozenset(named) | {run for run in runs if (keepstep_home() / "runs" / run / "verdict.json").exists()}


def format_bytes(size: int | None) -> str:
    """Size for people: 1536 -> '1.5 KB' (powers of 1000); None -> '-'."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def short_key(key_sha256: str | None, signed: bool | None) -> str | None:
    """Who signed, for a table: the begin of the key's SHA-256."""
    if signed is None:
        return None
    if not signed:
        return "unsigned"
    return "unchecked" if key_sha256 is None else key_sha256[:12]
