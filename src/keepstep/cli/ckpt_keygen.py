"""`keepstep ckpt keygen`: make a key that signs checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from keepstep.cli.output import emit, output_option
from keepstep.records.errors import ConfigError


@click.command("keygen")
@click.option("--out", type=click.Path(path_type=Path), default=None, metavar="DIR|FILE",
              help="Where to [default: $KEEPSTEP_HOME/keys/ckpt-p256.pem, the key that saves sign with].")  # fmt: skip
@output_option
def keygen(out: Path | None, output: str) -> None:
    """Make a P-256 key: FILE for the private half (mode 0600), the same name with .pub for the public one.

    Without --out it is the key that this installation signs with, which the first save would make otherwise. A key that is
    there is never overwritten. Whoever can read the private file can sign: keep it from the training script with an
    external signer (--ckpt-signer of `keepstep run`). JSON is `keepstep.key/1`.
    """
    from keepstep.checkpoint.storage.writer import storage_error
    from keepstep.checkpoint.trust.envelope import fingerprint
    from keepstep.checkpoint.trust.keys import KEY_NAME, key_path, load_public_key, make_key, need_cryptography

    need_cryptography()
    path = key_path() if out is None else out / KEY_NAME if out.is_dir() else out
    public = path.with_suffix(".pub")
    if path.suffix == ".pub":
        raise ConfigError(f"--out {out}: .pub is the ending of the public half; give another name")
    for taken in (path, public):
        if taken.exists() or taken.is_symlink():
            raise ConfigError(f"{taken} is there already and is not overwritten; give another --out, or move it away")
    try:
        make_key(path)
    except OSError as error:
        raise storage_error("make the key", path, error) from error
    record: dict[str, Any] = {
        "schema": "keepstep.key/1",
        "algorithm": "ECDSA P-256 SHA-256",
        "private_key": str(path.absolute()),
        "public_key": str(public.absolute()),
        "key_sha256": fingerprint(load_public_key(public)),
        "next": _next(path.absolute(), public.absolute(), is_own=path == key_path()),
    }
    emit(record, output, table=lambda console, _wide: _print(console, record), name=lambda r: str(r["key_sha256"]))


def _next(path: Path, public: Path, *, is_own: bool) -> str:
    """The command to go on with."""
    if is_own:
        return f"keepstep run --trust-key {shlex.quote(str(public))} SCRIPT"
    sign = f"openssl dgst -sha256 -sign {shlex.quote(str(path))}"
    return f"keepstep run --ckpt-signer {shlex.quote(sign)} --ckpt-signer-cert {shlex.quote(str(public))} SCRIPT"


def _print(console: Any, record: dict[str, Any]) -> None:
    for title, key in (("private key", "private_key"), ("public key", "public_key"), ("fingerprint", "key_sha256")):
        console.print(f"{title:<12} {record[key]}", markup=False, soft_wrap=True)
    console.print(f"next: {record['next']}", markup=False, soft_wrap=True)
