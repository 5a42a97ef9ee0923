"""What the launchers of a job trust each other by: the job token, and the keys made from it.

Everybody who has the token can make the coordinator's private key, so the pin of its public key needs no second channel.
Nothing protects a token that can be guessed: whoever reaches the coordinator sees its public key and may try tokens
against it at leisure. That is why `make_token` exists.

Importing this loads the standard library only, and the fence's functions use no more than that: the guardian process calls
them with a key of its own and never holds the token.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.records.errors import ConfigError, KeepstepError

if TYPE_CHECKING:
    import ssl

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ENV_TOKEN = "KEEPSTEP_JOB_TOKEN"
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
NEW_TOKEN = "keepstep coordinator --new-token"
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Number of points of P-256 (SEC 2, section 2.4.2); private keys are 1 to this less one."""
PIN_SHOWN = 16
"""Hex digits of a pin in messages."""


class PinError(KeepstepError):
    """Raised when the coordinator's public key is not the one that this node's token gives."""


# The token


def make_token() -> str:
    """A new token: 32 random bytes in URL-safe base64, 43 characters."""
    return secrets.token_urlsafe(32)


def find_token(token_file: str | None) -> bytes | None:
    """The token in `token_file`, else in KEEPSTEP_JOB_TOKEN, else None; white space around it does not count.

    The variable is gone afterwards in every case, also from /proc/self/environ. What it was set by (a shell, `srun`) still
    has it in its own environment, which a file avoids. The file may be a pipe (/dev/fd/N). Raises ConfigError.
    """
    value = _take_variable()
    if token_file is not None:
        return _checked(_read_private(token_file), f"--token-file {token_file}")
    return None if value is None else _checked(value, ENV_TOKEN)


def require_token(token: bytes | None, endpoints: list[str], on_loopback: bool = False) -> None:
    """Raise ConfigError when a coordinator is reached over a network (with `on_loopback` also this host's own), without a token.

    `endpoints`: host:port each. A name other than localhost counts as a network: what it resolves to is not this host's say.
    """
    remote = [endpoint for endpoint in endpoints if on_loopback or not _is_loopback(endpoint)]
    if token is None and remote:
        raise ConfigError(
            f"the coordinator is reached over a network ({', '.join(remote)}) and there is no job token; make one with "
            f"`(umask 077; {NEW_TOKEN} > job.token)` and give the same one to every host: --token-file job.token, "
            f"or the variable {ENV_TOKEN}"
        )


def _is_loopback(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    # An IPv6 address without brackets and port has colons of its own.
    host = (host if port.isdigit() and (":" not in host or host.endswith("]")) else endpoint).strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _checked(raw: bytes, origin: str) -> bytes:
    token = raw.strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{origin}: the job token has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed; "
            f"make one with `{NEW_TOKEN}`"
        )
    if len(token) > MAX_TOKEN_BYTES:
        raise ConfigError(
            f"{origin}: longer than {MAX_TOKEN_BYTES} bytes, so it is no job token; make one with `{NEW_TOKEN}`"
        )
    return token


def _read_private(name: str) -> bytes:
    try:
        # The checks are made on what was opened, which a rename in between cannot change.
        with open(name, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRGRP | stat.S_IROTH):
                raise ConfigError(
                    f"--token-file {name}: mode {stat.S_IMODE(mode):04o} lets group or others read the job token; "
                    f"run: chmod 600 {shlex.quote(name)}"
                )
            return file.read(2 * MAX_TOKEN_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--token-file {name!r}: cannot be read: {reason}; give a file that holds the job token "
            f"(`{NEW_TOKEN}` makes one)"
        ) from None


def _take_variable() -> bytes | None:
    """The variable's value, which is then wiped and removed. Raises ConfigError when it stays readable."""
    value = os.environb.get(ENV_TOKEN.encode())
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    libc.getenv.argtypes = [ctypes.c_char_p]
    # Removing a variable only drops the pointer to it: the bytes stay in memory, and in /proc/self/environ.
    pointer = libc.getenv(ENV_TOKEN.encode())
    if pointer:
        ctypes.memset(pointer, 0, len(ctypes.string_at(pointer)))
    os.environ.pop(ENV_TOKEN, None)
    _wipe_initial_block()
    return value


def _wipe_initial_block() -> None:
    """Wipe what getenv does not show: the value that the process was started with, when it was set again since."""
    found = _spans_shown()
    if not found:
        return
    # proc_pid_stat(5): env_start is field 50; the name, field 2, may hold spaces and parentheses.
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    for offset, size in found:
        if start:
            ctypes.memset(start + offset, 0, size)
    if _spans_shown():
        raise ConfigError(f"{ENV_TOKEN} cannot be wiped from this process's environment; use --token-file instead")


