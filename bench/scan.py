"""How fast logs are searched for all shipped patterns at once, and that memory does not grow with the log.

Two logs of 200 MB: a quiet one, and one with a hit in every twentieth line. keepstep's figure is for all of it: finding the lines,
telling which entries they match, and taking the groups out. Peers get the same patterns and only have to find something: Python's
`re` (one alternation, line by line, on a sample), `grep -P` (the same alternation, on a sample), and Hyperscan (one database of
all patterns, 4 MB blocks), which counts matches and takes no groups. All on one core; times are processor time.
"""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from _common import Result, Target, argument_parser, emit, say, work_folder
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import CHUNK_BYTES, Matcher, chunks

MB = 1_000_000
LOG_MB = 200
UNIQUE_MB = 20
"""The log is this much, repeated: more would only measure the generator."""
SMALL_MB = 50
HIT_SHARE = 0.05
SAMPLE_SHARE = {"re": 0.0005, "grep": 0.01}
"""Part of the unique log that slow peers get; their speed does not depend on how long a log is."""
PEER_LIMIT_S = 40
GREP_CHARACTERS = 12_000
"""Of patterns in one expression; PCRE2 as grep has it refuses much larger ones."""


class Log(NamedTuple):
    """A log on disk. `lines` are its unique ones."""

    name: str
    path: Path
    lines: list[bytes]


QUIET = (
    (36, "[rank{n}]: {t} INFO loop.py:{n} step {i} loss {f} gnorm {f} lr 3e-04 tok/s {n} mem {n}.{n}GiB"),
    (14, '{t} node-{n} kernel: [{n}.{n}] audit: type=1400 audit({n}.{n}:{n}): operation="open" pid={n} comm="python3"'),
    (12, "node-{n}:{n}:{n} [{d}] NCCL INFO Channel {n}/0 : {n}[{d}] -> {n}[{d}] [send] via NET/IB/{d}/GDRDMA"),
    (
        10,
        '{t} node-{n} kubelet[{n}]: I0302 prober.go:107] "Probe succeeded" probeType="Liveness" pod="train/worker-{n}"',
    ),
    (8, "{t} node-{n} systemd[1]: Started Session {n} of User root."),
    (6, "{t} WARN loader.py:{n} worker {d} waited {f}s for shard s3://bucket/part-{n}.tar retries=0"),
    (2, "{t} INFO client.py:{n} request ok, error rate 0.0, failed=0, queue {d}"),
    (9, "Mar  2 11:22:33 node-{n} kernel: IPv6: ADDRCONF(NETDEV_CHANGE): cali{x}: link becomes ready"),
    (3, "  {x} {x} {x} {x} {x} {x} {x} {x}"),
)
"""Lines as training, kernel, kubelet and NCCL write them when nothing is wrong, and their share in percent.

None is in the catalog's own sample of ordinary lines. {n} a number, {d} a digit, {f} a fraction, {x} hexadecimal, {t} a time.
"""


def quiet_line(chance: random.Random, number: int) -> str:
    """One of them."""
    (template,) = chance.choices([line for _, line in QUIET], [share for share, _ in QUIET])
    made = {
        "n": lambda: str(chance.randrange(100_000)),
        "d": lambda: str(chance.randrange(8)),
        "f": lambda: f"{chance.random() * 9:.4f}",
        "x": lambda: f"{chance.randrange(16**11):011x}",
        "i": lambda: str(number),
        "t": lambda: (
            f"2031-03-02T11:{chance.randrange(60):02d}:{chance.randrange(60):02d}.{chance.randrange(10**6):06d}Z"
        ),
    }
    return re.sub(r"\{(\w)\}", lambda match: made[match[1]](), template)


