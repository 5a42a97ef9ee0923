"""All-reduce bandwidth over exactly a job's nodes, as a script: `keepstep run -m keepstep.launcher.health.gangcheck`, or torchrun.

Rank 0 prints the result and writes it to a file. Below the baseline of this kind of node, parts of the job are measured one after
the other until the slow node is found. torch is imported when the script runs, in the ranks; the launcher itself never loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.bounded import run_tool
from keepstep.launcher.files import keepstep_home, write_atomic
from keepstep.launcher.health.slownodes import find_slow
from keepstep.records.codec import rfc3339, to_pretty_json
from keepstep.records.errors import ConfigError

ENV_NODE_NAME = "KEEPSTEP_NODE_NAME"
"""What the launcher calls this node, where the test is one of its cycles."""
MB = 1 << 20
GB = 1e9
NCCL_TESTS_LIMIT_S = 120.0
MAX_SEARCHES = 4
BUS_BANDWIDTH = re.compile(r"# Avg bus bandwidth\s*:\s*([\d.]+)")


class SizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One message size. Bus bandwidth as nccl-tests defines it: 2 (n-1)/n times bytes over time, the same for any number of ranks
    on hardware that is used evenly (nccl-tests, doc/PERFORMANCE.md)."""

    size_bytes: int
    time_s: float
    bus_gb_per_s: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the job that was measured while looking for the slow node."""

    members: list[str]
    gb_per_s: float


class GangResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `keepstep check gang` prints. GB are 10^9 bytes."""

    schema: str = "keepstep.gang_check/1"
    time: str
    key: str
    """What a baseline belongs to: GPU (or CPU) model, nodes, ranks a node, backend."""
    backend: str
    nodes_tested: int
    nodes: list[str]
    ranks: int
    sizes: list[SizeResult]
    bandwidth_gb_per_s: float
    """Of the largest size."""
    baseline_gb_per_s: float | None
    tolerance: float
    ok: bool | None
    """None: there is no baseline to compare with."""
    suspects: list[str] = []
    """Names of nodes; of ranks ("rank 3") where the job has one node only."""
    parts: list[Part] = []
    without_suspects_gb_per_s: float | None = None
    """The rest of the job without the suspects."""
    single_node_gb_per_s: dict[str, float] = {}
    """By nccl-tests' all_reduce_perf on each node alone, where it is installed."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a unit of the search is: a node with its ranks, or one rank of the only node."""

    name: str
    ranks: list[int]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Command line of the script. Raises ConfigError for a size or tolerance that makes no sense."""
    parser = argparse.ArgumentParser(prog="keepstep.launcher.health.gangcheck", description=__doc__)
    parser.add_argument("--result", type=Path, default=None, help="file for the result")
    parser.add_argument("--sizes-mb", default="1,16,128", help="message sizes in MB, the last one is judged")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.2, help="share of the baseline that may be missing")
    parser.add_argument("--baselines", type=Path, default=None, help="folder of baselines")
    parser.add_argument("--save-baseline", action="store_true")
    parser.add_argument("--timeout", type=float, default=120.0, help="of one collective, in seconds")
    args = parser.parse_args(argv)
    try:
        args.sizes = [int(float(s) * MB) for s in args.sizes_mb.split(",")]
    except ValueError:
        args.sizes = []
    if not args.sizes or min(args.sizes) < 4:
        raise ConfigError(f"--sizes-mb {args.sizes_mb!r}: give sizes in MB as 1,16,128")
    if not 0 <= args.tolerance < 1 or args.iterations < 1:
        raise ConfigError(f"--tolerance {args.tolerance:g}, --iterations {args.iterations}: give [0, 1) and at least 1")
    args.baselines = args.baselines or keepstep_home() / "baselines"
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, compare, search. The exit code says only whether the test ran: its result is in the file."""
    args = parse_args(argv)
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    alone = nccl_tests_gb_per_s(torch.cuda.device_count()) if cuda and local_rank == 0 else None
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=args.timeout))
    try:
        result = _check(args, torch, dist, device, alone)
        if dist.get_rank() == 0:
            _publish(args, result)
        dist.barrier()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return 0


