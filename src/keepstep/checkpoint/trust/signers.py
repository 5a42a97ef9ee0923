"""What signs manifests: a key file here, or a command that asks a key service or a security module.

An external command gets the bytes to sign on standard input (DSSE's pre-authentication encoding, trust/envelope.py) and
writes the signature to standard output: ECDSA over P-256 with SHA-256, DER, raw or as one base64 text. It runs without a
shell, on rank 0 alone, once a save; its standard error is shown when it fails. For example, with a key file:

    openssl dgst -sha256 -sign key.pem

Whatever it returns is checked with the public key before it is used.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from keepstep.checkpoint.storage.writer import storage_error, write_all
from keepstep.checkpoint.trust.envelope import signature_matches
from keepstep.checkpoint.trust.identity import leaf_key, load_certificates
from keepstep.checkpoint.trust.keys import check_public_key, key_path, need_cryptography, signing_key
from keepstep.records.errors import ConfigError, StorageError, VerificationError
from keepstep.records.exits import exit_status_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

SIGN_TIMEOUT_S = 60.0
"""How long an external command may take: a few round trips to a key service, with room for its retries."""
_MAX_OUTPUT_BYTES = 64 << 10


class SigningError(StorageError):
    """Raised when nothing was signed: the save fails, training goes on."""


class Signer(Protocol):
    """Signs; everything may be called from any thread."""

    @property
    def public_key(self) -> EllipticCurvePublicKey:
        """What verifies its signatures."""

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """DER certificates, the signer's own first; empty for a bare key."""

    def sign(self, signed: bytes) -> bytes:
        """ECDSA signature (P-256, SHA-256, DER) over `signed`. Raises SigningError."""


