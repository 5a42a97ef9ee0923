"""Wire format of the Unix socket between a rank and its agent.

A frame is a 4-byte big-endian length and that many bytes of JSON, at most MAX_FRAME_BYTES. Requests and replies alternate on a
connection; a program with several threads opens one connection a thread. The first request is `hello`; a hello with another
run or cycle than the agent's current one is refused, so nothing of an old cycle can talk to a new one.

Requests (`op`):
  hello  {run_id, cycle, rank, pid}
  set    {key, value}                     -> {}
  get    {key}                            -> {found, value}
  cas    {key, value}                     -> {value}     sets only when absent; the value that now holds
  wait   {keys, timeout_s}                -> {values} or error "timeout" with {missing}
  report {kind, fields}                   -> {}          a mark for the timeline (times in CLOCK_MONOTONIC ns of this host)
  grant  {checkpoint, step}               -> {granted}   may this checkpoint be published? journaled before the answer
  buffer {name, size_bytes}               -> {size_bytes} plus one memfd as SCM_RIGHTS; the agent keeps it alive, and gives the
                                             same memory again for the same rank, name and size, in every cycle
  keep   {buffer, checkpoint, file, size_bytes, facts} -> {kept}  the first bytes of this buffer are this file of this checkpoint
                                             folder; it replaces what the buffer held. `facts`: JSON of at most 2 KiB; with
                                             `fingerprint` in it (checkpoint/format/fingerprint.py) other nodes may have it
  unkeep {buffer}                         -> {}          it is about to be overwritten: it is listed no more
  kept   {}                               -> {sets: [{checkpoint, files, size_bytes, copied, facts}]}  newest checkpoints in the
                                             memories of the job's nodes; `copied`: files that two nodes or more hold
  kept   {checkpoint, after}              -> {files: [{file, size_bytes, facts, nodes, tier}], more}  a page of its files, those
                                             whose names come after `after`; tier "shm" (this node's) or "peer"
  fetch  {checkpoint, file}               -> {size_bytes, tier, facts} plus one memfd, read-only; brought here when it is elsewhere
  mark_get {root_id}                      -> {mark: {step, cycle, digest, detail} or null}  newest committed checkpoint of a root
  mark_set {root_id, step, cycle, digest, detail, rebase} -> {}  journaled first; a lower step needs a reason in `rebase`
  request {what, reason}                  -> {}          "stop" (the whole job, no restart) or "exclude" (this rank's node);
                                             journaled before the answer, after which this cycle commits nothing more
  inject {spec}                           -> {}          carry out an injection that only the launcher can (see inject.py)
Every reply has `ok`; when false, `error` says why.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 1 << 20

ENV_AGENT_SOCKET = "KEEPSTEP_AGENT_SOCKET"
ENV_PAGE_FD = "KEEPSTEP_PAGE_FD"
ENV_RUN_ID = "KEEPSTEP_RUN_ID"
ENV_ATTEMPT = "KEEPSTEP_ATTEMPT"
ENV_CYCLE = "KEEPSTEP_CYCLE"
ENV_RUN_DIR = "KEEPSTEP_RUN_DIR"
ENV_CYCLE_INFO = "KEEPSTEP_CYCLE_INFO"
ENV_INJECT = "KEEPSTEP_INJECT"
ENV_FRESH_START = "KEEPSTEP_FRESH_START"
ENV_MEMORY_TIER = "KEEPSTEP_MEMORY_TIER"
"""What the launcher keeps in memory of checkpoints: off, node or peer."""
ENV_PREEMPT_NOTICE_S = "KEEPSTEP_PREEMPT_NOTICE_S"
"""Seconds between a request to stop and the end of the ranks."""
ENV_FLEET_PRIOR = "KEEPSTEP_FLEET_PRIOR"
"""What is known of the failure rate from elsewhere: failures per 1000 node-days, or a keepstep.failure_prior/1 record or its
file."""
ENV_POWER_RAMP_S = "KEEPSTEP_POWER_RAMP_S"
"""Seconds over which the first steps of a cycle come to full speed; unset or 0: at once."""
ENV_ON_BUSY = "KEEPSTEP_ON_BUSY"
"""What a save does that falls due while one is in flight: wait or skip."""
ENV_CKPT_ROOT = "KEEPSTEP_CKPT_ROOT"
"""Takes the place of a Checkpointer's `root`; a further Checkpointer of the same process gets the ending ".1", and so on."""
ENV_CKPT_EVERY_STEPS = "KEEPSTEP_CKPT_EVERY_STEPS"
"""Takes the place of a Checkpointer's cadence."""
ENV_RESUME_CHECK = "KEEPSTEP_RESUME_CHECK"
"""Set by `keepstep doctor resume` for the runs it compares; see keepstep.trainer.observed."""


def pack(message: dict[str, Any]) -> bytes:
    """Length-prefixed JSON. Raises ValueError when the message is larger than MAX_FRAME_BYTES."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return struct.pack(">I", len(body)) + body


def recv_exact(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises ConnectionError when the peer closes first."""
    parts = bytearray()
    while len(parts) < count:
        chunk = sock.recv(count - len(parts))
        if not chunk:
            raise ConnectionError("peer closed the connection")
        parts += chunk
    return bytes(parts)


def recv_frame(sock: socket.socket) -> dict[str, Any]:
    """Read one frame from a blocking socket. Raises ConnectionError or ValueError (too large, not an object)."""
    (length,) = struct.unpack(">I", recv_exact(sock, 4))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    message = json.loads(recv_exact(sock, length))
    if not isinstance(message, dict):
        raise ValueError("frame is not a JSON object")
    return message


def recv_frame_with_fds(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A frame whose first byte may carry descriptors. They are close-on-exec and belong to the caller."""
    fds = array.array("i")
    data, ancillary, _flags, _address = sock.recvmsg(4, socket.CMSG_SPACE(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if not data:
            raise ConnectionError("peer closed the connection")
        if len(data) < 4:
            data += recv_exact(sock, 4 - len(data))
        (length,) = struct.unpack(">I", data)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        message = json.loads(recv_exact(sock, length))
        if not isinstance(message, dict):
            raise ValueError("frame is not a JSON object")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, list(fds)
