"""The image of one rank: the byte string that is its file, its object and its part of the memory tier.

    header (padded to 4 KiB) | tensors, wide elements first | values of the rank | digest of each block of what is before it

Values and digests come last, so that a change of their size moves no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from keepstep.checkpoint.format.blocks import BLOCKS_NAME, count_for_body
from keepstep.checkpoint.format.index import BLOB_NAME
from keepstep.checkpoint.format.plan import Piece, Plan, StoredTensor, TensorMeta, stored, whole_piece
from keepstep.checkpoint.format.shard import build_header, file_order

DIGEST_BYTES = 32


class TensorTable(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors one rank writes, in the order of its file: how each is spelled, and the piece it stands for."""

    entries: dict[str, StoredTensor]
    pieces: dict[str, Piece]
    size_bytes: int


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything lies in the image; all offsets from its start, in bytes."""

    header: bytes
    offsets: dict[str, int]
    blob_begin: int
    body_bytes: int
    file_bytes: int


def tensor_table(plan: Plan, own: Mapping[str, TensorMeta], rank: int) -> TensorTable:
    """What `rank` writes: its pieces of the shared tensors, and its own tensors."""
    entries: dict[str, StoredTensor] = {}
    pieces: dict[str, Piece] = {}
    for piece in plan.pieces(rank):
        entries[piece.key], pieces[piece.key] = stored(piece, plan.tensors[piece.name]), piece
    for name, meta in own.items():
        piece = whole_piece(name, meta)
        entries[name], pieces[name] = stored(piece, meta), piece
    ordered = {key: entries[key] for key in file_order(entries)}
    return TensorTable(
        entries=ordered,
        pieces={key: pieces[key] for key in ordered},
        size_bytes=sum(entry.size_bytes for entry in ordered.values()),
    )


def image_layout(table: TensorTable, blob_bytes: int) -> ImageLayout:
    """Lay out an image of `table` with `blob_bytes` of values."""
    digests = 1
    while True:
        tail = {
            BLOB_NAME: StoredTensor("U8", (blob_bytes,), blob_bytes),
            BLOCKS_NAME: StoredTensor("U8", (digests * DIGEST_BYTES,), digests * DIGEST_BYTES),
        }
        header = build_header({**table.entries, **tail}, {"format": "pt"})
        body = len(header) + table.size_bytes + blob_bytes
        needed = count_for_body(body)
        if needed == digests:
            break
        digests = needed  # the header may grow by this, and with it the number again; it settles at once
    offsets, at = {}, len(header)
    for key, entry in table.entries.items():
        offsets[key] = at
        at += entry.size_bytes
    return ImageLayout(
        header=header, offsets=offsets, blob_begin=at, body_bytes=body, file_bytes=body + digests * DIGEST_BYTES
    )
