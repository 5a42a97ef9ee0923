"""What a save costs training, when it is durable, and how fast it comes back: keepstep beside DCP and the machine's own limits.

One state of 1.3 GB, sharded over two ranks as FSDP2 leaves it, with AdamW. All variants run in the same processes, in turn, on
the same disk: copying the same bytes (the floor of blocking), writing and reading them raw (the floor of saving and loading),
torch.save, DCP with its best staging options, and keepstep through its public interface under `keepstep run`. Times are the slower
rank's; ratios are of medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "_scripts"))

from _common import Result, Target, argument_parser, emit, launch, say, work_folder
from keepstep.checkpoint.restore.verify import verify_checkpoint
from keepstep.checkpoint.storage.source import open_root
from keepstep.launcher.coordination.journal import read_marks

SCRIPTS = Path(__file__).resolve().parent / "_scripts"
RANKS = 2
PACKAGES = ["keepstep", "torch", "blake3", "xxhash", "cryptography"]
SKIP_SAVES = 10  # the first ones fill caches and arenas

Measured = dict[str, dict[str, list[float]]]
"""variant -> what was measured -> seconds."""


def job(
    script: str, folder: Path, arguments: list[str], flags: list[str] | None = None, limit_s: float = 600.0
) -> Path:
    """One two-rank job of a script under `keepstep run`; returns its run folder. Raises SystemExit with its output."""
    where = folder / script
    where.mkdir(parents=True)
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(where / "run"), *(flags or []), str(SCRIPTS / f"{script}.py"), *arguments]
    code = launch(command, where, {"KEEPSTEP_HOME": str(folder / "home")}, limit_s=limit_s)
    if code != 0:
        text = (where / "output.log").read_text(errors="replace")
        raise SystemExit(f"{script}: exit {code}; its output ends with:\n{text[-4000:]}")
    return where / "run"


def slower(parts: list[Measured]) -> Measured:
    """The slower rank's seconds, repeat by repeat."""
    first = parts[0]
    return {
        variant: {
            what: [max(values) for values in zip(*(p[variant][what] for p in parts), strict=True)] for what in rows
        }
        for variant, rows in first.items()
    }


def measure_saves(folder: Path, rounds: int, seed: int) -> tuple[Measured, Measured]:
    """Steady state and first saves."""
    job("ckpt_save", folder, ["--folder", str(folder), "--rounds", str(rounds), "--seed", str(seed)])
    say((folder / "ckpt_save" / "output.log").read_text(errors="replace"))
    found = [
        slower([json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(RANKS)])
        for what in ("save", "first")
    ]
    return found[0], found[1]


def measure_restores(folder: Path, cycles: int, seed: int) -> tuple[Measured, Path]:
    """Restores by tier, and raw reads of the same files between them; the checkpoint's folder."""
    root, times = folder / "restore", folder / "restore-times"
    times.mkdir()
    flags = ["--max-restarts", str(cycles), "--max-no-progress-cycles", "0"]
    arguments = ["--root", str(root), "--times", str(times), "--cycles", str(cycles), "--seed", str(seed)]
    run = job("ckpt_restore", folder, arguments, flags)
    sources = {mark.cycle: mark.attrs["source"] for mark in read_marks(run) if mark.kind == "restored"}
    found: Measured = defaultdict(lambda: defaultdict(list))
    for cycle in range(1, cycles + 1):
        rows = [json.loads((times / f"restore-c{cycle}-r{rank}.json").read_text()) for rank in range(RANKS)]
        found["raw read"]["total"].append(max(row["raw read"] for row in rows))
        found[sources[cycle]]["total"].append(max(row["restore"] for row in rows))
        found["raw read"]["bytes"].append(sum(row["file_bytes"] for row in rows))
    say(f"restored from: {sources}")
    return found, next(root.glob("*-step-*"))


def measure_verify(checkpoint: Path, repeats: int) -> Measured:
    """Verification of a directory, between reading it raw and hashing it from memory, both with all cores; the cache is cold."""
    from ckpt_state import make_cold, read_raw

    files = sorted(path for path in checkpoint.iterdir() if path.suffix == ".safetensors")
    buffers = [memoryview(bytearray(path.stat().st_size)) for path in files]
    cores = len(os.sched_getaffinity(0))
    found: Measured = defaultdict(lambda: defaultdict(list))

    def seconds(work: Any) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def verify() -> None:
        report = verify_checkpoint(open_root(checkpoint.parent), checkpoint.name)
        if not report.ok:
            raise SystemExit(f"{checkpoint} does not verify: {report.errors}")

    with ThreadPoolExecutor(cores) as pool:
        works = {
            "raw read, all cores": lambda: list(pool.map(read_raw, files, buffers)),
            "sha256, all cores": lambda: list(pool.map(lambda view: hashlib.sha256(view).digest(), buffers)),
            "verify": verify,
        }
        for number in range(repeats):
            for name in list(works)[:: 1 if number % 2 == 0 or number == 0 else -1]:
                make_cold(files)
                found[name]["total"].append(seconds(works[name]))
    return found


def measure_soak(folder: Path, saves: int) -> dict[str, float]:
    """MB of resident memory each save adds, by process; the worse rank."""
    job("ckpt_soak", folder, ["--folder", str(folder), "--saves", str(saves)])
    rows = [json.loads((folder / f"soak-{rank}.json").read_text()) for rank in range(RANKS)]
    slopes = {}
    for process in rows[0]:
        points = [row[process][SKIP_SAVES:] for row in rows]
        slopes[process] = max(statistics.linear_regression(range(len(p)), p).slope / 1e6 for p in points)
    return slopes


