"""Whose checkpoints are accepted: keys, and certificate identities with their issuers.

Without any setting it is the key that this installation signs with. As soon as one key or identity is named, exactly
those named are trusted, and the own key only when it is among them. A signature counts when one trusted key made it, or
when its certificate leads to a given root and names a trusted identity together with that identity's issuer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.layout import MARKER_UNSIGNED
from keepstep.checkpoint.storage.writer import storage_error
from keepstep.checkpoint.trust.envelope import Opened, UntrustedKeyError, fingerprint, pae, signature_matches
from keepstep.checkpoint.trust.identity import leaf_key, load_certificates, verify_chain
from keepstep.checkpoint.trust.keys import key_path, load_public_key, need_cryptography, signing_key
from keepstep.checkpoint.trust.manifest import (
    PAYLOAD_TYPE,
    Manifest,
    open_manifest,
    parse_statement,
    parse_unsigned,
)
from keepstep.checkpoint.trust.signers import Signer, command_signer, local_signer
from keepstep.records.errors import ConfigError, VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

ENV_TRUST_KEY = "KEEPSTEP_TRUST_KEY"
"""Files with public keys, separated like PATH."""
ENV_TRUST_IDENTITY = "KEEPSTEP_TRUST_IDENTITY"
"""Identities, separated by white space; the n-th goes with the n-th issuer."""
ENV_TRUST_ISSUER = "KEEPSTEP_TRUST_ISSUER"
ENV_TRUST_ROOT = "KEEPSTEP_TRUST_ROOT"
"""PEM files with root certificates, separated like PATH."""
ENV_UNSIGNED = "KEEPSTEP_UNSIGNED"
"""1: write checkpoints without signature, and accept such."""
ENV_SIGNER = "KEEPSTEP_CKPT_SIGNER"
ENV_SIGNER_CERT = "KEEPSTEP_CKPT_SIGNER_CERT"


class TrustOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user gave, by flags, environment or arguments; names as those of the flags. Files are not read yet."""

    trust_key: tuple[str, ...] = ()
    trust_identity: tuple[str, ...] = ()
    trust_issuer: tuple[str, ...] = ()
    trust_root: tuple[str, ...] = ()
    unsigned: bool = False
    ckpt_signer: str | None = None
    ckpt_signer_cert: str | None = None


class TrustPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Who is trusted. `identities` are (identity, issuer); `roots` end the chains of their certificates.

    `allow_unsigned` accepts what is not signed. With it and with nobody named, signatures are not looked at.
    """

    keys: tuple[EllipticCurvePublicKey, ...] = ()
    identities: tuple[tuple[str, str], ...] = ()
    roots: tuple[Certificate, ...] = ()
    allow_unsigned: bool = False

    @property
    def is_empty(self) -> bool:
        """Nobody is named."""
        return not self.keys and not self.identities


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """Who signed: the key's fingerprint, and what its certificate says where that was the reason for trust."""

    key_sha256: str | None = None
    identity: str | None = None
    issuer: str | None = None


# ---- from settings to a policy


def options_from_environment(environ: Mapping[str, str] | None = None) -> TrustOptions:
    """The settings that `keepstep run` hands to ranks, or a user has set. Raises ConfigError."""
    env = os.environ if environ is None else environ
    unsigned = env.get(ENV_UNSIGNED, "")
    if unsigned not in ("", "0", "1"):
        raise ConfigError(f"{ENV_UNSIGNED}={unsigned!r}: give 1 or 0")
    return TrustOptions(
        trust_key=_paths(env.get(ENV_TRUST_KEY, "")),
        trust_identity=tuple(env.get(ENV_TRUST_IDENTITY, "").split()),
        trust_issuer=tuple(env.get(ENV_TRUST_ISSUER, "").split()),
        trust_root=_paths(env.get(ENV_TRUST_ROOT, "")),
        unsigned=unsigned == "1",
        ckpt_signer=env.get(ENV_SIGNER) or None,
        ckpt_signer_cert=env.get(ENV_SIGNER_CERT) or None,
    )


def _paths(text: str) -> tuple[str, ...]:
    return tuple(item for item in text.split(os.pathsep) if item)


