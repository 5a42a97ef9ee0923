"""The manifest: an OpenSSF Model Signing (OMS) v1.0 bundle over every other file of a checkpoint.

Bundle and envelope (trust/envelope.py) > in-toto Statement v1 > predicate `https://model_signing/signature/v1.0`. Our own
facts lie in `predicate.keepstep`, which other verifiers ignore.
Unsigned, the statement itself is the file. Everything read here may be hostile: sizes are bounded, types are checked,
nothing is looked up by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.blocks import body_bytes, parse_blocks_field
from keepstep.checkpoint.format.layout import (
    MARKER_SIGNED,
    MARKER_UNSIGNED,
    MARKERS,
    is_plain_file_name,
)
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.envelope import Opened, decode, fingerprint, open_bundle, pae, seal, signature_matches
from keepstep.checkpoint.trust.envelope import UntrustedKeyError as UntrustedKeyError  # noqa: PLC0414 (readers of manifests catch it)
from keepstep.checkpoint.trust.signers import as_signer
from keepstep.records.codec import to_json
from keepstep.records.errors import ConfigError, VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from keepstep.checkpoint.trust.signers import Signer

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


class UnsignedError(VerificationError):
    """Raised when a manifest is unsigned and only signed ones are accepted."""


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """The process that committed."""

    host: str
    pid: int


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`predicate.keepstep`: what the checkpoint is. Times are UTC nanoseconds, `created_at` RFC 3339.

    `restored_step`, `restored_from` and `life_started_ns` say where the cycle that wrote it began: the lineage is read
    from these. `scope` is the run id when that restore looked at one run only, None when it looked at the whole root.
    `metrics` are what the script gave with the save. `memory` is set for a set in memory alone: the algorithm of the fingerprints
    that its data files are listed by.
    """

    run: str
    step: int
    cycle: int
    attempt: int
    world: int
    parent: str | None
    writer: Writer
    created_at: str
    created_ns: int
    restored_step: int
    life_started_ns: int
    restored_from: str | None = None
    scope: str | None = None
    metrics: dict[str, float] = {}
    memory: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest whose signature (where there is one) and inner consistency were checked.

    `digest` is the SHA-256 of the marker file; a child names its parent by it. `facts` is None for bundles of other
    tools. `key_sha256` is the fingerprint of the key that signed, `identity` and `issuer` what its certificate says; None
    where that was not looked at.
    """

    files: tuple[FileFact, ...]
    facts: Facts | None
    root_digest: str
    signed: bool
    digest: str
    key_sha256: str | None = None
    identity: str | None = None
    issuer: str | None = None


class _Resource(msgspec.Struct, frozen=True):
    name: str
    algorithm: str
    digest: str
    size: int = -1
    blocks: str | None = None


class _Serialization(msgspec.Struct, frozen=True):
    method: str
    hash_type: str


class _Predicate(msgspec.Struct, frozen=True):
    serialization: _Serialization
    resources: list[_Resource]
    keepstep: Facts | None = None


class _Subject(msgspec.Struct, frozen=True):
    name: str
    digest: dict[str, str]


class _Statement(msgspec.Struct, frozen=True):
    type_: str = msgspec.field(name="_type")
    subject: list[_Subject]
    predicateType: str
    predicate: _Predicate


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as a manifest can hold them: numbers, and what turns into one (a tensor of one element).

    JSON has no NaN and no infinity: a metric that is not finite is left out, since it is nobody's best. Raises ConfigError
    naming the metric that is no number.
    """
    plain = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"metric {name!r} is a {type(value).__name__} and no number: {error}") from None
        if math.isfinite(number):
            plain[str(name)] = number
    return plain


def root_digest(files: list[FileFact] | tuple[FileFact, ...]) -> str:
    """SHA-256 over the raw digests of `files` in their order."""
    return hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in files)).hexdigest()


def _resource(file: FileFact) -> dict[str, Any]:
    """A file's entry. Other verifiers read name, algorithm and digest, and pass over the rest."""
    entry = {"name": file.name, "algorithm": "sha256", "digest": file.sha256, "size": file.size_bytes}
    return entry if file.blocks is None else {**entry, "blocks": file.blocks}


def build_statement(folder: str, files: list[FileFact], facts: Facts, *, marker: str) -> bytes:
    """The in-toto statement over `files` (sorted here by name) as JSON."""
    ordered = sorted(files, key=lambda file: file.name)
    statement: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": folder, "digest": {"sha256": root_digest(ordered)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [marker],
            },
            "resources": [_resource(file) for file in ordered],
            "keepstep": facts,
        },
    }
    return to_json(statement)