def measure_ranks(folder: Path) -> dict[str, Any]:
    """Index and manifest of 1,000 tensors over 16,384 ranks, in a process of their own."""
    command = [sys.executable, str(SCRIPTS / "ckpt_ranks.py"), "--root", str(folder / "ranks")]
    env = os.environ | {"KEEPSTEP_HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"ckpt_ranks: {done.stderr[-4000:]}")
    return dict(json.loads(done.stdout))


# ---- what it comes to


def fastest(saves: Measured, what: str, variants: list[str]) -> tuple[str, float]:
    """The variant with the smallest median."""
    return min(((name, statistics.median(saves[name][what])) for name in variants), key=lambda item: item[1])


def targets_of(
    saves: Measured, loads: Measured, verify: Measured, slopes: dict[str, float], ranks: dict[str, Any]
) -> list[Target]:
    ours = {what: statistics.median(values) for what, values in saves["keepstep"].items()}
    copy_name, copy = min(
        ((what, statistics.median(values)) for what, values in saves["memcpy"].items()), key=lambda item: item[1]
    )
    dcp_name, best_dcp = fastest(saves, "block", [name for name in saves if name.startswith("dcp.async")])
    sync = statistics.median(saves["dcp.save"]["total"])
    if sync < best_dcp:
        dcp_name, best_dcp = "dcp.save", sync
    raw_write = statistics.median(saves["raw write"]["total"])
    raw_read = statistics.median(loads["raw read"]["total"])
    disk, shm = (statistics.median(loads[tier]["total"]) if tier in loads else None for tier in ("disk", "shm"))
    bound = max(statistics.median(verify[name]["total"]) for name in ("raw read, all cores", "sha256, all cores"))
    no_tier = "no restore came from this tier"
    return [
        Target("block_ratio_memcpy", ours["block"] / copy, "ratio", "<=", 1.3, f"blocking / {copy_name}"),
        Target("block_ratio_best_dcp", ours["block"] / best_dcp, "ratio", "<=", 0.5, f"blocking / that of {dcp_name}"),
        Target(
            "durable_ratio_raw",
            raw_write / ours["total"],
            "ratio",
            ">=",
            0.8,
            "raw write + fsync / save to durable, times",
        ),
        Target(
            "load_ratio_raw",
            None if disk is None else raw_read / disk,
            "ratio",
            ">=",
            0.8,
            no_tier if disk is None else "raw read / restore(), times, both cold",
        ),
        Target(
            "shm_vs_disk_restore",
            None if disk is None or shm is None else disk / shm,
            "ratio",
            ">=",
            4,
            no_tier if disk is None or shm is None else "restore() from cold disk / from the node's memory, times",
        ),
        Target(
            "verify_ratio_bound",
            bound / statistics.median(verify["verify"]["total"]),
            "ratio",
            ">=",
            0.8,
            "slower of raw read and sha256, all cores / verify, times",
        ),
        Target("rss_slope", max(slopes["rank"], slopes["writer"]), "MB/save", "<=", 0.1, "rank and writer process"),
        Target("metadata_16384_s", ranks["write_s"] + ranks["read_s"], "s", "<=", 5),
        Target("metadata_16384_mb", ranks["peak_mb"], "MB", "<=", 500, f"{ranks['before_mb']:.0f} MB before it began"),
    ]


def results_of(
    saves: Measured, first: Measured, loads: Measured, verify: Measured, slopes: dict[str, float], ranks: dict[str, Any]
) -> list[Result]:
    names = {
        "block": "blocks training",
        "total": "durable",
        "memmove": "memmove",
        "copy_": "torch copy_",
        "before": "before each DCP save",
    }
    results = [
        Result(names[what], variant, "s", values) for variant, rows in saves.items() for what, values in rows.items()
    ]
    results += [
        Result(f"first save, {names[what]}", variant, "s", values)
        for variant, rows in first.items()
        if variant not in ("memcpy", "get_state_dict")
        for what, values in rows.items()
    ]
    results += [
        Result(
            "load, cold" if tier != "shm" else "load",
            tier if "raw" in tier else f"keepstep from {tier}",
            "s",
            rows["total"],
        )
        for tier, rows in loads.items()
    ]
    results += [Result("verify a folder, cold", name, "s", rows["total"]) for name, rows in verify.items()]
    results += [Result("memory each save adds", process, "MB", [value]) for process, value in slopes.items()]
    for name, unit in (("write_s", "s"), ("read_s", "s"), ("reshard_read_s", "s"), ("peak_mb", "MB")):
        results.append(
            Result(
                f"16,384 ranks, 1,000 tensors: {name.rpartition('_')[0].replace('_', ' ')}",
                "keepstep",
                unit,
                [ranks[name]],
            )
        )
    results.append(Result("one save", "keepstep", "MB", [loads["raw read"]["bytes"][0] / 1e6]))
    results.append(Result("load average at the end", "machine", "", [os.getloadavg()[0]]))
    return results


def run_all(args: argparse.Namespace, folder: Path) -> tuple[list[Result], list[Target]]:
    rounds, cycles = (7, 10) if args.full else (2, 6)
    saves, first = measure_saves(folder, rounds, args.seed)
    loads, checkpoint = measure_restores(folder, cycles, args.seed)
    verify = measure_verify(checkpoint, 5 if args.full else 3)
    slopes = measure_soak(folder, 200 if args.full else 50)
    ranks = measure_ranks(folder)
    return results_of(saves, first, loads, verify, slopes, ranks), targets_of(saves, loads, verify, slopes, ranks)


def main() -> None:
    args = argument_parser("Blocking, durability and restore of checkpoints beside DCP and raw I/O.").parse_args()
    with work_folder(args.keep) as folder:
        results, targets = run_all(args, folder)
    emit("checkpoint", results, targets, output=args.output, packages=PACKAGES)


if __name__ == "__main__":
    main()