def _spans_shown() -> list[tuple[int, int]]:
    """Where in /proc/self/environ values of the variable stand: (offset, size in bytes)."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return []  # nobody else can read it either
    prefix = ENV_TOKEN.encode() + b"="
    spans, offset = [], 0
    for entry in block.split(b"\0"):
        if entry.startswith(prefix) and len(entry) > len(prefix):
            spans.append((offset + len(prefix), len(entry) - len(prefix)))
        offset += len(entry) + 1
    return spans


# Keys from the token


def derive(secret: bytes, info: bytes, size_bytes: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) without salt. Written out because the fence must work without other packages."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    block, made = b"", b""
    for number in range(1, -(-size_bytes // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        made += block
    return made[:size_bytes]


def coordinator_key(token: bytes) -> EllipticCurvePrivateKey:
    """The coordinator's P-256 key: the same on any host that has the token, so the pin survives a restart elsewhere."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.derive_private_key(_scalar(token), ec.SECP256R1())


def _scalar(token: bytes) -> int:
    # FIPS 186-5, A.2.1: 128 bits more than the order has leave a bias below 2**-128.
    return int.from_bytes(derive(token, b"keepstep coordinator p-256 v1", 48), "big") % (P256_ORDER - 1) + 1


def public_pin(token: bytes) -> bytes:
    """SHA-256 of the coordinator's public key (DER SubjectPublicKeyInfo, RFC 7469 section 2.4)."""
    from cryptography.hazmat.primitives import serialization

    public = coordinator_key(token).public_key()
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


# TLS


def server_context(token: bytes) -> ssl.SSLContext:
    """The coordinator's end: TLS 1.3 with its key, which is on no disk at any time, and without session tickets."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    fd = os.memfd_create("keepstep-tls", os.MFD_CLOEXEC)
    with open(fd, "wb") as file:
        file.write(b"".join(_certificate_and_key(token)))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context


def _certificate_and_key(token: bytes) -> tuple[bytes, bytes]:
    """PEM of a self-signed certificate around the key, and of the key. Only the key in it means anything to a client."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    key = coordinator_key(token)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keepstep coordinator")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of hosts differ and jobs last: the whole range (RFC 5280, section 4.1.2.5, for the end).
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def client_context() -> ssl.SSLContext:
    """The agent's end: TLS 1.3, any certificate. It says nothing about who answers until `check_pin` has passed."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(connection: ssl.SSLObject | ssl.SSLSocket, token: bytes) -> None:
    """Raise PinError unless the peer has the coordinator's key. To be called before anything secret is sent.

    The handshake has proved that the peer holds the private key of its certificate, whatever the certificate says.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    expected = public_pin(token)
    seen = b""
    try:
        der = connection.getpeercert(binary_form=True)
        public = x509.load_der_x509_certificate(der or b"").public_key()
        spki = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        seen = hashlib.sha256(spki).digest()
    except ValueError:
        pass  # no handshake yet, no certificate, or one of a kind that a coordinator never shows
    if not hmac.compare_digest(seen, expected):
        raise PinError(
            f"the coordinator's key has pin {seen.hex()[:PIN_SHOWN] or '(none)'}, this host's job token gives "
            f"{expected.hex()[:PIN_SHOWN]}: check that all hosts have the same token, and that the endpoint is this "
            "job's coordinator and nothing stands in between"
        )


# Proofs


def prove(token: bytes, nonce: str, run_id: str, node: str) -> str:
    """What a client answers to a challenge: HMAC-SHA256, in hex, that it has the token and means this run and node."""
    return _mac(derive(token, b"keepstep agent v1", 32), nonce, run_id, node).hex()


def proven(token: bytes, nonce: str, run_id: str, node: str, proof: str) -> bool:
    """Whether `proof` was made by `prove` with the same arguments. Never for an empty nonce, which anybody may repeat."""
    return bool(nonce) and _same(prove(token, nonce, run_id, node), proof)


def fence_key(token: bytes | None, run_id: str) -> bytes:
    """Key by which a guardian says that its node's ranks are dead; good for that and for this run only.

    Without a token it is made from the run id and keeps out mistakes only: the folder of the Unix socket (0700) protects.
    """
    label = b"keepstep fence v1" if token is not None else b"keepstep fence without token v1"
    return derive(token or b"", label + _joined(run_id), 32)


def prove_fence(key: bytes, node: str, pid: int, boot_id: str) -> str:
    """HMAC-SHA256, in hex, over which agent (node, process, boot) no longer has ranks. Its repetition stays true."""
    return _mac(key, node, str(pid), boot_id).hex()


def fence_proven(key: bytes, node: str, pid: int, boot_id: str, proof: str) -> bool:
    """Whether `proof` was made by `prove_fence` with the same arguments."""
    return _same(prove_fence(key, node, pid, boot_id), proof)


def _mac(key: bytes, *fields: str) -> bytes:
    return hmac.digest(key, _joined(*fields), "sha256")


def _joined(*fields: str) -> bytes:
    """Each field behind its length, so that no two lists of fields give the same bytes."""
    raw = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join(len(r).to_bytes(8, "big") + r for r in raw)


def _same(expected: str, given: str) -> bool:
    # As bytes: compare_digest refuses text that is not ASCII, and `given` comes from outside.
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogatepass"))
