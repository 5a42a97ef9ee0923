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
from keepstep.records.errors import VerificationError

_ALGORITHMS = {"xxh3_128-16m": "xxh3-128", "sha256-16m": "sha256"}
_METHODS = {algorithm: method for method, algorithm in _ALGORITHMS.items()}
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
    algorithm = _ALGORITHMS[method]
    return of_blocks(algorithm, b"".join(hash_block(memoryview(block), algorithm)[0] for block in blocks))


def of_blocks(algorithm: str, digests: bytes) -> str:
    """Fingerprint of an image from the digests of its blocks by `algorithm` (format.blocks), one after the other."""
    return f"{_METHODS[algorithm]}:{hash_block(memoryview(digests), algorithm)[0].hex()}"


def same_method(text: str) -> str:
    """The method of a fingerprint that `check_text` accepted."""
    return text.partition(":")[0]
