"""Who a hang waits for, from the dumps of 4,096 ranks: `keepstep hang` beside torch's own analyser, on the same files.

Then what a rank costs whose buffer of 2,000 operations is full, how that divides over processes, and how much memory the summaries
of 16,384 ranks take. The figures include the start of the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _common import Result, Target, argument_parser, emit, say, work_folder
from _dumps import write_dumps

RANKS, ENTRIES = 4096, 20
FULL_RANKS, FULL_ENTRIES, PART, TIMES = 16384, 2000, 64, 4
"""Of the full job PART dumps are written and read TIMES over, each time as other ranks."""
SMALL = 64
POLL_S = 0.01
SCRIPT = Path(__file__).parent / "_scripts" / "read_dumps.py"
ANALYSER = ["-c", "from torch.distributed.flight_recorder.fr_trace import main; main()"]
OURS = ["-m", "keepstep.cli.main", "hang", "-o", "json"]


class Run(NamedTuple):
    """A program that ended, or had to be ended (`over` false). Processor time and peak resident memory: its children's included."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    output: str
    over: bool


def run(arguments: Sequence[str | Path], log: Path, limit_s: float = 100.0) -> Run:
    """Run Python with these arguments; its standard output and errors go to `log`."""
    peak = 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as output:
        begin = time.perf_counter()
        child = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output)
        while child.poll() is None and time.perf_counter() - begin < limit_s:
            peak = max(peak, resident_bytes(child.pid))
            time.sleep(POLL_S)
        wall = time.perf_counter() - begin
        over = child.poll() is not None
        if not over:
            child.kill()
            child.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall, cpu, peak / 1e6, log.read_text(errors="replace"), over)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its children; what they share is counted in each."""
    total = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident_bytes(int(child)) for child in (thread / "children").read_text().split())
    return total


def named_by_analyser(output: str) -> Counter[int]:
    """How often the analyser's output names each rank: as missing, or as the culprit of a mismatch."""
    named: Counter[int] = Counter()
    for ranks in re.findall(r"missing ranks: \{([\d, ]+)\}", output):
        named.update(int(rank) for rank in ranks.split(","))
    named.update(int(rank) for rank in re.findall(r"Culprit rank (\d+)", output))
    return named


def ours(folder: Path, log: Path, stopped: int, jobs: int) -> Run:
    """`keepstep hang` on a folder. Exits when it does not name exactly the rank that stopped."""
    done = run([*OURS, "--jobs", str(jobs), folder], log)
    named = [culprit["rank"] for culprit in json.loads(done.output)["culprits"]]
    if named != [stopped]:
        sys.exit(f"keepstep hang names {named}, but rank {stopped} stopped")
    return done


def compare(work: Path, stopped: int, repeats: int, limit_s: float) -> tuple[list[Result], list[Target]]:
    """Both programs on the dumps of RANKS ranks."""
    folder = work / f"{RANKS}x{ENTRIES}"
    say(f"writing dumps of {RANKS} ranks")
    write_dumps(folder, RANKS, ENTRIES, stopped, transfers=False)
    runs = {jobs: [ours(folder, work / "ours.log", stopped, jobs) for _ in range(repeats)] for jobs in (1, 2)}
    say(f"torch's analyser, at most {limit_s:.0f} s")
    peer = run([*ANALYSER, folder], work / "analyser.log", limit_s)
    fastest = min(runs, key=lambda jobs: statistics.median(r.wall_s for r in runs[jobs]))
    took = statistics.median(r.wall_s for r in runs[fastest])
    peak = max(r.peak_mb for found in runs.values() for r in found)
    what = f"{RANKS} ranks x {ENTRIES}"
    named = named_by_analyser(peer.output)
    how = f"names rank {stopped} most often of {len(named)}" if named else "names no rank"
    if named and named.most_common(1)[0][0] != stopped:
        how = f"names rank {named.most_common(1)[0][0]} most often, but {stopped} stopped"
    note = how if peer.over else f"ended after {limit_s:.0f} s, not done"
    results = []
    for system, found in [*((f"keepstep, --jobs {jobs}", r) for jobs, r in runs.items()), ("torchfrtrace", [peer])]:
        results += [
            Result(what, system, "s", [r.wall_s for r in found], note=note if found == [peer] else "names it alone"),
            Result(f"{what}, processor time", system, "s", [r.cpu_s for r in found]),
            Result(f"{what}, peak memory", system, "MB", [r.peak_mb for r in found]),
        ]
    at_least = f"with --jobs {fastest}" if peer.over else "at least: the analyser was ended before it was done"
    return results, [
        Target("ratio_vs_torchfrtrace", peer.wall_s / took, "ratio", ">=", 30, note=at_least),
        Target("peak_mb", peak, "MB", "<=", 100, note="processes that share memory counted in full"),
    ]