def make_logs(folder: Path, seed: int) -> list[Log]:
    """Both logs, on disk."""
    examples = [example for entry in shipped() for example in entry.examples if "\n" not in example]
    logs = []
    for name, share in (("quiet", 0.0), ("5 % hits", HIT_SHARE)):
        chance = random.Random(seed)
        lines: list[bytes] = []
        size = 0
        while size < UNIQUE_MB * MB:
            hit = chance.random() < share
            text = f"[{chance.random() * 1e6:.6f}] {chance.choice(examples)}" if hit else quiet_line(chance, len(lines))
            lines.append(text.encode())
            size += len(lines[-1]) + 1
        path = folder / f"{'hits' if share else 'quiet'}.log"
        block = b"\n".join(lines) + b"\n"
        with path.open("wb") as file:
            for _ in range(LOG_MB // UNIQUE_MB):
                file.write(block)
        logs.append(Log(name, path, lines))
    return logs


def keepstep_scan(path: Path, matcher: Matcher, limit: int = 1 << 62) -> int:
    """Hits of a log, with their groups; of its first `limit` bytes."""
    hits = read = 0
    with path.open("rb") as file:
        for chunk in chunks(file):
            hits += sum(1 for _ in matcher.scan(chunk))
            read += len(chunk)
            if read >= limit:
                break
    return hits


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            yield block


def plain(pattern: str) -> str:
    """A pattern for engines that want no names of groups and inline flags only for a group."""
    pattern = re.sub(r"\(\?P<\w+>", "(?:", pattern)
    flags = re.match(r"\(\?([a-z]+)\)", pattern)
    return f"(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"(?:{pattern})"


def patterns() -> list[str]:
    """All shipped patterns that long logs are searched for, without names of groups."""
    return [plain(pattern) for entry in shipped() if not entry.ordinary for pattern in entry.pattern]


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Processor time of each run of `work`."""
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return found


def rates(path: Path, times: Sequence[float]) -> list[float]:
    size = path.stat().st_size
    return [size / one / 1e9 for one in times]


def re_rates(log: Log) -> list[float]:
    """GB/s of Python's `re` on a sample of lines."""
    compiled = re.compile("|".join(patterns()).encode())
    sample = log.lines[:: max(1, round(1 / SAMPLE_SHARE["re"]))]
    size = sum(len(line) + 1 for line in sample)
    return [size / one / 1e9 for one in seconds(lambda: [compiled.search(line) for line in sample], 1)]


def grep_rate(log: Log, folder: Path) -> tuple[list[float], str]:
    """GB/s of `grep -P -c` on a sample, or why there is none. Where one expression is too large, runs over parts are added up."""
    sample = log.lines[:: max(1, round(1 / SAMPLE_SHARE["grep"]))]
    text = b"\n".join(sample) + b"\n"
    (folder / "sample.log").write_bytes(text)
    parts: list[list[str]] = [[]]
    for pattern in patterns():
        if sum(map(len, parts[-1])) + len(pattern) > GREP_CHARACTERS:
            parts.append([])
        parts[-1].append(pattern)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for part in parts:
        (folder / "pattern").write_bytes("|".join(part).encode() + b"\n")
        command = ["grep", "-P", "-c", "-f", str(folder / "pattern"), str(folder / "sample.log")]
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, timeout=PEER_LIMIT_S, env=os.environ | {"LC_ALL": "C"}
            )
        except subprocess.TimeoutExpired:
            return [], f"not done with {len(text) / MB:.1f} MB in {PEER_LIMIT_S} s"
        if done.returncode > 1:
            return [], done.stderr.decode(errors="replace").strip()[:200]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    how = f"{SAMPLE_SHARE['grep']:.0%} of the lines" + (
        f"; {len(parts)} runs over parts of the patterns" if len(parts) > 1 else ""
    )
    return [len(text) / used / 1e9], how


def hyperscan_scan() -> tuple[Callable[[Path], int], list[str]]:
    """A function that counts matches of a log, and the patterns that Hyperscan does not compile."""
    import hyperscan

    flags = hyperscan.HS_FLAG_MULTILINE
    good, refused = [], []
    for pattern in patterns():
        try:
            hyperscan.Database().compile(expressions=[pattern.encode()], flags=[flags])
            good.append(pattern)
        except hyperscan.error:
            refused.append(pattern)
    database = hyperscan.Database()
    database.compile(
        expressions=[pattern.encode() for pattern in good], ids=list(range(len(good))), flags=[flags] * len(good)
    )

    def count(path: Path) -> int:
        seen = [0]

        def on_match(_id: int, _from: int, _to: int, _flags: int, _context: object) -> None:
            seen[0] += 1

        for block in blocks(path):
            database.scan(block, match_event_handler=on_match)
        return seen[0]

    return count, refused


