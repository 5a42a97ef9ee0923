"""Flags that say whose checkpoints are trusted and what signs them, alike for `keepstep run` and `keepstep ckpt`.

A flag goes before its variable (KEEPSTEP_TRUST_KEY and so on, see checkpoint/trust/policy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from keepstep.checkpoint.trust.policy import (
    TrustOptions,
    check_options,
    environment_of,
    load_policy,
    merge_options,
    options_from_environment,
)
from keepstep.records.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

POLICY_FLAGS: dict[str, dict[str, Any]] = {
    "--trust-key": {
        "multiple": True,
        "metavar": "PEM",
        "help": "Public key whose checkpoints are restored [default: this installation's].",
    },
    "--trust-identity": {
        "multiple": True,
        "metavar": "ID",
        "help": "URI or email of a trusted certificate; the n-th goes with the n-th --trust-issuer.",
    },
    "--trust-issuer": {"multiple": True, "metavar": "URL", "help": "Who vouches for that identity."},
    "--trust-root": {"multiple": True, "metavar": "PEM", "help": "Root certificates of trusted identities."},
    "--unsigned": {"is_flag": True, "help": "No signatures: accept unsigned checkpoints (and write such)."},
}
"""Who is trusted. Name -> arguments of click.option."""

SIGNER_FLAGS: dict[str, dict[str, Any]] = {
    "--ckpt-signer": {
        "default": None,
        "metavar": "CMD",
        "help": "Program that signs: bytes on stdin, signature on stdout; no shell [default: this installation's key].",
    },
    "--ckpt-signer-cert": {
        "default": None,
        "metavar": "PEM",
        "help": "Its public key, or its certificate chain.",
    },
}
"""What signs. Name -> arguments of click.option."""

_FILES = ("trust_key", "trust_root", "ckpt_signer_cert")


def policy_options(command: F) -> F:
    """Add POLICY_FLAGS to a command; `trust_options` makes of its flags what they mean."""
    return _add(POLICY_FLAGS, command)


def signer_options(command: F) -> F:
    """Add SIGNER_FLAGS to a command."""
    return _add(SIGNER_FLAGS, command)


def _add(flags: Mapping[str, dict[str, Any]], command: F) -> F:
    for name, kwargs in reversed(list(flags.items())):
        command = click.option(name, **kwargs)(command)
    return command


def given_options(flags: Mapping[str, Any]) -> TrustOptions:
    """What the flags alone say, files as absolute paths. Raises ConfigError: a file that is not there."""
    fields: dict[str, Any] = {}
    for name in TrustOptions.__struct_fields__:
        value = flags.get(name)
        fields[name] = tuple(value) if isinstance(value, list | tuple) else value
        if name in _FILES and value:
            flag = f"--{name.replace('_', '-')}"
            fields[name] = _file(value, flag) if isinstance(value, str) else tuple(_file(v, flag) for v in value)
    return TrustOptions(**{name: value for name, value in fields.items() if value})


def trust_options(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> TrustOptions:
    """What the flags say, and the environment where they say nothing. Raises ConfigError."""
    return merge_options(given_options(flags), options_from_environment(environ))


def checked_options(flags: Mapping[str, Any]) -> TrustOptions:
    """What the flags of `keepstep run` say, for its configuration.

    Everything that ranks are going to read, with what the environment says besides, is read here once, so that a mistake
    shows before anything is started. Raises ConfigError or StorageError.
    """
    given, options = given_options(flags), trust_options(flags)
    environment_of(given)
    check_options(options)
    named = options.trust_key or options.trust_identity or options.ckpt_signer
    if named:
        load_policy(options)
    return given


def _file(text: str, flag: str) -> str:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{flag} {text!r}: no such file (working directory {Path.cwd()})")
    return str(path.absolute())
