"""The manifest: an OpenSSF Model Signing (OMS) v1.0 bundle over every other file of a checkpoint.

sigstore bundle (JSON) > DSSE envelope > in-toto Statement v1 > predicate `https://model_signing/signature/v1.0`. The
signature is ECDSA over P-256 with SHA-256. Our own facts lie in `predicate.keepstep`, which other verifiers ignore.
Unsigned, the statement itself is the file. Everything read here may be hostile: sizes are bounded, types are checked,
nothing is looked up by name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.blocks import body_bytes, parse_blocks_field
from keepstep.checkpoint.format.layout import (
    MARKER_SIGNED,
    MARKER_UNSIGNED,
    MARKERS,
    MAX_MANIFEST_BYTES,
    is_plain_file_name,
)
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.keys import public_pem
from keepstep.records.codec import to_json
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


class UntrustedKeyError(VerificationError):
    """Raised when a manifest is signed, but by a key that is not the trusted one."""


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
    tools.
    """

    files: tuple[FileFact, ...]
    facts: Facts | None
    root_digest: str
    signed: bool
    digest: str
    key_sha256: str | None = None


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


class _Signature(msgspec.Struct, frozen=True):
    sig: str


class _Envelope(msgspec.Struct, frozen=True):
    payload: str
    payloadType: str
    signatures: list[_Signature]


class _KeyHint(msgspec.Struct, frozen=True):
    hint: str | None = None


class _Material(msgspec.Struct, frozen=True):
    publicKey: _KeyHint | None = None


class _Bundle(msgspec.Struct, frozen=True):
    mediaType: str
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


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


def pae(payload: bytes) -> bytes:
    """DSSE pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def sign_statement(statement: bytes, key: EllipticCurvePrivateKey) -> bytes:
    """The bundle: `statement` signed by `key`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    signature = key.sign(pae(statement), ec.ECDSA(hashes.SHA256()))
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": hashlib.sha256(public_pem(key.public_key())).hexdigest()},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return to_json(bundle)


def parse_manifest(
    data: bytes,
    marker: str,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
) -> Manifest:
    """Check and read the marker file `marker` with content `data`.

    `trusted_key` None means that signatures are not checked at all; with `allow_unsigned` an unsigned manifest is
    accepted too. Raises VerificationError; UntrustedKeyError and UnsignedError are the cases where policy, not damage,
    is the reason.
    """
    if marker == MARKER_UNSIGNED:
        if not allow_unsigned:
            raise UnsignedError(f"{marker}: the checkpoint is not signed, and only signed ones are accepted")
        return _parse_statement(data, marker, hashlib.sha256(data).hexdigest(), None)
    if marker != MARKER_SIGNED:
        raise VerificationError(f"{marker}: not the name of a manifest")
    bundle = _decode(data, _Bundle, marker)
    if bundle.mediaType != BUNDLE_TYPE:
        raise VerificationError(f"{marker}: media type is {bundle.mediaType!r}, expected {BUNDLE_TYPE!r}")
    envelope = bundle.dsseEnvelope
    if envelope.payloadType != PAYLOAD_TYPE or len(envelope.signatures) != 1:
        raise VerificationError(f"{marker}: not an in-toto payload with one signature")
    try:
        payload = base64.b64decode(envelope.payload, validate=True)
        signature = base64.b64decode(envelope.signatures[0].sig, validate=True)
    except (binascii.Error, ValueError) as error:
        raise VerificationError(f"{marker}: not base64: {error}") from None
    key_sha256 = None
    if trusted_key is not None:
        hint = bundle.verificationMaterial.publicKey.hint if bundle.verificationMaterial.publicKey else None
        key_sha256 = check_signature(payload, signature, trusted_key, hint, marker)
    return _parse_statement(payload, marker, hashlib.sha256(data).hexdigest(), key_sha256)


def check_signature(
    payload: bytes, signature: bytes, key: EllipticCurvePublicKey, hint: str | None, marker: str
) -> str:
    """Verify `signature` over `payload`; return the key's SHA-256. Raises VerificationError or UntrustedKeyError."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    fingerprint = hashlib.sha256(public_pem(key)).hexdigest()
    try:
        key.verify(signature, pae(payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        if hint and hint != fingerprint:
            raise UntrustedKeyError(f"{marker}: signed by key {hint[:16]}, trusted is {fingerprint[:16]}") from None
        raise VerificationError(f"{marker}: the signature does not match its content") from None
    return fingerprint


def _decode(data: bytes, kind: type[Any], marker: str) -> Any:
    if len(data) > MAX_MANIFEST_BYTES:
        raise VerificationError(f"{marker}: {len(data)} bytes are over the limit of {MAX_MANIFEST_BYTES}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{marker}: not a manifest: {error}") from None


def _parse_statement(payload: bytes, marker: str, digest: str, key_sha256: str | None) -> Manifest:
    statement: _Statement = _decode(payload, _Statement, marker)
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
        digest=digest,
        key_sha256=key_sha256,
    )