class FileSigner(msgspec.Struct, frozen=True):
    """Signs with a private key in this process."""

    key: EllipticCurvePrivateKey
    certificates: tuple[bytes, ...] = ()

    @property
    def public_key(self) -> EllipticCurvePublicKey:
        """See Signer."""
        return self.key.public_key()

    def sign(self, signed: bytes) -> bytes:
        """See Signer."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return self.key.sign(signed, ec.ECDSA(hashes.SHA256()))


class CommandSigner(msgspec.Struct, frozen=True):
    """Signs by running `command` (see the module's text); `public_key` is what its signatures are checked with."""

    command: tuple[str, ...]
    public_key: EllipticCurvePublicKey
    certificates: tuple[bytes, ...] = ()
    timeout_s: float = SIGN_TIMEOUT_S

    def sign(self, signed: bytes) -> bytes:
        """See Signer."""
        output = _run(self.command, signed, self.timeout_s)
        for signature in (output, _from_base64(output)):
            if signature and signature_matches(signed, signature, self.public_key):
                return signature
        raise SigningError(
            f"signer {self.command[0]!r} returned {len(output)} bytes that are no signature of the expected key over "
            "what it was given; it must write an ECDSA P-256 SHA-256 signature (DER, raw or base64) to standard output"
        )


def as_signer(key: EllipticCurvePrivateKey | Signer) -> Signer:
    """A private key as a Signer; a Signer as it is."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return FileSigner(key) if isinstance(key, ec.EllipticCurvePrivateKey) else key


def certificate_path() -> Path:
    """Where an optional certificate chain for the local key lies: the key's path with the ending `.crt`."""
    return key_path().with_suffix(".crt")


def local_signer() -> Signer:
    """This installation's key (made on first use), with the chain beside it when there is one.

    Raises ConfigError (also for a certificate of another key) or StorageError.
    """
    key, path = signing_key(), certificate_path()
    if not path.exists():
        return FileSigner(key)
    public, certificates = read_public(path)
    if not certificates:
        raise ConfigError(f"{path}: holds no certificate; give a PEM chain, the signer's own first, or remove the file")
    if public != key.public_key():
        raise ConfigError(f"{path}: its first certificate is not of the key in {key_path()}")
    return FileSigner(key, certificates)


def command_signer(command: str, public_file: str | Path, timeout_s: float = SIGN_TIMEOUT_S) -> Signer:
    """A signer that runs `command`; `public_file` is a PEM with its certificate chain or its public key.

    Raises ConfigError or StorageError.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--ckpt-signer {command!r}: {error}") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ConfigError(f"--ckpt-signer {command!r}: there is no such program (no shell is used; give PROGRAM ARGS)")
    key, certificates = read_public(Path(public_file))
    return CommandSigner((program, *words[1:]), key, certificates, timeout_s)


def read_public(path: Path) -> tuple[EllipticCurvePublicKey, tuple[bytes, ...]]:
    """Public key and certificates (DER, leaf first; empty for a bare key) of a PEM file.

    Raises ConfigError or StorageError naming the file.
    """
    need_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error("read", path, error) from error
    try:
        if b"BEGIN CERTIFICATE" not in data:
            return check_public_key(serialization.load_pem_public_key(data), path), ()
        loaded = x509.load_pem_x509_certificates(data)
        certificates = tuple(c.public_bytes(serialization.Encoding.DER) for c in loaded)
        return leaf_key(load_certificates(certificates[:1], str(path))[0], str(path)), certificates
    except ValueError as error:
        raise ConfigError(f"{path} is neither a PEM public key nor a PEM certificate chain: {error}") from None
    except VerificationError as error:
        raise ConfigError(str(error)) from None


def _from_base64(output: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(output.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _run(command: tuple[str, ...], signed: bytes, timeout_s: float) -> bytes:
    """Standard output of `command` with `signed` on its standard input. Raises SigningError."""
    name = command[0]
    # A file and not a pipe: a program that reads nothing, or late, blocks nobody.
    given = os.memfd_create("keepstep-sign", os.MFD_CLOEXEC)
    try:
        write_all(given, signed)
        os.lseek(given, 0, os.SEEK_SET)
        process = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise SigningError(f"signer {name!r} cannot be run: {error.strerror or error}") from error
    finally:
        os.close(given)
    with process:
        try:
            output, complaint = _collect(process, time.monotonic() + timeout_s)
        finally:
            # Its own session: what it started and left behind ends with it. It is not reaped yet, so the number is its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    said = complaint.decode(errors="replace").strip()[-2000:]
    detail = f": {said}" if said else ""
    if output is None:
        raise SigningError(f"signer {name!r} took longer than {timeout_s:g} s and was stopped{detail}")
    if len(output) > _MAX_OUTPUT_BYTES:
        raise SigningError(f"signer {name!r} wrote more than {_MAX_OUTPUT_BYTES} bytes; a signature has about 72")
    if process.returncode != 0:
        raise SigningError(f"signer {name!r} ended with {exit_status_name(process.returncode)}{detail}")
    return output


def _collect(process: subprocess.Popen[bytes], deadline_s: float) -> tuple[bytes | None, bytes]:
    """What `process` wrote to standard output until it ended (None: it did not by the deadline), and to standard error.

    It is not reaped. With more output than a signature can have it is left running.
    """
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = streams.values()
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for fd in streams:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while len(out) <= _MAX_OUTPUT_BYTES:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline_s - time.monotonic()))}
                if not ready:
                    return None, bytes(err)
                # Once it has ended everything it wrote is in the pipes, whoever else holds them open.
                is_over = ended in ready
                for fd in streams if is_over else ready & streams.keys():
                    if not _drain(fd, streams[fd]) and not is_over:
                        selector.unregister(fd)
                del err[:-_MAX_OUTPUT_BYTES]
                if is_over:
                    break
    finally:
        os.close(ended)
    return bytes(out), bytes(err)


def _drain(fd: int, into: bytearray) -> bool:
    """Read what is there, up to the limit; False at the end of the stream."""
    while len(into) <= _MAX_OUTPUT_BYTES:
        try:
            chunk = os.read(fd, 1 << 14)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        into += chunk
    return True