def environment_of(options: TrustOptions) -> dict[str, str]:
    """The variables that say what `options` say; nothing for what is not set. Raises ConfigError: what none can carry."""
    for flag, values in (("--trust-key", options.trust_key), ("--trust-root", options.trust_root)):
        for path in values:
            if os.pathsep in path:
                raise ConfigError(f"{flag} {path!r}: a path with {os.pathsep!r} cannot be handed to ranks; rename it")
    for flag, values in (("--trust-identity", options.trust_identity), ("--trust-issuer", options.trust_issuer)):
        for text in values:
            if not text or re.search(r"\s", text):
                raise ConfigError(f"{flag} {text!r}: give a URI or an email address, without spaces")
    variables = {
        ENV_TRUST_KEY: os.pathsep.join(options.trust_key),
        ENV_TRUST_IDENTITY: " ".join(options.trust_identity),
        ENV_TRUST_ISSUER: " ".join(options.trust_issuer),
        ENV_TRUST_ROOT: os.pathsep.join(options.trust_root),
        ENV_UNSIGNED: "1" if options.unsigned else "",
        ENV_SIGNER: options.ckpt_signer or "",
        ENV_SIGNER_CERT: options.ckpt_signer_cert or "",
    }
    return {name: value for name, value in variables.items() if value}


_TOGETHER = (("trust_key",), ("trust_identity", "trust_issuer", "trust_root"), ("ckpt_signer", "ckpt_signer_cert"))


def merge_options(given: TrustOptions, around: TrustOptions) -> TrustOptions:
    """`given`, and `around` where it says nothing. What belongs together comes from one of the two: identities with their
    issuers and roots, the signer with its certificate.
    """
    taken: dict[str, Any] = {"unsigned": given.unsigned or around.unsigned}
    for names in _TOGETHER:
        source = given if any(getattr(given, name) for name in names) else around
        taken |= {name: getattr(source, name) for name in names}
    return TrustOptions(**taken)


def check_options(options: TrustOptions) -> None:
    """That the settings fit together; reads no file. Raises ConfigError."""
    identities, issuers = options.trust_identity, options.trust_issuer
    if len(identities) != len(issuers):
        missing, given = ("issuer", identities) if len(identities) > len(issuers) else ("identity", issuers)
        other = "identity" if missing == "issuer" else "issuer"
        raise ConfigError(
            f"--trust-{other} {given[-1]!r} has no --trust-{missing}: an identity means something only together with "
            f"who vouches for it; there are {len(identities)} identities and {len(issuers)} issuers"
        )
    if identities and not options.trust_root:
        raise ConfigError(
            f"--trust-identity {identities[0]!r} needs --trust-root PEM: no certificate authority is built in"
        )
    if options.trust_root and not identities:
        raise ConfigError(
            f"--trust-root {options.trust_root[0]!r}: nobody is trusted by a root alone; "
            "give --trust-identity and --trust-issuer"
        )
    if options.ckpt_signer and not options.ckpt_signer_cert:
        raise ConfigError(
            f"--ckpt-signer {options.ckpt_signer!r} needs --ckpt-signer-cert PEM: its public key or certificate chain"
        )
    if options.ckpt_signer_cert and not options.ckpt_signer:
        raise ConfigError(f"--ckpt-signer-cert {options.ckpt_signer_cert!r} needs --ckpt-signer")
    if options.unsigned:
        for flag, value in (
            ("--trust-key", options.trust_key),
            ("--trust-identity", identities),
            ("--ckpt-signer", options.ckpt_signer),
        ):
            if value:
                raise ConfigError(f"--unsigned and {flag} contradict each other: leave one of the two out")


def load_policy(options: TrustOptions) -> TrustPolicy:
    """The policy that `options` describe; files are read now. Without a key or identity: the key this installation signs
    with (made on first use).

    With `unsigned` that key counts where there is one. Raises ConfigError naming flag, file and value, or StorageError.
    """
    check_options(options)
    if options.unsigned:
        return TrustPolicy(keys=_own_key_if_any(), allow_unsigned=True)
    need_cryptography()
    keys = tuple(load_public_key(Path(path)) for path in options.trust_key)
    identities = tuple(zip(options.trust_identity, options.trust_issuer, strict=True))
    roots = tuple(root for path in options.trust_root for root in _load_roots(Path(path)))
    if not keys and not identities:
        signer = load_signer(options)
        keys = (signer.public_key,) if signer is not None else ()
    return TrustPolicy(keys=keys, identities=identities, roots=roots)


def _own_key_if_any() -> tuple[EllipticCurvePublicKey, ...]:
    if not key_path().exists():
        return ()
    try:
        return (signing_key().public_key(),)
    except ConfigError:  # no cryptography, or no key of ours: unsigned mode needs neither
        return ()