def with_transfers(work: Path, stopped: int) -> list[Result]:
    """A small pipeline-parallel job: how many ranks each program names when one has stopped."""
    folder = work / f"{SMALL}-transfers"
    write_dumps(folder, SMALL, ENTRIES, stopped % SMALL)
    ours(folder, work / "ours.log", stopped % SMALL, 1)
    named = named_by_analyser(run([*ANALYSER, folder], work / "analyser.log").output)
    what = f"ranks named, {SMALL} ranks that send and receive"
    return [Result(what, "keepstep", "ranks", [1]), Result(what, "torchfrtrace", "ranks", [len(named)])]


def full_buffers(work: Path, repeats: int) -> list[Result]:
    """PART dumps of a job of FULL_RANKS with full buffers, and from that what all would take."""
    folder = work / f"{FULL_RANKS}x{FULL_ENTRIES}"
    say(f"writing {PART} dumps of {FULL_ENTRIES} operations")
    write_dumps(folder, FULL_RANKS, FULL_ENTRIES, 0, only=range(0, FULL_RANKS, FULL_RANKS // PART))
    results = []
    for jobs in (1, 2):
        seconds, peaks = [], []
        for _ in range(repeats):
            done = run([SCRIPT, folder, str(jobs), str(TIMES)], work / "read.log")
            seconds.append(json.loads(done.output)["seconds"])
            peaks.append(done.peak_mb)
        system = f"keepstep, --jobs {jobs}"
        whole = [s * FULL_RANKS / (PART * TIMES) for s in seconds]
        results += [
            Result(f"{PART * TIMES} dumps x {FULL_ENTRIES}", system, "s", seconds),
            Result(f"{FULL_RANKS} dumps x {FULL_ENTRIES}", system, "s", whole, note="extrapolated from these"),
            Result(f"{PART * TIMES} dumps x {FULL_ENTRIES}, peak memory", system, "MB", peaks),
        ]
    return results


def memory_of_summaries(work: Path) -> Result:
    """Peak memory with the summaries of FULL_RANKS ranks: the dumps of RANKS, read again and again under other ranks."""
    folder = work / f"{RANKS}x{ENTRIES}"
    done = run([SCRIPT, folder, "1", str(FULL_RANKS // RANKS)], work / "read.log")
    return Result(
        f"summaries of {json.loads(done.output)['ranks']} ranks, peak", "keepstep, --jobs 1", "MB", [done.peak_mb]
    )


def main() -> None:
    args = argument_parser("keepstep hang against torch's flight-recorder analyser.").parse_args()
    repeats, limit_s = (5, 420.0) if args.full else (2, 120.0)
    stopped = random.Random(args.seed).randrange(RANKS)
    with work_folder(args.keep) as work:
        results, targets = compare(work, stopped, repeats, limit_s)
        results += with_transfers(work, stopped)
        results += full_buffers(work, repeats)
        results.append(memory_of_summaries(work))
    emit("flight_recorder", results, targets, output=args.output, packages=["keepstep", "torch"])


if __name__ == "__main__":
    main()
