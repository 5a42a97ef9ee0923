"""The P-256 key that signs manifests: made at first use, kept in the user's keepstep folder.

Whoever can read the private key can sign; a key readable by the rank's user does not protect against the training
script.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.checkpoint.storage.writer import fsync_folder, make_folders, storage_error, write_all
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

KEY_NAME = "ckpt-p256.pem"
ENV_HOME = "KEEPSTEP_HOME"


def key_path() -> Path:
    """Where the private key lies: `$KEEPSTEP_HOME/keys/ckpt-p256.pem`; KEEPSTEP_HOME is ~/.keepstep unless set."""
    return Path(os.environ.get(ENV_HOME) or Path.home() / ".keepstep") / "keys" / KEY_NAME


def public_key_path() -> Path:
    """Where the public key lies, for other tools: the private key's path with the ending `.pub`."""
    return key_path().with_suffix(".pub")


def need_cryptography() -> None:
    """Raises ConfigError with the pip line when the package cryptography is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "signing checkpoints needs the package cryptography: pip install 'keepstep[checkpoint]', "
            "or pass unsigned=True"
        ) from None


def signing_key() -> EllipticCurvePrivateKey:
    """The local private key, made on first use. Raises ConfigError (no cryptography, not a P-256 key), StorageError."""
    need_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = key_path()
    try:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = make_key(path)
    except OSError as error:
        raise storage_error("read or make the signing key", path, error) from error
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not an unencrypted PEM private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ConfigError(f"{path} is not a P-256 key")
    return key


def make_key(path: Path) -> bytes:
    """Make a P-256 key at `path` (mode 0600), and its public half beside it with the ending `.pub`; the private PEM.

    Durable on return: a checkpoint signed with a key that a power cut takes back could never be restored. A key that is there
    already stays and is returned. Raises OSError or StorageError.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    make_folders(path.parent, 0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    temp = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    _write_new(temp, private, 0o600)
    try:
        # A link fails when the name exists: of several ranks that come here at once the first wins, the others read its
        # key.
        os.link(temp, path)
    except FileExistsError:
        pass
    finally:
        temp.unlink()
    winner = path.read_bytes()
    public = serialization.load_pem_private_key(winner, None).public_key()
    temp_public = temp.with_suffix(".pub")
    _write_new(temp_public, public_pem(public), 0o644)  # type: ignore[arg-type]
    temp_public.replace(path.with_suffix(".pub"))
    fsync_folder(path.parent)
    return winner


def _write_new(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def public_pem(key: EllipticCurvePublicKey) -> bytes:
    """PEM (SubjectPublicKeyInfo) of a public key; its SHA-256 is the hint in a bundle."""
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_public_key(path: Path) -> EllipticCurvePublicKey:
    """A P-256 public key from a PEM file. Raises ConfigError or StorageError naming the file."""
    need_cryptography()
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise storage_error("read the public key", path, error) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a PEM public key: {error}") from None
    return check_public_key(key, path)


def check_public_key(key: object, path: Path) -> EllipticCurvePublicKey:
    """`key`, from file `path`, when it is a P-256 public key. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise ConfigError(f"{path} is not a P-256 public key")
    return key


def trusted_public_key() -> EllipticCurvePublicKey:
    """The public half of the local key, which is trusted by default (made on first use)."""
    return signing_key().public_key()
