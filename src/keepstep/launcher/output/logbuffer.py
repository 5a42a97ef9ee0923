"""What an agent holds of its node's output until the log writer has it on file: bounded, with a fair share for each rank."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from keepstep.launcher.output.logwire import (
    EVIDENCE_FILE_BYTES,
    NAME,
    data_frame,
    evidence_frame,
)

CAPACITY_BYTES = 16 << 20
EVIDENCE_BYTES = 16 << 20
HOLD_S = 10.0
WINDOW_BYTES = 512 << 10
FRAME_BYTES = 64 << 10
EVIDENCE_RANK = -2
"""Key of evidence among the ranks; its room is EVIDENCE_BYTES, beside the capacity."""


class _Chunk(msgspec.Struct):
    """Output of one rank that waits to be sent. For evidence, `stream` is the offset in bytes and `name` the file's."""

    cycle: int
    stream: int
    data: bytes
    name: str = ""


class _Sent(msgspec.Struct):
    seq: int
    rank: int
    size_bytes: int
    frame: bytes


class SendBuffer:
    """Chunks by rank, sent in turns, held until acknowledged. Every method may be called from any thread.

    At most `window_bytes` are sent and unacknowledged: what a rank prints waits behind that much of the others, however much
    they have to say. A rank whose share is full is not read any more; `stuck` says when waiting for room has no sense.
    """

    def __init__(
        self,
        capacity_bytes: int = CAPACITY_BYTES,
        hold_s: float = HOLD_S,
        window_bytes: int = WINDOW_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shares = 1
        """Ranks that share the capacity."""
        self._capacity_bytes = capacity_bytes
        self._hold_s = hold_s
        self._window_bytes = window_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[_Chunk]] = {}
        self._turns: deque[int] = deque()
        self._sent: deque[_Sent] = deque()
        self._again = 0
        self._in_flight_bytes = 0
        self._held: Counter[int] = Counter()
        self._seq = 0
        self._progress_at = clock()
        self.empty = threading.Event()
        self.empty.set()

    @property
    def held_bytes(self) -> int:
        """Bytes of output that are not on file yet."""
        with self._lock:
            return sum(self._held.values())

    def has_room(self, rank: int) -> bool:
        """Whether the share of this rank is not full. One chunk may go over it."""
        with self._lock:
            return self._held[rank] < self._capacity_bytes // max(1, self.shares)

    def stuck(self) -> bool:
        """Whether something waits and nothing has been acknowledged for `hold_s`."""
        with self._lock:
            return bool(self._turns or self._sent) and self._clock() - self._progress_at > self._hold_s

    def put(self, cycle: int, rank: int, stream: int, data: bytes) -> None:
        """Take whole lines of a rank. The caller has asked for room."""
        with self._lock:
            self._put(rank, _Chunk(cycle, stream, data))

    def put_evidence(self, cycle: int, name: str, data: bytes) -> bool:
        """Take a file of evidence; False when it is too large or there is no room for it."""
        if not NAME.fullmatch(name) or len(data) > EVIDENCE_FILE_BYTES:
            return False
        with self._lock:
            if self._held[EVIDENCE_RANK] + len(data) > EVIDENCE_BYTES:
                return False
            for offset in range(0, len(data) or 1, FRAME_BYTES):
                self._put(EVIDENCE_RANK, _Chunk(cycle, offset, data[offset : offset + FRAME_BYTES], name))
        return True

    def _put(self, rank: int, chunk: _Chunk) -> None:
        if not self._turns and not self._sent:
            self._progress_at = self._clock()
        queue = self._waiting.setdefault(rank, deque())
        if not queue:
            self._turns.append(rank)
        queue.append(chunk)
        self._held[rank] += len(chunk.data)
        self.empty.clear()

    def take(self) -> bytes | None:
        """The next frame to send, None when there is none or the window is full."""
        with self._lock:
            if self._again:
                self._again -= 1
                return self._sent[-1 - self._again].frame
            if not self._turns or self._in_flight_bytes >= self._window_bytes:
                return None
            rank = self._turns.popleft()
            queue = self._waiting[rank]
            self._seq += 1
            size, frame = _next_frame(self._seq, rank, queue)
            if queue:
                self._turns.append(rank)
            else:
                del self._waiting[rank]
            self._sent.append(_Sent(self._seq, rank, size, frame))
            self._in_flight_bytes += len(frame)
            return frame

    def acknowledge(self, seq: int) -> bool:
        """Forget frames up to `seq`. Whether there were any."""
        with self._lock:
            forgotten = False
            while self._sent and self._sent[0].seq <= seq:
                sent = self._sent.popleft()
                self._held[sent.rank] -= sent.size_bytes
                if not self._held[sent.rank]:
                    del self._held[sent.rank]
                self._in_flight_bytes -= len(sent.frame)
                forgotten = True
            self._again = min(self._again, len(self._sent))
            if forgotten:
                self._progress_at = self._clock()
            if not self._sent and not self._turns:
                self.empty.set()
            return forgotten

    def rewind(self) -> None:
        """After a reconnect: send again what is not acknowledged."""
        with self._lock:
            self._again = len(self._sent)

    @property
    def waits_for_ack(self) -> bool:
        with self._lock:
            return bool(self._sent)


def _next_frame(seq: int, rank: int, queue: deque[_Chunk]) -> tuple[int, bytes]:
    """Make one frame of what comes first: its bytes of output, and the frame. Small chunks of one stream go together."""
    first = queue.popleft()
    if rank == EVIDENCE_RANK:
        return len(first.data), evidence_frame(seq, first.cycle, first.stream, first.name, first.data)
    parts, size = [first.data], len(first.data)
    while (
        queue
        and (queue[0].cycle, queue[0].stream) == (first.cycle, first.stream)
        and size + len(queue[0].data) <= FRAME_BYTES
    ):
        parts.append(queue.popleft().data)
        size += len(parts[-1])
    return size, data_frame(seq, first.cycle, rank, first.stream, b"".join(parts))
