"""Wire format of the log funnel: length-prefixed binary frames between the agents of a job and its one log writer.

    u32 length of what follows (big endian) · u8 kind · body

    kind         sent by   body
    1 challenge  server    JSON {nonce}: the first frame of a connection
    2 hello      agent     JSON {run_id, node, life, proof}: the first frame of an agent. `life` is a random id of the agent process
    3 welcome    server    JSON {seq}: frames of this node and life up to `seq` are on file
    4 refused    server    JSON {error}, then the connection is closed
    5 data       agent     u64 seq · i32 cycle · i32 rank · u8 stream · whole lines (at most MAX_TEXT_BYTES)
    6 evidence   agent     u64 seq · i32 cycle · u32 offset · u8 length of name · name · bytes of the file from `offset` on
    7 ack        server    u64 seq: frames up to `seq` are on file, the agent may forget them. Repeated while it stays the same

`seq` counts the data and evidence frames of one life from 1, without gaps. After a reconnect the agent sends again what is not
acked, with the same numbers; the server skips what it has. Rank -1 with stream 0 is the launcher itself. No frame carries a
path: the server chooses every one from node, cycle and name, which must match the patterns below.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import msgspec

CHALLENGE, HELLO, WELCOME, REFUSED, DATA, EVIDENCE, ACK = range(1, 8)
LAUNCHER, STDOUT, STDERR = range(3)
LAUNCHER_RANK = -1

FRAME_HEAD = struct.Struct(">IB")
DATA_HEAD = struct.Struct(">QiiB")
EVIDENCE_HEAD = struct.Struct(">QiIB")
SEQ = struct.Struct(">Q")

MAX_TEXT_BYTES = (1 << 20) + (1 << 17)
"""Text of one data frame: a line of the longest kind and what was read with it."""
MAX_FRAME_BYTES = MAX_TEXT_BYTES + 256
MAX_HELLO_BYTES = 4096
MAX_CYCLE = 10**6
MAX_RANK = 1 << 20
EVIDENCE_FILE_BYTES = 4 << 20
EVIDENCE_CYCLE_BYTES = 64 << 20

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class WireError(Exception):
    """Raised when the other side sent something that is no valid frame; `reason` is a short name for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Challenge(msgspec.Struct, frozen=True):
    nonce: str


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    node: str
    life: str
    proof: str = ""


class Welcome(msgspec.Struct, frozen=True):
    seq: int


class Refused(msgspec.Struct, frozen=True):
    error: str


class Text(msgspec.Struct, frozen=True):
    """A data frame. `rank` is -1 and `stream` LAUNCHER for a launcher's own lines."""

    seq: int
    cycle: int
    rank: int
    stream: int
    data: bytes


class Evidence(msgspec.Struct, frozen=True):
    """A piece of an evidence file."""

    seq: int
    cycle: int
    offset_bytes: int
    name: str
    data: bytes


def frame(kind: int, body: bytes) -> bytes:
    """One frame as it goes over the wire."""
    return FRAME_HEAD.pack(len(body) + 1, kind) + body


def json_frame(kind: int, message: msgspec.Struct) -> bytes:
    """A frame with a JSON body."""
    return frame(kind, msgspec.json.encode(message))


def data_frame(seq: int, cycle: int, rank: int, stream: int, data: bytes) -> bytes:
    return frame(DATA, DATA_HEAD.pack(seq, cycle, rank, stream) + data)


def evidence_frame(seq: int, cycle: int, offset_bytes: int, name: str, data: bytes) -> bytes:
    encoded = name.encode()
    return frame(EVIDENCE, EVIDENCE_HEAD.pack(seq, cycle, offset_bytes, len(encoded)) + encoded + data)


def parse_hello(body: bytes) -> Hello:
    """Raises WireError unless every field may stand in a path or a comparison."""
    try:
        hello = msgspec.json.decode(body, type=Hello)
    except msgspec.MsgspecError as error:
        raise WireError("malformed", f"hello: {error}") from None
    if not NAME.fullmatch(hello.node):
        raise WireError("node name", repr(hello.node[:100]))
    if not NAME.fullmatch(hello.life):
        raise WireError("malformed", "hello: life")
    return hello


def parse_text(body: bytes) -> Text:
    """Raises WireError for a cycle, rank or stream that cannot be."""
    if len(body) < DATA_HEAD.size:
        raise WireError("malformed", "data frame shorter than its head")
    seq, cycle, rank, stream = DATA_HEAD.unpack_from(body)
    if not 0 <= cycle < MAX_CYCLE:
        raise WireError("cycle", str(cycle))
    launcher = rank == LAUNCHER_RANK and stream == LAUNCHER
    if not launcher and not (0 <= rank < MAX_RANK and stream in (STDOUT, STDERR)):
        raise WireError("rank", f"{rank}, stream {stream}")
    return Text(seq, cycle, rank, stream, body[DATA_HEAD.size :])


def parse_evidence(body: bytes) -> Evidence:
    """Raises WireError for a name that is none or a cycle that cannot be. Sizes are judged where the file is written."""
    if len(body) < EVIDENCE_HEAD.size:
        raise WireError("malformed", "evidence frame shorter than its head")
    seq, cycle, offset_bytes, length = EVIDENCE_HEAD.unpack_from(body)
    end = EVIDENCE_HEAD.size + length
    name = body[EVIDENCE_HEAD.size : end].decode("ascii", "replace")
    if len(name) != length or not NAME.fullmatch(name):
        raise WireError("evidence name", repr(name))
    if not 0 <= cycle < MAX_CYCLE:
        raise WireError("cycle", str(cycle))
    return Evidence(seq, cycle, offset_bytes, name, body[end:])


def take_frames(buffer: bytearray, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Remove the whole frames at the beginning of `buffer`. Raises WireError for one longer than `limit_bytes` or empty."""
    begin = 0
    try:
        while len(buffer) - begin >= FRAME_HEAD.size:
            length, kind = FRAME_HEAD.unpack_from(buffer, begin)
            if not 1 <= length <= limit_bytes:
                raise WireError("oversized" if length else "malformed", f"frame of {length} bytes")
            end = begin + 4 + length
            if len(buffer) < end:
                break
            body = bytes(memoryview(buffer)[begin + FRAME_HEAD.size : end])
            begin = end
            yield kind, body
    finally:
        del buffer[:begin]


def wanted_bytes(buffer: bytearray) -> int:
    """Length of the unfinished frame at the beginning of `buffer`, 0 when not even its head is there."""
    return int.from_bytes(buffer[:4], "big") + 4 if len(buffer) >= 4 else 0


def prefixed(prefix: bytes, data: bytes) -> bytes:
    """`data` as whole lines, each after `prefix`; a missing last newline is added."""
    body = data[:-1] if data.endswith(b"\n") else data
    return prefix + body.replace(b"\n", b"\n" + prefix) + b"\n"


def loss_line(lost_bytes: int, lost_lines: int) -> bytes:
    """What stands in a log where output is missing; the rank's prefix comes before it like before any line."""
    return b"keepstep: %d bytes lost here (%d lines): the log could not be written\n" % (lost_bytes, lost_lines)
