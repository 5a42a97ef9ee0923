"""Who stands behind a certificate: its chain up to a given root, its identity, and the issuer of that identity.

Identity is a URI or an email address of the certificate's subjectAltName; issuer is the OIDC issuer that Fulcio (the
certificate authority of sigstore) writes beside it. The same identity from two issuers is two persons, so the two are
only ever compared together. Other authorities can write that extension too.

Limits: no transparency log and no time stamp is asked for, and no revocation list. The time of signing is the one that
the signed payload itself names: whoever holds a certificate's key can sign with an earlier date after it has run out.

Sources: RFC 5280 (paths, extensions); github.com/sigstore/fulcio/blob/main/docs/oid-info.md (issuer extension).
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.trust.envelope import UntrustedKeyError
from keepstep.records.errors import ConfigError, VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import BasicConstraints, Certificate, ExtendedKeyUsage, KeyUsage
    from cryptography.x509.verification import Policy

ISSUER_OID = "1.3.6.1.4.1.57264.1.8"
"""Fulcio's extension "Issuer (V2)": a DER UTF8String."""
ISSUER_V1_OID = "1.3.6.1.4.1.57264.1.1"
"""Its forerunner: the text itself, without DER."""
_MAX_ISSUER_BYTES = 4096
_UTF8_STRING = 0x0C  # DER tag


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What a verified leaf certificate says: identities (URIs, email addresses) and who vouches for them."""

    identities: tuple[str, ...]
    issuer: str | None


def load_certificates(certificates: tuple[bytes, ...], what: str) -> list[Certificate]:
    """DER certificates. Raises VerificationError naming `what`."""
    from cryptography import x509

    loaded = []
    for number, der in enumerate(certificates):
        try:
            loaded.append(x509.load_der_x509_certificate(der))
        except ValueError as error:
            raise VerificationError(f"{what}: certificate {number} cannot be read: {error}") from None
    return loaded


def leaf_key(leaf: Certificate, what: str) -> EllipticCurvePublicKey:
    """The P-256 key of a certificate. Raises VerificationError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = leaf.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise VerificationError(f"{what}: the certificate's key cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise VerificationError(f"{what}: the certificate's key is not a P-256 key")
    return key


def verify_chain(chain: list[Certificate], roots: list[Certificate], at_ns: int, what: str) -> Holder:
    """Verify `chain` (leaf first) up to one of `roots` at the time `at_ns` (UTC ns); what the leaf says.

    Raises UntrustedKeyError: no path to a root at that time, or a certificate that may not sign. Raises
    VerificationError when a certificate cannot be understood, ConfigError when the installed cryptography is too old.
    """
    from cryptography import x509
    from cryptography.x509 import verification

    try:
        extension_policy, criticality = verification.ExtensionPolicy, verification.Criticality
    except AttributeError:
        raise ConfigError(
            "certificate identities need cryptography 45 or newer: pip install 'keepstep[checkpoint]' --upgrade"
        ) from None
    # The rules of the web (a host name, a server's or client's purpose) do not fit; those of RFC 5280 stay, and the
    # purpose asked for is code signing, on every level that names purposes (as sigstore's clients ask). That an issuer is
    # an authority is checked by the path builder itself.
    ca_policy = (
        extension_policy.permit_all()
        .require_present(x509.BasicConstraints, criticality.AGNOSTIC, None)
        .may_be_present(x509.KeyUsage, criticality.AGNOSTIC, _may_certify)
        .may_be_present(x509.ExtendedKeyUsage, criticality.AGNOSTIC, _for_code)
    )
    leaf_policy = (
        extension_policy.permit_all()
        .require_present(x509.SubjectAlternativeName, criticality.AGNOSTIC, None)
        .may_be_present(x509.BasicConstraints, criticality.AGNOSTIC, _is_no_authority)
        .may_be_present(x509.KeyUsage, criticality.AGNOSTIC, _may_sign)
        .may_be_present(x509.ExtendedKeyUsage, criticality.AGNOSTIC, _for_code)
    )
    at = _datetime(at_ns, what)
    builder = verification.PolicyBuilder().store(verification.Store(roots)).time(at)
    verifier = builder.extension_policies(ca_policy=ca_policy, ee_policy=leaf_policy).build_client_verifier()
    try:
        verifier.verify(chain[0], chain[1:])
    except verification.VerificationError as error:
        raise UntrustedKeyError(
            f"{what}: its certificate is not valid at {at:%Y-%m-%dT%H:%M:%SZ} under the trusted roots: {error}"
        ) from None
    except ValueError as error:
        raise VerificationError(f"{what}: its certificates cannot be understood: {error}") from None
    return Holder(identities=_identities(chain[0], what), issuer=_issuer(chain[0], what))


def _datetime(at_ns: int, what: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromtimestamp(at_ns // 1_000_000_000, datetime.UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):
        raise VerificationError(f"{what}: {at_ns} ns is no time of signing") from None


# ---- validators: a ValueError rejects the certificate, its text becomes part of the error


def _is_no_authority(_policy: Policy, _certificate: Certificate, constraints: BasicConstraints | None) -> None:
    if constraints is not None and constraints.ca:
        raise ValueError("an authority's certificate signed")


def _may_certify(_policy: Policy, _certificate: Certificate, usage: KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the issuing certificate may not issue certificates")


def _may_sign(_policy: Policy, _certificate: Certificate, usage: KeyUsage | None) -> None:
    if usage is not None and not usage.digital_signature:
        raise ValueError("the certificate may not be used for signatures")


def _for_code(_policy: Policy, _certificate: Certificate, usage: ExtendedKeyUsage | None) -> None:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if usage is not None and ExtendedKeyUsageOID.CODE_SIGNING not in usage:
        raise ValueError("the certificate is for purposes other than code signing")


# ---- what the leaf says


def _identities(leaf: Certificate, what: str) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise VerificationError(f"{what}: the certificate's names cannot be read: {error}") from None
    return (
        *names.get_values_for_type(x509.UniformResourceIdentifier),
        *names.get_values_for_type(x509.RFC822Name),
    )


def _issuer(leaf: Certificate, what: str) -> str | None:
    from cryptography import x509

    found = {extension.oid.dotted_string: extension.value for extension in leaf.extensions}
    for oid, is_der in ((ISSUER_OID, True), (ISSUER_V1_OID, False)):
        value = found.get(oid)
        if isinstance(value, x509.UnrecognizedExtension):
            raw = _utf8_string(value.value, what) if is_der else value.value
            try:
                return raw.decode()
            except UnicodeDecodeError:
                raise VerificationError(f"{what}: the certificate's issuer extension is not UTF-8") from None
    return None


def _utf8_string(der: bytes, what: str) -> bytes:
    """Content of a DER UTF8String (X.690, 8.1.3: the length in one byte, or in as many as the first one says)."""
    if len(der) <= _MAX_ISSUER_BYTES and der[:1] == bytes([_UTF8_STRING]) and len(der) >= 2:
        length, start = der[1], 2
        if length in (0x81, 0x82):
            start += length & 0x0F
            length = int.from_bytes(der[2:start], "big")
        if length == len(der) - start:
            return der[start:]
    raise VerificationError(f"{what}: the certificate's issuer extension is not a DER UTF8String")
