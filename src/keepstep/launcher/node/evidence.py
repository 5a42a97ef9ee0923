"""Evidence of a failed cycle, taken before any rank is stopped: Python stacks, progress pages, process states, kernel stacks."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import re
import time
from pathlib import Path

import msgspec

from keepstep.launcher.node.watch import PageLook, RankPages
from keepstep.launcher.procs import catches, kernel_stack, kill_quietly, state_of
from keepstep.launcher.ranks.rankmain import STACK_SIGNAL
from keepstep.records.codec import to_pretty_json

# Frames that mean "waiting for other ranks": the innermost frames of a rank that sits in a collective, a barrier, a store
# lookup or the end of DDP's backward pass.
COLLECTIVE = re.compile(
    r"torch/(distributed/(distributed_c10d|c10d_logger|rendezvous|_functional_collectives|algorithms/join)\.py"
    r"|autograd/graph\.py\", line \d+ in _engine_run_backward"
    r"|nn/parallel/distributed\.py\", line \d+ in (_sync_|_verify_|_build_|_pre_forward))"
    r"|keepstep/trainer/channel\.py"
)
# A collective started with async_op=True is waited for in C++: the innermost Python frame is the caller's own line.
WAIT_CALL = re.compile(r"\.wait\(")
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
CURRENT_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*most recent call first\):$")
QUIET_S = 0.05


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it was found."""

    rank: int
    pid: int
    state: str
    page: PageLook
    stacks: str
    kernel: str
    in_collective: bool | None
    """True when the main thread waits for other ranks, None when its stack could not be had."""


def main_thread(dump: str) -> list[str]:
    """Frames of the main thread in a faulthandler dump, innermost first (faulthandler prints it last)."""
    blocks: list[list[str]] = []
    for line in dump.splitlines():
        if CURRENT_THREAD.match(line):
            blocks.append([])
        elif blocks and line.startswith("  File "):
            blocks[-1].append(line.strip())
    return blocks[-1] if blocks else []


def waits_for_others(dump: str) -> bool | None:
    """Whether the main thread of a dump waits for other ranks, None without a dump.

    It does when one of its three innermost frames is a collective's, or when its innermost line of Python calls `.wait(` (a wait
    written in Python would have a frame of its own).
    """
    frames = main_thread(dump)
    if not frames:
        return None
    return any(COLLECTIVE.search(f) for f in frames[:3]) or bool(WAIT_CALL.search(_source_line(frames[0])))


def _source_line(frame: str) -> str:
    """Source text of a frame, "" when it cannot be had. The script is on this host: its rank ran here."""
    match = FRAME.match(frame)
    if match is None:
        return ""
    linecache.checkcache(match["file"])
    return linecache.getline(match["file"], int(match["line"]))


async def capture(ranks: dict[int, tuple[int, RankPages]], folder: Path, limit_s: float) -> list[RankEvidence]:
    """Dump the stacks of all living ranks at once and write everything to `folder`, within `limit_s`.

    `ranks`: rank -> (pid, pages) of ranks that have not been reaped. A rank in state T cannot run its handler: it is recorded as
    stopped, not woken.
    """
    begin = time.monotonic()
    asked: dict[int, int] = {}
    states = {rank: state_of(pid) for rank, (pid, _) in ranks.items()}
    for rank, (pid, pages) in ranks.items():
        # Without our handler (a program that is not Python, or not that far yet) the signal would end the process.
        if states[rank] not in ("T", "t", "Z", "X", "") and catches(pid, STACK_SIGNAL):
            asked[rank] = os.fstat(pages.stacks_fd).st_size
            kill_quietly(pid, STACK_SIGNAL)
    dumps = await _collect(ranks, asked, begin + limit_s)
    found = []
    for rank, (pid, pages) in sorted(ranks.items()):
        dump = dumps.get(rank, "")
        found.append(
            RankEvidence(
                rank=rank,
                pid=pid,
                state=states[rank] or "gone",
                page=pages.look(),
                stacks=dump,
                kernel=kernel_stack(pid),
                in_collective=waits_for_others(dump),
            )
        )
    with contextlib.suppress(OSError):
        # A full disk costs the evidence, not the restart.
        await asyncio.to_thread(_write, found, folder)
    return found


async def _collect(ranks: dict[int, tuple[int, RankPages]], asked: dict[int, int], deadline: float) -> dict[int, str]:
    """Wait until every dump has come and stopped growing. The dumps arrive in shared memory, which has no readiness event."""
    sizes = dict.fromkeys(asked, -1)
    changed = time.monotonic()
    while asked and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
        now = {r: os.fstat(ranks[r][1].stacks_fd).st_size for r in asked}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        alive = [r for r in asked if state_of(ranks[r][0]) not in ("Z", "X", "")]
        if all(sizes[r] > asked[r] for r in alive) and time.monotonic() - changed > QUIET_S / 5:
            break
    return {r: os.pread(ranks[r][1].stacks_fd, 1 << 20, asked[r]).decode(errors="replace") for r in asked}


def _write(found: list[RankEvidence], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for item in found:
        (folder / f"rank-{item.rank:05d}.stacks.txt").write_text(item.stacks or f"no stack: state {item.state}\n")
        (folder / f"rank-{item.rank:05d}.json").write_bytes(to_pretty_json(item))


def culprits(found: list[RankEvidence], ended: set[int]) -> list[int]:
    """Ranks that the others wait for, from the evidence of a hang. Empty when the evidence does not tell.

    `ended`: ranks that had already exited. In this order: ranks that exited or are stopped; those that do not wait in a
    collective while others do; those that are steps behind.
    """
    gone = sorted(ended | {e.rank for e in found if e.state in ("T", "t", "Z", "X", "gone")})
    if gone:
        return gone
    waiting = [e.rank for e in found if e.in_collective]
    busy = [e.rank for e in found if e.in_collective is False]
    if busy and (waiting or len(found) == len(busy) == 1):
        return busy
    steps = {e.rank: e.page.completed for e in found if e.page.has_steps}
    if len(steps) == len(found) and len(set(steps.values())) > 1:
        return [r for r, s in steps.items() if s == min(steps.values())]
    return []
