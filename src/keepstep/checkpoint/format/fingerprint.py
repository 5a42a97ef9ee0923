"""Fingerprints of a whole image, by which memory copies are told from damaged ones.

    xxh3_128-16m:HEX   XXH3-128 over the concatenated XXH3-128 digests (16 bytes each, canonical big-endian) of its 16 MiB blocks
    sha256-16m:HEX     the same with SHA-256 (32 bytes each), where the package xxhash is missing
    sha256:HEX         SHA-256 of the whole file

XXH3 finds damage, not forgery: what is restored is verified against the signed manifest once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from keepstep.checkpoint.format.blocks import hash_block
from keepstep.records.errors import ConfigError, VerificationError

_OF_ALGORITHM = {"xxh3-128": "xxh3_128-16m", "sha256": "sha256-16m"}
_HEX_DIGITS = {"xxh3_128-16m": 32, "sha256-16m": 64, "sha256": 64}


def check_text(text: object) -> str:
    """`text` when it is a fingerprint of a known kind. Raises VerificationError."""
    method, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
    if len(digits) != _HEX_DIGITS.get(method) or set(digits) - set("0123456789abcdef"):
        raise VerificationError(
            f"{str(text)[:100]!r} is no fingerprint; known: {', '.join(_HEX_DIGITS)} with lower-case hex"
        )
    return str(text)


def fingerprint(blocks: Iterable[Any], method: str = "xxh3_128-16m") -> str:
    """Fingerprint of the image whose consecutive blocks (buffers of BLOCK_BYTES, the last one of the rest) these are.

    Each block is hashed when it comes. Raises ConfigError when `method` needs a package that is not installed.
    """
    if method == "sha256":
        whole = hashlib.sha256()
        for block in blocks:
            whole.update(block)
        return f"{method}:{whole.hexdigest()}"
    digest = _xxh3() if method == "xxh3_128-16m" else _sha256
    digests = b"".join(map(digest, blocks))
    return f"{method}:{digest(digests).hex()}"


def of_blocks(algorithm: str, digests: bytes) -> str:
    """Fingerprint of an image from the digests of its blocks by `algorithm` (format.blocks), one after the other."""
    return f"{_OF_ALGORITHM[algorithm]}:{hash_block(memoryview(digests), algorithm)[0].hex()}"


def same_method(text: str) -> str:
    """The method of a fingerprint that `check_text` accepted."""
    return text.partition(":")[0]


def _sha256(block: Any) -> bytes:
    return hashlib.sha256(block).digest()


def _xxh3() -> Any:
    try:
        import xxhash
    except ModuleNotFoundError:
        raise ConfigError(
            "xxh3_128-16m fingerprints need the package xxhash; install it with: pip install 'keepstep[checkpoint]'"
        ) from None
    return xxhash.xxh3_128_digest