def _check(args: argparse.Namespace, torch: Any, dist: Any, device: Any, alone: float | None) -> GangResult:
    rank, world = dist.get_rank(), dist.get_world_size()
    facts: list[Any] = [None] * world
    sku = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    dist.all_gather_object(facts, (node_of(rank), sku, alone))
    nodes = list(dict.fromkeys(f[0] for f in facts))
    key = f"{facts[0][1]}, {len(nodes)} nodes x {world // len(nodes)} ranks, {dist.get_backend()}"

    def measure(ranks: list[int], size_bytes: int = args.sizes[-1]) -> SizeResult:
        # The job's own group is measured as it is; others are made for the measurement, by all ranks in the same order.
        group = None if len(ranks) == world else dist.new_group(ranks)
        result = _measure(torch, dist, device, group, ranks, size_bytes, args.iterations)
        if group is not None and rank in ranks:
            dist.destroy_process_group(group)
        return result

    sizes = [measure(list(range(world)), size) for size in args.sizes]
    reached = sizes[-1].bus_gb_per_s
    # Rank 0's file counts: all ranks must take the same way from here.
    told = [load_baseline(args.baselines, key) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    baseline: float | None = told[0]
    enough = None if baseline is None else (1 - args.tolerance) * baseline
    ok = None if enough is None else reached >= enough
    suspects: list[str] = []
    parts: list[Part] = []
    rest: float | None = None
    if enough is not None and not ok and world > 1:
        suspects, parts, rest = _search(members_of([f[0] for f in facts]), measure, args.tolerance, enough)
    return GangResult(
        time=rfc3339(time.time_ns()),
        key=key,
        backend=dist.get_backend(),
        nodes_tested=len(nodes),
        nodes=nodes,
        ranks=world,
        sizes=sizes,
        bandwidth_gb_per_s=reached,
        baseline_gb_per_s=baseline,
        tolerance=args.tolerance,
        ok=ok,
        suspects=suspects,
        parts=parts,
        without_suspects_gb_per_s=rest,
        single_node_gb_per_s={f[0]: f[2] for f in facts if f[2] is not None},
    )


def _search(
    members: list[Member], measure: Callable[[list[int]], SizeResult], tolerance: float, enough_gb_per_s: float
) -> tuple[list[str], list[Part], float | None]:
    """Suspects, the parts that were measured, and the bandwidth without the suspects (None when too few ranks are left).

    Slow nodes of different speed show only one after the other: while the rest is too slow, it is searched again.
    """

    def rate(chosen: list[int]) -> float:
        return measure(sorted(r for i in chosen for r in members[i].ranks)).bus_gb_per_s

    suspects: list[int] = []
    parts: list[Part] = []
    rest: float | None = None
    for _ in range(MAX_SEARCHES):
        left = [i for i in range(len(members)) if i not in suspects]
        slow, groups = find_slow(left, rate, tolerance)
        parts += [Part(members=[members[i].name for i in g], gb_per_s=value) for g, value in groups]
        if suspects and len(slow) == len(left):
            # No more to be told apart: what was found before stands.
            break
        suspects += slow
        others = [i for i in left if i not in slow]
        if sum(len(members[i].ranks) for i in others) < 2:
            rest = None
            break
        rest = rate(others)
        if rest >= enough_gb_per_s:
            break
    return [members[i].name for i in sorted(suspects)], parts, rest


def _measure(
    torch: Any, dist: Any, device: Any, group: Any, ranks: list[int], size_bytes: int, iterations: int
) -> SizeResult:
    """Time of one all-reduce among `ranks`, the slowest rank's mean; the others wait for the answer. Every rank must call it."""
    seconds = 0.0
    if dist.get_rank() in ranks:
        data = torch.ones(max(1, size_bytes // 4), dtype=torch.float32, device=device)
        for repeat in range(iterations + 2):
            if repeat == 2:
                # The first ones open connections.
                _synchronise(torch, device)
                begin = time.perf_counter()
            dist.all_reduce(data, group=group)
            data.mul_(1.0 / len(ranks))
        _synchronise(torch, device)
        seconds = (time.perf_counter() - begin) / iterations
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = float(slowest.item())
    n = len(ranks)
    return SizeResult(
        size_bytes=size_bytes,
        time_s=seconds,
        bus_gb_per_s=2 * (n - 1) / n * size_bytes / seconds / GB if n > 1 else 0.0,
    )


def _synchronise(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def members_of(node_by_rank: list[str]) -> list[Member]:
    """Units of the search: nodes, or ranks where there is one node."""
    nodes = list(dict.fromkeys(node_by_rank))
    if len(nodes) == 1:
        return [Member(name=f"rank {r}", ranks=[r]) for r in range(len(node_by_rank))]
    return [Member(name=node, ranks=[r for r, n in enumerate(node_by_rank) if n == node]) for node in nodes]


def node_of(rank: int) -> str:
    """Name of this rank's node: keepstep's own from the cycle record, else host name and group rank."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(Path(os.environ["KEEPSTEP_CYCLE_INFO"]).read_bytes())
        name = next((r["node"] for r in record["ranks"] if r["rank"] == rank), None)
        if name:
            return str(name)
    # Several launchers may share a host.
    host = socket.gethostname().partition(".")[0]
    return os.environ.get(ENV_NODE_NAME) or f"{host}#{os.environ.get('GROUP_RANK', '0')}"


def cpu_model() -> str:
    """Model name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def nccl_tests_gb_per_s(gpus: int) -> float | None:
    """Bus bandwidth of this node alone by nccl-tests, None where it is not installed or did not give one."""
    program = shutil.which("all_reduce_perf")
    if program is None:
        return None
    try:
        done = run_tool([program, "-b", "256M", "-e", "256M", "-g", str(gpus), "-c", "0"], NCCL_TESTS_LIMIT_S)
    except (OSError, TimeoutError):
        return None
    match = BUS_BANDWIDTH.search(done.stdout.decode(errors="replace"))
    return float(match[1]) if match and done.returncode == 0 else None


# ---- baselines


def baseline_path(folder: Path, key: str) -> Path:
    """File of a baseline: readable, and unique by a hash of the key."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:80]
    return folder / f"{slug}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def load_baseline(folder: Path, key: str) -> float | None:
    """Bandwidth to expect, GB/s; None without one. Raises ConfigError when the file cannot be understood."""
    path = baseline_path(folder, key)
    try:
        record = json.loads(path.read_bytes())
        return float(record["bandwidth_gb_per_s"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a baseline ({error}); remove it or run with --save-baseline") from None


def _publish(args: argparse.Namespace, result: GangResult) -> None:
    data = to_pretty_json(result)
    if args.save_baseline:
        args.baselines.mkdir(parents=True, exist_ok=True)
        write_atomic(baseline_path(args.baselines, result.key), data)
    if args.result is not None:
        args.result.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.result, data)
    print(data.decode(), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