def _load_roots(path: Path) -> list[Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise storage_error("read the root certificates", path, error) from error
    except ValueError as error:
        raise ConfigError(f"--trust-root {path}: holds no PEM certificate: {error}") from None


def policy_from_environment(environ: Mapping[str, str] | None = None) -> TrustPolicy:
    """`load_policy` of `options_from_environment`."""
    return load_policy(options_from_environment(environ))


def load_signer(options: TrustOptions) -> Signer | None:
    """What signs: the external command, or this installation's key (made on first use); None when unsigned.

    Raises ConfigError or StorageError.
    """
    check_options(options)
    if options.unsigned:
        return None
    if options.ckpt_signer and options.ckpt_signer_cert:
        return command_signer(options.ckpt_signer, options.ckpt_signer_cert)
    return local_signer()


def check_signer_is_trusted(signer: Signer, policy: TrustPolicy, *, now_ns: int | None = None) -> None:
    """That a job can restore what it is going to write. Raises ConfigError naming the flag to add."""
    if policy.is_empty or signer.public_key in policy.keys:
        return
    why = ""
    if policy.identities and signer.certificates:
        try:
            _check_identity(signer.certificates, policy, now_ns or time.time_ns(), "signer")
            return
        except VerificationError as error:
            why = f" ({error})"
    raise ConfigError(
        f"this job signs with key {fingerprint(signer.public_key)[:16]}, which its own trust policy does not accept{why}: "
        "after a restart it could not restore what it wrote; add --trust-key with that key's public PEM"
    )


# ---- checking


def check_manifest(data: bytes, marker: str, policy: TrustPolicy) -> Manifest:
    """Check and read the marker file `marker` with content `data` under `policy`.

    Raises VerificationError; UntrustedKeyError and UnsignedError are the cases where policy, not damage, is the reason.
    """
    if marker == MARKER_UNSIGNED:
        return parse_unsigned(data, allow_unsigned=policy.allow_unsigned)
    opened = open_manifest(data, marker)

    def signed_at_ns() -> int:
        facts = parse_statement(opened.payload, marker, data).facts
        # Bundles of other tools say no time of signing: their certificates have to be valid now.
        return facts.created_ns if facts is not None else time.time_ns()

    signed = check_signed(opened, PAYLOAD_TYPE, policy, signed_at_ns, marker)
    manifest = parse_statement(opened.payload, marker, data)
    return msgspec.structs.replace(
        manifest, key_sha256=signed.key_sha256, identity=signed.identity, issuer=signed.issuer
    )


def check_signed(
    opened: Opened, payload_type: str, policy: TrustPolicy, signed_at_ns: Callable[[], int], what: str
) -> Signed:
    """That somebody whom `policy` trusts signed `opened`.

    `signed_at_ns` reads the time of signing (UTC ns) from the payload; it is called only for a certificate, after its
    key's signature was found to match.

    Raises VerificationError (the signature does not match the content), UntrustedKeyError (it is somebody else's).
    """
    if policy.is_empty:
        if policy.allow_unsigned:
            return Signed()
        raise UntrustedKeyError(f"{what}: nobody is trusted here; give --trust-key, or --trust-identity and its issuer")
    signed = pae(opened.payload, payload_type)
    for key in policy.keys:
        if signature_matches(signed, opened.signature, key):
            return Signed(key_sha256=fingerprint(key))
    trusted = [fingerprint(key) for key in policy.keys]
    mismatch = VerificationError(f"{what}: the signature does not match its content")
    if not opened.certificates:
        if opened.hint is None or opened.hint in trusted:
            raise mismatch
        raise UntrustedKeyError(f"{what}: signed by key {opened.hint[:16]}, trusted is {_named(policy)}")
    key = leaf_key(load_certificates(opened.certificates[:1], what)[0], what)
    if not signature_matches(signed, opened.signature, key):
        raise mismatch
    if not policy.identities:
        raise UntrustedKeyError(f"{what}: signed by key {fingerprint(key)[:16]}, trusted is {_named(policy)}")
    identity, issuer = _check_identity(opened.certificates, policy, signed_at_ns(), what)
    return Signed(key_sha256=fingerprint(key), identity=identity, issuer=issuer)


def _check_identity(certificates: Sequence[bytes], policy: TrustPolicy, at_ns: int, what: str) -> tuple[str, str]:
    """The trusted identity and its issuer behind a chain. Raises UntrustedKeyError or VerificationError."""
    chain = load_certificates(tuple(certificates), what)
    holder = verify_chain(chain, list(policy.roots), at_ns, what)
    if holder.issuer is None:
        raise UntrustedKeyError(
            f"{what}: its certificate is valid for {', '.join(holder.identities) or 'nobody'}, but names no issuer of "
            "that identity; trust its key with --trust-key instead"
        )
    for identity, issuer in policy.identities:
        if identity in holder.identities and issuer == holder.issuer:
            return identity, issuer
    raise UntrustedKeyError(
        f"{what}: signed by {', '.join(holder.identities) or 'nobody'} of issuer {holder.issuer}, "
        f"trusted is {_named(policy)}"
    )


def _named(policy: TrustPolicy) -> str:
    """Everybody who is trusted, for messages."""
    people = [f"{identity} of issuer {issuer}" for identity, issuer in policy.identities]
    return ", ".join([*(fingerprint(key)[:16] for key in policy.keys), *people])
