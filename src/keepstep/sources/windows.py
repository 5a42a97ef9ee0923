"""Pieces of a stream for parsers of whole documents, cut out around the lines that matter, while the stream goes by."""

from __future__ import annotations

from typing import NamedTuple

from keepstep.sources.decoding import to_text

LIMIT = 32
"""Pieces that are cut out of one stream."""
BEFORE_BYTES = 16 << 10
AFTER_BYTES = 48 << 10
PIECE_BYTES = 256 << 10
"""Most of one piece, when one thing that matters follows another."""


class Window(NamedTuple):
    """A piece of a log. `first_number`: of its first line. `near_ns`: a time that is near to it."""

    text: str
    first_number: int
    near_ns: int | None


class _Piece:
    __slots__ = ("begin", "data", "end", "first_number", "near_ns")

    def __init__(self, begin: int, end: int, first_number: int, near_ns: int | None) -> None:
        self.begin, self.end = begin, end
        self.first_number = first_number
        self.near_ns = near_ns
        self.data = bytearray()


class Cutter:
    """Cuts pieces out of a stream of chunks. Positions are bytes from the begin of the stream."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.done: list[Window] = []
        self.left = limit
        self._open: list[_Piece] = []

    def want(self, chunk: bytes, base: int, at: int, number: int, near_ns: int | None) -> None:
        """A piece around the line `number`, which begins at `at` of `chunk`; the last piece reaches further where it is near."""
        here = base + at
        last = self._open[-1] if self._open else None
        if last is not None and here <= last.end:
            last.end = max(last.end, min(here + AFTER_BYTES, last.begin + PIECE_BYTES))
            return
        if self.left <= 0:
            return
        self.left -= 1
        begin = chunk.rfind(b"\n", 0, at - BEFORE_BYTES) + 1 if at > BEFORE_BYTES else 0
        first_number = number - chunk.count(b"\n", begin, at)
        self._open.append(_Piece(base + begin, here + AFTER_BYTES, first_number, near_ns))

    def pass_on(self, chunk: bytes, base: int) -> None:
        """The chunk at `base` has been looked at: take what belongs to open pieces, close those that end in it."""
        end = base + len(chunk)
        still = []
        for piece in self._open:
            piece.data += chunk[max(piece.begin - base, 0) : piece.end - base]
            if piece.end <= end:
                self._close(piece)
            else:
                still.append(piece)
        self._open = still

    def finish(self) -> None:
        """The stream is over."""
        for piece in self._open:
            self._close(piece)
        self._open = []

    def _close(self, piece: _Piece) -> None:
        data = bytes(piece.data)
        whole = data[: data.rfind(b"\n") + 1] or data
        self.done.append(Window(to_text(whole), piece.first_number, piece.near_ns))
