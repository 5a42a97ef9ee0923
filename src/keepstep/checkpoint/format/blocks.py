"""Block digests: any 16 MiB block of a rank's file can be verified without reading the rest of it.

The last tensor of a file, `rank/__blocks__` (U8), holds one 32-byte digest for each 16 MiB block of everything before it. Its
place follows from the file's size alone: n = ceil(size / (BLOCK_BYTES + 32)) digests are the last 32 n bytes. The manifest
names the algorithm and the SHA-256 of these 32 n bytes ("blake3:<64 hex digits>"), so a reader trusts the digests first and
then each block by its digest.

Fingerprints are another, faster hash of each 16 MiB block of the whole file, digests included. They only ever compare bytes in
memory with bytes in memory (XXH3-128 is no cryptographic hash) and are never written to a file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, cast, get_args

from keepstep.records.errors import ConfigError, VerificationError

BLOCK_BYTES = 16 << 20
DIGEST_BYTES = 32
BLOCKS_NAME = "rank/__blocks__"

DigestAlgorithm = Literal["blake3", "sha256"]
FingerprintAlgorithm = Literal["xxh3-128", "sha256"]
DIGEST_ALGORITHMS: tuple[str, ...] = get_args(DigestAlgorithm)
FINGERPRINT_BYTES: dict[str, int] = {"xxh3-128": 16, "sha256": 32}

_PACKAGES = {"blake3": "blake3", "xxh3-128": "xxhash"}
_FIELD = re.compile(r"(blake3|sha256):([0-9a-f]{64})")
# Several hashes of one block are fed in pieces that stay in a core's second-level cache: memory is read once, not once a hash.
_PIECE_BYTES = 256 << 10


class Hash(Protocol):
    """A running hash."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def digest(self) -> bytes:
        """The hash of all bytes added."""


class BlocksField(NamedTuple):
    """What a manifest says of a file's block digests: their algorithm, and the SHA-256 (hexadecimal) of all of them."""

    algorithm: DigestAlgorithm
    sha256: str


def blocks_count(file_bytes: int) -> int:
    """Number of block digests at the end of a file of `file_bytes`."""
    return -(-file_bytes // (BLOCK_BYTES + DIGEST_BYTES))


def count_for_body(body_bytes: int) -> int:
    """Number of block digests that follow a body (header, tensors and values) of `body_bytes`."""
    return -(-body_bytes // BLOCK_BYTES)


def body_bytes(file_bytes: int) -> int:
    """Bytes before the block digests in a file of `file_bytes`. Raises VerificationError for a size no such file can have."""
    count = blocks_count(file_bytes)
    body = file_bytes - DIGEST_BYTES * count
    if file_bytes < 0 or count_for_body(body) != count:
        raise VerificationError(f"a file of {file_bytes} bytes cannot end in digests of its blocks")
    return body


def file_bytes_for(body_bytes: int) -> int:
    """Size of the file whose body has `body_bytes`."""
    return body_bytes + DIGEST_BYTES * count_for_body(body_bytes)


def span_of(number: int, size_bytes: int) -> tuple[int, int]:
    """[begin, end) of block `number` of `size_bytes` bytes (of the body for digests, of the file for fingerprints)."""
    return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size_bytes)


def split_blocks(view: memoryview) -> Iterator[memoryview]:
    """The blocks of `view` in order; the last may be shorter."""
    for begin in range(0, len(view), BLOCK_BYTES):
        yield view[begin : begin + BLOCK_BYTES]


@functools.cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def digest_algorithm() -> DigestAlgorithm:
    """The algorithm new files get: BLAKE3, or SHA-256 where the package blake3 is not installed."""
    return "blake3" if _has("blake3") else "sha256"


def fingerprint_algorithm() -> FingerprintAlgorithm:
    """The algorithm new fingerprints get: XXH3-128, or SHA-256 where the package xxhash is not installed."""
    return "xxh3-128" if _has("xxhash") else "sha256"


def new_hash(algorithm: str) -> Hash:
    """A running hash of `algorithm` ("blake3", "sha256" or "xxh3-128").

    Raises ConfigError when it is none of these or its package is not installed.
    """
    if algorithm == "sha256":
        return hashlib.sha256()
    package = _PACKAGES.get(algorithm)
    if package is None:
        raise ConfigError(
            f"block digests: unknown algorithm {algorithm!r}; this version knows blake3, sha256 and xxh3-128"
        )
    if not _has(package):
        raise ConfigError(
            f"block digests: {algorithm} needs the package {package}, which is not installed; "
            "run: pip install 'keepstep[checkpoint]'"
        )
    if algorithm == "blake3":
        import blake3

        return cast(Hash, blake3.blake3())
    import xxhash

    return cast(Hash, xxhash.xxh3_128())


def hash_into(block: memoryview, hashes: Sequence[Hash]) -> None:
    """Add `block` to every hash of `hashes`, reading it from memory once."""
    for begin in range(0, len(block), _PIECE_BYTES):
        piece = block[begin : begin + _PIECE_BYTES]
        for running in hashes:
            running.update(piece)


def hash_block(block: memoryview, *algorithms: str) -> list[bytes]:
    """The hash of `block` by each of `algorithms`. Raises ConfigError as `new_hash`."""
    hashes = {algorithm: new_hash(algorithm) for algorithm in algorithms}
    hash_into(block, list(hashes.values()))
    return [hashes[algorithm].digest() for algorithm in algorithms]


def digest_blocks(view: memoryview, algorithm: str) -> bytes:
    """The digests of the blocks of body `view`, one after the other. Raises ConfigError as `new_hash`."""
    return b"".join(hash_block(block, algorithm)[0] for block in split_blocks(view))


def fingerprint_blocks(view: memoryview) -> tuple[FingerprintAlgorithm, bytes]:
    """The algorithm and the fingerprints of the blocks of file `view`, one after the other."""
    algorithm = fingerprint_algorithm()
    return algorithm, b"".join(hash_block(block, algorithm)[0] for block in split_blocks(view))


def format_blocks_field(algorithm: DigestAlgorithm, digests: bytes | memoryview) -> str:
    """The manifest's text for these digests."""
    return f"{algorithm}:{hashlib.sha256(digests).hexdigest()}"


def parse_blocks_field(text: str, name: str = "") -> BlocksField:
    """Read the manifest's text for the digests of file `name`. Raises VerificationError when it has another shape."""
    match = _FIELD.fullmatch(text)
    if match is None:
        raise VerificationError(f"{name or 'manifest'}: blocks {text[:80]!r} is not ALGORITHM:SHA-256 of block digests")
    return BlocksField(cast(DigestAlgorithm, match[1]), match[2])


def check_digests(digests: bytes | memoryview, field: BlocksField, name: str) -> None:
    """Compare the digests read from the end of file `name` with its manifest. Raises VerificationError."""
    if hashlib.sha256(digests).hexdigest() != field.sha256:
        raise VerificationError(f"{name}: the digests of its blocks are not those the manifest names")


def check_block(block: memoryview, number: int, digests: bytes | memoryview, algorithm: str, name: str) -> None:
    """Compare block `number` of the body of file `name` with `digests`, which `check_digests` has accepted.

    Raises VerificationError, or ConfigError as `new_hash`.
    """
    expected = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
    if len(expected) != DIGEST_BYTES:
        raise VerificationError(f"{name}: there is no digest for block {number}")
    if hash_block(block, algorithm)[0] != expected:
        begin = number * BLOCK_BYTES
        raise VerificationError(
            f"{name}: block {number} [{begin}, {begin + len(block)}) does not match its {algorithm} digest"
        )
