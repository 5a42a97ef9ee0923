"""How many campaigns a second `keepstep simulate` gets through on one core, with both engines, and how that grows.

The campaign: 54 days of 2,048 nodes at 6.5 failures per 1000 node-days with 20 spares, repairs of a day (lognormal, sigma 1), two
tiers, a tenth of the failures hangs of 600 s, a burst of 8 nodes a month. Both engines simulate the same runs and must come to the
same mean. Beside it, where its source is given or it is installed: AIReSim, which simulates servers, spares and repairs of such a
job without checkpoints, hangs or bursts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import msgspec

from _common import Result, Target, argument_parser, emit, say
from keepstep.goodput.interval import optimal_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.planner.scenario import DAY_S, Repair, Scenario
from keepstep.planner.sim.campaign import Results, simulate_runs

RUNS = {"numba": 2048, "numpy": 1024}
RATE = 6.5e-3
NODES = (512, 1024, 2048, 4096, 8192)
DAYS = (14, 54, 108, 216)
ENGINES = ("numba", "numpy")
AGREE_WITHIN = 1e-9

AIRESIM = """
import json, sys, time
if sys.argv[1]: sys.path.insert(0, sys.argv[1])
from airesim.params import Params
from airesim.simulator import Simulator
day = 1440.0
p = Params(
    random_failure_rate=6.5e-3 / day, systematic_failure_fraction=0.0, recovery_time=2.0, host_selection_time=0.0,
    job_size=2048, job_length=54 * day, warm_standbys=20, working_pool_size=2068, spare_pool_size=0,
    auto_repair_time=day, prob_auto_to_manual=0.0, auto_repair_fail_prob=0.0, manual_repair_fail_prob=0.0,
)
took = []
for run in range(int(sys.argv[2]) + 1):
    begin = time.perf_counter()
    stats = Simulator(p.with_overrides(seed=int(sys.argv[3]) + run)).run()
    took.append(time.perf_counter() - begin)
print(json.dumps({"s": took[1:], "failures": stats.total_failures}))
"""
"""The first run warms up. Given the rate, spares and repair time of our campaign, and the job's length without failures."""


def campaign(nodes: int = 2048, days: float = 54.0) -> Scenario:
    """The one above, with a spare for each 100 nodes or so and the interval that is best."""
    tiers = (
        Tier(name="peer", block_s=10.0, load_s=30.0),
        Tier(name="disk", every=6, block_s=20.0, persist_lag_s=60.0, load_s=120.0),
    )
    kinds = (
        FailureKind(name="hardware", share=0.6, replace=True),
        FailureKind(name="software", share=0.3),
        FailureKind(name="hang", share=0.1, detect_s=600.0),
    )
    job = Job(
        nodes=nodes,
        rate_per_node_day=RATE,
        interval_s=optimal_s(10.0, DAY_S / (RATE * nodes)),
        tiers=tiers,
        kinds=kinds,
        restart=RestartPhases(decide_s=10.0, replace_s=30.0, start_s=90.0),
    )
    return Scenario(
        job=job,
        days=days,
        spares=max(8, round(20 * nodes / 2048)),
        repair=Repair(mean_s=DAY_S, sigma=1.0),
        block_nodes=8,
        burst_per_day=1 / 30,
        burst_nodes=8,
    )


def rate_of(scenario: Scenario, engine: str, runs: int, seed: int) -> tuple[float, Results]:
    """Runs a second on one core, tape and all, and the runs."""
    begin = time.perf_counter()
    results = simulate_runs(scenario, runs, seed, engine, jobs=1)  # type: ignore[arg-type]
    return runs / (time.perf_counter() - begin), results


def first_call_s() -> float:
    """From a Python without a cache of compiled code to the first runs: imports, compiling, one block of runs."""
    program = "from simulate import campaign, rate_of; rate_of(campaign(), 'numba', 1, 0)"
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as cache:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        env = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], env=env, check=True)
        return time.perf_counter() - begin


def means_of_both(seed: int) -> tuple[float, float, float]:
    """Mean goodput by each engine of the same runs, and the largest difference between two runs."""
    scenario = campaign()
    goodput = {e: rate_of(scenario, e, 256, seed)[1].goodput(scenario) for e in ENGINES}
    apart = float(abs(goodput["numba"] - goodput["numpy"]).max())
    return float(goodput["numba"].mean()), float(goodput["numpy"].mean()), apart


def growth(repeats: int, seed: int) -> list[Result]:
    """Runs a second by number of nodes and by length."""
    rows = []
    sizes = [(n, 54.0, f"{n} nodes, 54 days") for n in NODES] + [
        (2048, float(d), f"2048 nodes, {d} days") for d in DAYS
    ]
    for nodes, days, name in sizes:
        for engine in ENGINES:
            say(f"{name}, {engine}")
            values = [rate_of(campaign(nodes, days), engine, 256, seed + i)[0] for i in range(repeats)]
            rows.append(Result(name, engine, "runs/s", values, note="256 runs"))
    return rows


def airesim(args: Namespace, runs: int) -> Result:
    """AIReSim's runs a second, without values where it is not there."""
    name, path = "2048 servers, 54 days", args.airesim or ""
    command = [args.airesim_python, "-c", AIRESIM, str(path), str(runs), str(args.seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        return Result(name, "AIReSim", "runs/s", note=f"not measured: {why}")
    found = json.loads(done.stdout)
    note = f"exponential, no checkpoints; {found['failures']} failures in the last run"
    return Result(name, "AIReSim", "runs/s", [1.0 / s for s in found["s"]], note=note)


def main() -> None:
    parser = argument_parser("Simulated campaigns a second.")
    parser.add_argument("--airesim", type=Path, metavar="PATH", help="source of AIReSim, when it is not installed")
    parser.add_argument("--airesim-python", default=sys.executable, metavar="EXE", help="a Python that has SimPy")
    args = parser.parse_args()
    repeats = 15 if args.full else 5
    say("compiling")
    compile_s = [first_call_s() for _ in range(3 if args.full else 1)]
    by_numba, by_numpy, apart = means_of_both(args.seed)
    speeds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for repeat in range(repeats):
        say(f"repeat {repeat + 1}/{repeats}")
        for engine in ENGINES:
            speeds[engine].append(rate_of(campaign(), engine, RUNS[engine], args.seed + repeat)[0])
    rows = [Result("the campaign", e, "runs/s", speeds[e], note=f"{RUNS[e]} runs, one core") for e in ENGINES]
    rows.append(Result("first call, nothing compiled yet", "numba", "s", compile_s, note="imports and compiling"))
    rows += [Result("mean goodput", e, "share", [v]) for e, v in (("numba", by_numba), ("numpy", by_numpy))]
    rows += growth(5 if args.full else 2, args.seed)
    rows.append(airesim(args, 9 if args.full else 3))
    medians = {engine: statistics.median(speeds[engine]) for engine in ENGINES}
    targets = [
        Target("runs_per_s_numba", medians["numba"], "runs/s", ">=", 2000),
        Target("runs_per_s_numpy", medians["numpy"], "runs/s", ">=", 300),
        Target("engines_apart", apart, "goodput", "<=", AGREE_WITHIN, "of the same run, the largest of 256"),
    ]
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / "simulate-scenario.json").write_bytes(msgspec.json.encode(campaign()))
    emit("simulate", rows, targets, output=args.output, packages=["keepstep", "numpy", "numba"])


if __name__ == "__main__":
    main()