def sign_statement(statement: bytes, key: EllipticCurvePrivateKey | Signer) -> bytes:
    """The bundle: `statement` signed by `key`. Raises SigningError when a signer does not sign."""
    return seal(statement, PAYLOAD_TYPE, as_signer(key))


def parse_manifest(
    data: bytes,
    marker: str,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
) -> Manifest:
    """Check and read the marker file `marker` with content `data`, against one key; policy.check_manifest knows more.

    `trusted_key` None means that signatures are not checked at all; with `allow_unsigned` an unsigned manifest is
    accepted too. Raises VerificationError; UntrustedKeyError and UnsignedError are the cases where policy, not damage,
    is the reason.
    """
    if marker == MARKER_UNSIGNED:
        return parse_unsigned(data, allow_unsigned=allow_unsigned)
    opened = open_manifest(data, marker)
    key_sha256 = None if trusted_key is None else check_signature(opened, trusted_key, marker)
    return parse_statement(opened.payload, marker, data, key_sha256=key_sha256)


def open_manifest(data: bytes, marker: str) -> Opened:
    """Take the signed marker apart; nothing is verified yet. Raises VerificationError."""
    if marker != MARKER_SIGNED:
        raise VerificationError(f"{marker}: not the name of a manifest")
    return open_bundle(data, marker, PAYLOAD_TYPE)


def parse_unsigned(data: bytes, *, allow_unsigned: bool) -> Manifest:
    """Read the unsigned marker. Raises UnsignedError when that is not allowed, VerificationError."""
    if not allow_unsigned:
        raise UnsignedError(f"{MARKER_UNSIGNED}: the checkpoint is not signed, and only signed ones are accepted")
    return parse_statement(data, MARKER_UNSIGNED, data)


def check_signature(opened: Opened, key: EllipticCurvePublicKey, marker: str) -> str:
    """Verify that `key` signed; its fingerprint. Raises VerificationError or UntrustedKeyError."""
    trusted = fingerprint(key)
    if not signature_matches(pae(opened.payload, PAYLOAD_TYPE), opened.signature, key):
        if opened.hint and opened.hint != trusted:
            raise UntrustedKeyError(f"{marker}: signed by key {opened.hint[:16]}, trusted is {trusted[:16]}")
        raise VerificationError(f"{marker}: the signature does not match its content")
    return trusted


def parse_statement(payload: bytes, marker: str, data: bytes, *, key_sha256: str | None = None) -> Manifest:
    """What the statement `payload` of the marker with content `data` says. Raises VerificationError."""
    statement: _Statement = decode(payload, _Statement, marker)
    predicate = statement.predicate
    if statement.type_ != STATEMENT_TYPE or statement.predicateType != PREDICATE_TYPE or len(statement.subject) != 1:
        raise VerificationError(f"{marker}: not an OMS v1.0 statement")
    if (predicate.serialization.method, predicate.serialization.hash_type) != ("files", "sha256"):
        raise VerificationError(f"{marker}: only method files with sha256 is supported")
    files = []
    for resource in predicate.resources:
        if not is_plain_file_name(resource.name) or resource.name in MARKERS:
            raise VerificationError(f"{marker}: {resource.name!r} is not a plain file name")
        if resource.algorithm != "sha256" or len(resource.digest) != 64 or resource.digest != resource.digest.lower():
            raise VerificationError(f"{marker}: {resource.name}: digest is not lower-case SHA-256")
        try:
            bytes.fromhex(resource.digest)
        except ValueError:
            raise VerificationError(f"{marker}: {resource.name}: digest is not hexadecimal") from None
        if resource.blocks is not None:
            parse_blocks_field(resource.blocks, f"{marker}: {resource.name}")
            body_bytes(resource.size)
        files.append(
            FileFact(name=resource.name, size_bytes=resource.size, sha256=resource.digest, blocks=resource.blocks)
        )
    names = [file.name for file in files]
    if names != sorted(set(names)):
        raise VerificationError(f"{marker}: resources are not sorted by name or a name is there twice")
    root = root_digest(files)
    if statement.subject[0].digest.get("sha256") != root:
        raise VerificationError(f"{marker}: root digest does not match the digests of the files")
    return Manifest(
        files=tuple(files),
        facts=predicate.keepstep,
        root_digest=root,
        signed=marker == MARKER_SIGNED,
        digest=hashlib.sha256(data).hexdigest(),
        key_sha256=key_sha256,
    )
