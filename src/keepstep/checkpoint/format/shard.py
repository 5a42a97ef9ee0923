"""The safetensors layout: an 8-byte little-endian header length, JSON, then the tensors' bytes without holes.

We pad the header with spaces so that the data starts on a 4 KiB boundary. Readers take nothing for granted: every
length and offset is checked against the buffer before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import msgspec

from keepstep.checkpoint.format.dtypes import NATIVE_BYTES
from keepstep.checkpoint.format.plan import StoredTensor
from keepstep.records.errors import VerificationError

ALIGN_BYTES = 4096
SMALL_BYTES = 64 << 10
"""Tensors of up to this size come first among those of their width."""
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference reader
_MAX_DIMS = 64


class Span(msgspec.Struct, frozen=True):
    """A tensor in a file: its header entry and its bytes [begin, end) counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def file_order(entries: Mapping[str, StoredTensor]) -> list[str]:
    """Order of tensors in a file: wide elements first, so that each tensor is aligned to its element size; of these the small ones.

    Scalars that all ranks need, such as an optimizer's step counts, then share a block with the header and are not strewn over all
    blocks of the file.
    """

    def place(name: str) -> tuple[int, bool, str]:
        entry = entries[name]
        return -NATIVE_BYTES[entry.dtype], entry.size_bytes > SMALL_BYTES, name

    return sorted(entries, key=place)


def build_header(entries: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length word and padded JSON for `entries`, which follow in the order given (see `file_order`)."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, entry in entries.items():
        end = offset + entry.size_bytes
        table[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    body = msgspec.json.encode(table)
    length = -(-(8 + len(body)) // ALIGN_BYTES) * ALIGN_BYTES - 8
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return struct.pack("<Q", length) + body.ljust(length)


def header_end(prefix: bytes | memoryview, size_bytes: int, name: str) -> int:
    """Where the data of file `name` of `size_bytes` begins, from its first 8 bytes. Raises VerificationError."""
    if size_bytes < 8 or len(prefix) < 8:
        raise VerificationError(f"{name}: {size_bytes} bytes are too few for a header")
    (length,) = struct.unpack("<Q", bytes(prefix[:8]))
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise VerificationError(f"{name}: header claims {length} bytes in a file of {size_bytes}")
    return 8 + int(length)


def parse_header(data: bytes | memoryview, size_bytes: int, name: str) -> dict[str, Span]:
    """Tensors of the file `name` of `size_bytes`, from a buffer that holds at least its header.

    Raises VerificationError when a length, type, shape or offset is impossible, or spans overlap or leave holes.
    """
    start = header_end(data[:8], size_bytes, name)
    if len(data) < start:
        raise VerificationError(f"{name}: header is cut short")
    try:
        raw = msgspec.json.decode(data[8:start], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {key: msgspec.json.decode(value, type=_Entry) for key, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{name}: header is not what safetensors allows: {error}") from None
    spans: dict[str, Span] = {}
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in NATIVE_BYTES:
            raise VerificationError(f"{name}: tensor {key!r} has unknown dtype {entry.dtype!r}")
        if len(entry.shape) > _MAX_DIMS or any(not 0 <= dim < 1 << 62 for dim in entry.shape):
            raise VerificationError(f"{name}: tensor {key!r} has an impossible shape")
        if begin != at or end < begin or end - begin != math.prod(entry.shape) * NATIVE_BYTES[entry.dtype]:
            raise VerificationError(f"{name}: tensor {key!r} has impossible offsets [{begin}, {end})")
        spans[key] = Span(entry.dtype, tuple(entry.shape), start + begin, start + end)
        at = end
    if start + at != size_bytes:
        raise VerificationError(f"{name}: {size_bytes - start - at} bytes belong to no tensor")
    return spans
