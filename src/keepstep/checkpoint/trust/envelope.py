"""A signed payload: DSSE envelope in a sigstore bundle (JSON, v0.3), with a public key's hint or a certificate chain.

The signature is ECDSA over P-256 with SHA-256, over DSSE's pre-authentication encoding. What opens a bundle here reads
its structure only; who signed is decided in trust/policy.py. Everything read may be hostile: sizes are bounded and types
are checked.

Formats: github.com/secure-systems-lab/dsse (envelope, PAE), github.com/sigstore/protobuf-specs (bundle).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.layout import MAX_MANIFEST_BYTES
from keepstep.checkpoint.trust.keys import public_pem
from keepstep.records.codec import to_json
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from keepstep.checkpoint.trust.signers import Signer

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_CERTIFICATES = 8
"""Certificates of a chain, leaf included. Chains in use have two to four."""


class UntrustedKeyError(VerificationError):
    """Raised when something is signed, but by nobody who is trusted here: policy, not damage, is the reason."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a bundle; nothing of them is verified yet.

    `hint` is what the bundle says the SHA-256 of its public key's PEM is. `certificates` are DER, leaf first; empty when
    the bundle names a bare key.
    """

    payload: bytes
    signature: bytes
    hint: str | None
    certificates: tuple[bytes, ...]


class _Signature(msgspec.Struct, frozen=True):
    sig: str


class _Envelope(msgspec.Struct, frozen=True):
    payload: str
    payloadType: str
    signatures: list[_Signature]


class _KeyHint(msgspec.Struct, frozen=True):
    hint: str | None = None


class _Certificate(msgspec.Struct, frozen=True):
    rawBytes: str


class _Chain(msgspec.Struct, frozen=True):
    certificates: list[_Certificate]


class _Material(msgspec.Struct, frozen=True):
    publicKey: _KeyHint | None = None
    x509CertificateChain: _Chain | None = None
    certificate: _Certificate | None = None


class _Bundle(msgspec.Struct, frozen=True):
    mediaType: str
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


def pae(payload: bytes, payload_type: str) -> bytes:
    """DSSE pre-authentication encoding: the bytes that are signed."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)


def seal(payload: bytes, payload_type: str, signer: Signer) -> bytes:
    """The bundle: `payload` signed by `signer`. Raises what the signer raises."""
    signature = signer.sign(pae(payload, payload_type))
    material: dict[str, Any] = {"tlogEntries": []}
    if signer.certificates:
        chain = [{"rawBytes": base64.b64encode(der).decode()} for der in signer.certificates]
        material["x509CertificateChain"] = {"certificates": chain}
    else:
        material["publicKey"] = {"hint": fingerprint(signer.public_key)}
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": material,
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": payload_type,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return to_json(bundle)


def open_bundle(data: bytes, what: str, payload_type: str) -> Opened:
    """Take a bundle apart; `what` names it in messages. Raises VerificationError."""
    bundle: _Bundle = decode(data, _Bundle, what)
    if bundle.mediaType != BUNDLE_TYPE:
        raise VerificationError(f"{what}: media type is {bundle.mediaType!r}, expected {BUNDLE_TYPE!r}")
    envelope, material = bundle.dsseEnvelope, bundle.verificationMaterial
    if envelope.payloadType != payload_type or len(envelope.signatures) != 1:
        raise VerificationError(f"{what}: is not a payload of type {payload_type} with one signature")
    chain = material.x509CertificateChain.certificates if material.x509CertificateChain else []
    if material.certificate is not None:
        chain = [material.certificate, *chain]
    if len(chain) > MAX_CERTIFICATES:
        raise VerificationError(f"{what}: has {len(chain)} certificates, the limit is {MAX_CERTIFICATES}")
    return Opened(
        payload=_base64(envelope.payload, what),
        signature=_base64(envelope.signatures[0].sig, what),
        hint=material.publicKey.hint if material.publicKey else None,
        certificates=tuple(_base64(certificate.rawBytes, what) for certificate in chain),
    )


def decode(data: bytes, kind: type[Any], what: str) -> Any:
    """`data`, JSON of bounded size, as `kind`. Raises VerificationError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise VerificationError(f"{what}: {len(data)} bytes are over the limit of {MAX_MANIFEST_BYTES}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{what}: is not valid: {error}") from None


def _base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise VerificationError(f"{what}: not base64: {error}") from None


def fingerprint(key: EllipticCurvePublicKey) -> str:
    """SHA-256 of the key's PEM in hexadecimal: how a key is named here and in a bundle's hint."""
    return hashlib.sha256(public_pem(key)).hexdigest()


def signature_matches(signed: bytes, signature: bytes, key: EllipticCurvePublicKey) -> bool:
    """Whether `signature` (DER) is `key`'s over the bytes `signed`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
