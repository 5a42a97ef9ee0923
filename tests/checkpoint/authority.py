"""A small certificate authority: root, intermediate, and leaf certificates as sigstore's authority writes them."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keepstep.checkpoint.trust.identity import ISSUER_OID, ISSUER_V1_OID
from keepstep.checkpoint.trust.signers import FileSigner

IDENTITY = "https://ci.example.org/train/job7"
ISSUER = "https://accounts.example.org"
DAY = datetime.timedelta(days=1)
_NO_USAGE = dict.fromkeys(
    (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


def utf8_string(text: str) -> bytes:
    """DER UTF8String of a short text."""
    data = text.encode()
    return bytes([0x0C, len(data)]) + data


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def usage(**allowed: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**(_NO_USAGE | allowed))


def certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *extensions: tuple[x509.ExtensionType, bool],
    begin: datetime.datetime | None = None,
    end: datetime.datetime | None = None,
) -> x509.Certificate:
    """A certificate of `key`'s public half, valid from yesterday for a month unless said otherwise."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number()).public_key(key.public_key())
    builder = builder.subject_name(_name(subject)).issuer_name(_name(issuer))
    builder = builder.not_valid_before(begin or now - DAY).not_valid_after(end or now + 30 * DAY)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


def der(*certificates: x509.Certificate) -> tuple[bytes, ...]:
    return tuple(one.public_bytes(serialization.Encoding.DER) for one in certificates)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Authority(msgspec.Struct, frozen=True):
    """Root and intermediate with their keys."""

    root: x509.Certificate
    root_key: ec.EllipticCurvePrivateKey
    middle: x509.Certificate
    middle_key: ec.EllipticCurvePrivateKey

    def leaf(
        self,
        key: ec.EllipticCurvePrivateKey,
        *,
        identity: str | None = IDENTITY,
        issuer: str | None = ISSUER,
        old_issuer: str | None = None,
        purpose: x509.ObjectIdentifier | None = ExtendedKeyUsageOID.CODE_SIGNING,
        sign: bool = True,
        ca: bool = False,
        begin: datetime.datetime | None = None,
        end: datetime.datetime | None = None,
    ) -> x509.Certificate:
        """A signing certificate; like sigstore's, it has no subject, and the identity in subjectAltName."""
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (usage(digital_signature=sign, key_agreement=not sign), True)
        ]
        if identity is not None:
            kind = x509.RFC822Name if "@" in identity else x509.UniformResourceIdentifier
            extensions.append((x509.SubjectAlternativeName([kind(identity)]), True))
        if purpose is not None:
            extensions.append((x509.ExtendedKeyUsage([purpose]), False))
        if issuer is not None:
            extensions.append((_unknown(ISSUER_OID, utf8_string(issuer)), False))
        if old_issuer is not None:
            extensions.append((_unknown(ISSUER_V1_OID, old_issuer.encode()), False))
        if ca:
            extensions.append((x509.BasicConstraints(True, None), True))
        return certificate("", key, "middle", self.middle_key, *extensions, begin=begin, end=end)

    def signer(self, key: ec.EllipticCurvePrivateKey | None = None, **leaf: object) -> FileSigner:
        """A signer with a new key (or `key`) and its chain without the root."""
        key = key or new_key()
        return FileSigner(key, der(self.leaf(key, **leaf), self.middle))  # type: ignore[arg-type]


def _unknown(oid: str, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)


def new_authority(name: str = "root") -> Authority:
    """An authority whose intermediate may issue for code signing only."""
    root_key, middle_key = new_key(), new_key()
    signs = (usage(key_cert_sign=True, crl_sign=True), True)
    now = datetime.datetime.now(datetime.UTC)
    long = {"begin": now - 4000 * DAY, "end": now + 4000 * DAY}
    root = certificate(name, root_key, name, root_key, (x509.BasicConstraints(True, None), True), signs, **long)
    middle = certificate(
        "middle",
        middle_key,
        name,
        root_key,
        (x509.BasicConstraints(True, 0), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False),
        signs,
        **long,
    )
    return Authority(root, root_key, middle, middle_key)


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