def peak_mb(path: Path, limit_mb: int) -> float:
    """Peak memory of a process of its own that scans the first part of a log (proc_pid_status(5), VmHWM)."""
    program = (
        "import re, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from scan import keepstep_scan, Matcher, shipped\n"
        "keepstep_scan(Path(sys.argv[1]), Matcher(shipped()), int(sys.argv[2]))\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 1024)"
    )
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", program, str(path), str(limit_mb * MB), here]
    return float(subprocess.run(arguments, capture_output=True, check=True).stdout)


def start_s() -> float:
    """Processor time until patterns can be used, in a process of its own: reading the catalog and compiling it."""
    program = (
        "import time; begin = time.process_time()\n"
        "from keepstep.catalog.load import shipped; from keepstep.catalog.matcher import Matcher\n"
        "Matcher(shipped()); print(time.process_time() - begin)"
    )
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def measure(
    log: Log, folder: Path, matcher: Matcher, hyperscan: Callable[[Path], int], repeats: int
) -> tuple[list[Result], dict[str, float | None]]:
    """Rows of one log, and the ratios to the peers."""
    hits = keepstep_scan(log.path, matcher, UNIQUE_MB * MB)
    say(f"{log.name}: keepstep")
    own = rates(log.path, seconds(lambda: keepstep_scan(log.path, matcher), repeats))
    rows = [Result(log.name, "keepstep", "GB/s", own, f"{hits} hits in {UNIQUE_MB} MB, with groups; {LOG_MB} MB read")]
    say(f"{log.name}: re")
    rows.append(Result(log.name, "python re", "GB/s", re_rates(log), f"{SAMPLE_SHARE['re']:.2%} of the lines"))
    say(f"{log.name}: grep -P")
    grep, how = grep_rate(log, folder)
    rows.append(Result(log.name, "grep -P", "GB/s", grep, how))
    say(f"{log.name}: hyperscan")
    theirs = rates(log.path, seconds(lambda: hyperscan(log.path), repeats))
    rows.append(Result(log.name, "hyperscan", "GB/s", theirs, "no groups taken"))
    base = rows[0].median or 0.0
    return rows, {row.system: None if row.median is None else base / row.median for row in rows[1:]}


def main() -> None:
    args = argument_parser("Search logs for all patterns of the catalog.").parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    matcher = Matcher(shipped())
    rows = [
        Result(
            "patterns",
            "keepstep",
            "",
            [len(patterns())],
            f"{sum(1 for e in shipped() if e.pattern and not e.ordinary)} entries with patterns",
        ),
        Result("start", "keepstep", "s", [start_s() for _ in range(3)], "catalog read and compiled, processor time"),
    ]
    say("compiling for hyperscan")
    hyperscan, refused = hyperscan_scan()
    for pattern in refused:
        say(f"hyperscan does not compile {pattern}")
    rows.append(Result("not compiled", "hyperscan", "", [len(refused)], "; ".join(p[:60] for p in refused[:3]) or None))
    worst: dict[str, list[float | None]] = {}
    with work_folder(args.keep) as folder:
        say("making the logs")
        logs = make_logs(folder, args.seed)
        for log in logs:
            found, ratios = measure(log, folder, matcher, hyperscan, 5 if args.full else 2)
            rows += found
            for system, ratio in ratios.items():
                worst.setdefault(system, []).append(ratio)
        for log in logs:
            memory = [peak_mb(log.path, size) for size in (SMALL_MB, LOG_MB)]
            note = f"{memory[0]:.0f} MB for {SMALL_MB} MB of log, {memory[1]:.0f} MB for {LOG_MB} MB"
            rows.append(Result(f"peak memory, {log.name}", "keepstep", "MB", [memory[1]], note))
    names = {
        "ratio_vs_re": ("python re", 200.0),
        "ratio_vs_grep": ("grep -P", 10.0),
        "ratio_vs_hyperscan": ("hyperscan", 0.2),
    }
    targets = []
    for name, (system, wanted) in names.items():
        known = [ratio for ratio in worst[system] if ratio is not None]
        note = (
            "the worse of both logs"
            if len(known) == 2
            else next((r.note for r in rows if r.system == system and not r.values), None)
        )
        targets.append(Target(name, min(known) if known else None, "ratio", ">=", wanted, note))
    emit("scan", rows, targets, output=args.output, packages=["keepstep", "google-re2", "hyperscan"])


if __name__ == "__main__":
    main()
