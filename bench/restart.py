"""How long a run stands still after a fault: keepstep beside torchrun (and NVRx's ft_launcher when it is installed).

The same two-rank gloo scripts run under each launcher, in turn, several faults in one job. The dying script itself
writes down the time just before its SIGKILL, the next cycle's ranks when they had completed their first step (the later
one counts).
For hangs keepstep's own journal says when the stall was noticed; the script says when it began.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from _common import Result, Target, argument_parser, emit, launch, say, work_folder
from keepstep.launcher.coordination.journal import read_marks

Kills = dict[tuple[str, str], dict[str, list[float]]]
"""(script, system) -> what was measured -> seconds."""

SCRIPTS = Path(__file__).resolve().parent / "_scripts"
CYCLE_SECONDS = 1.0
HANG_TIMEOUT_S = 5.0
FT_LAUNCHER = "ft_launcher"
# torch 2.13 keeps one store over all restarts by default; ranks then meet stale addresses of the last cycle and may not
# come back at all. The peer is measured at its best.
PEER_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launcher_command(system: str, folder: Path, restarts: int) -> list[str]:
    """The command line up to the script, all with the same meaning."""
    common = ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    if system == "keepstep":
        return [
            sys.executable,
            "-m",
            "keepstep.cli.main",
            "run",
            "--standalone",
            *common,
            "--run-dir",
            str(folder / "run"),
        ]
    if system == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *common]
    return [FT_LAUNCHER, "--standalone", "--ignore-missing-fault-tol-cfg", *common]


def kill_job(system: str, kind: str, faults: int, folder: Path) -> dict[str, list[float]]:
    """One job with `faults` SIGKILLs; seconds from each to the next cycle's first line and first completed step."""
    times = folder / "times"
    times.mkdir(parents=True)
    script = [str(SCRIPTS / "kill.py"), "--kind", kind, "--times", str(times), "--faults", str(faults)]
    script += ["--cycle-seconds", str(CYCLE_SECONDS)]
    code = launch(
        launcher_command(system, folder, faults + 1) + script, folder, {} if system == "keepstep" else PEER_ENV
    )
    found: dict[str, list[float]] = {"respawn": [], "first step": []}
    for cycle in range(faults):
        starts = [times / f"start-c{cycle + 1}-r{rank}" for rank in (0, 1)]
        fault = times / f"fault-c{cycle}"
        if not fault.exists() or not all(path.exists() for path in starts):
            break
        fault_ns = int(fault.read_text())
        pairs = [tuple(int(word) for word in path.read_text().split()) for path in starts]
        found["respawn"].append((max(pair[0] for pair in pairs) - fault_ns) / 1e9)
        found["first step"].append((max(pair[1] for pair in pairs) - fault_ns) / 1e9)
    if code != 0 or len(found["respawn"]) < faults:
        say(f"{system} {kind}: exit {code}, {len(found['respawn'])} of {faults} restarts; see {folder / 'output.log'}")
    return found


def stall_job(stalls: list[str], folder: Path) -> dict[str, list[float]]:
    """One keepstep job whose ranks stall one after the other; seconds by what was measured."""
    times = folder / "times"
    times.mkdir(parents=True)
    command = launcher_command("keepstep", folder, len(stalls) + 1)
    command += ["--hang-timeout", f"{HANG_TIMEOUT_S:g}", str(SCRIPTS / "stall.py"), "--times", str(times)]
    command += ["--stalls", ",".join(stalls), "--cycle-seconds", str(CYCLE_SECONDS)]
    code = launch(command, folder, {})
    found: dict[str, list[float]] = defaultdict(list)
    faults = {m.cycle: m.attrs for m in read_marks(folder / "run") if m.kind == "fault"}
    for cycle, kind in enumerate(stalls):
        starts = [times / f"start-c{cycle + 1}-r{rank}" for rank in (0, 1)]
        if cycle not in faults or not all(path.exists() for path in starts):
            break
        # Both are UTC: the journal's derived from CLOCK_BOOTTIME, the script's read directly; they differ by slewing only.
        detected_ns = int(faults[cycle]["detected_ns"])
        stalled_ns = int((times / f"stall-c{cycle}").read_text())
        found[f"{kind} overshoot"].append((detected_ns - stalled_ns) / 1e9 - HANG_TIMEOUT_S)
        found["detect to respawn"].append((max(int(p.read_text()) for p in starts) - detected_ns) / 1e9)
    done = len(found["detect to respawn"])
    if code != 0 or done < len(stalls):
        say(f"stalls: exit {code}, {done} of {len(stalls)} restarts; see {folder / 'output.log'}")
    return found


def ft_launcher_version() -> str | None:
    """Version of NVRx in the environment whose `ft_launcher` is on PATH, which need not be this one."""
    found = shutil.which(FT_LAUNCHER)
    if found is None:
        return None
    interpreter = Path(found).read_text(errors="replace").splitlines()[0].removeprefix("#!").strip()
    code = "import importlib.metadata as m; print(m.version('nvidia-resiliency-ext'))"
    asked = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def measure_kills(folder: Path, systems: list[str], *, rounds: int, faults: int, args: argparse.Namespace) -> Kills:
    """One job of each in turn, then again in another order: a slow moment of the machine hits all."""
    chance = random.Random(args.seed)
    found: Kills = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        for kind in ("bare", "ddp"):
            for system in chance.sample(systems, len(systems)):
                if system == FT_LAUNCHER and not args.full and (kind, number) != ("ddp", 0):
                    continue  # the slowest of the three would take the default run over its three minutes
                begin = time.monotonic()
                job = kill_job(system, kind, faults, folder / f"{number}-{kind}-{system}")
                for name, values in job.items():
                    found[kind, system][name] += values
                shown = ", ".join(f"{value:.2f}" for value in job["first step"])
                took = time.monotonic() - begin
                say(f"round {number + 1}, {kind} script, {system}: first step after {shown} s (job: {took:.0f} s)")
    return found


def ratio_target(name: str, kills: Kills, kind: str, goal: float) -> Target:
    """How many times faster than torchrun, by medians."""
    ours, theirs = (kills[kind, system]["first step"] for system in ("keepstep", "torchrun"))
    if not ours or not theirs:
        return Target(name, None, "ratio", ">=", goal, "one of the two did not come back after any fault")
    return Target(name, statistics.median(theirs) / statistics.median(ours), "ratio", ">=", goal)


def median_target(name: str, values: list[float], goal: float) -> Target:
    """A median that must not be above `goal` seconds."""
    note = None if values else "no stall was followed by another cycle"
    return Target(name, statistics.median(values) if values else None, "s", "<=", goal, note)


def results_of(kills: Kills, stalls: dict[str, list[float]], systems: list[str]) -> list[Result]:
    results = []
    for kind in ("bare", "ddp"):
        for name in ("respawn", "first step"):
            for system in systems:
                label = f"SIGKILL to {'last first line' if name == 'respawn' else 'first step of all'}, {kind} script"
                values = kills[kind, system][name]
                note = None if values else "did not come back"
                if system == FT_LAUNCHER:
                    note = f"NVRx {ft_launcher_version()}" if values else "only with --full"
                results.append(Result(label, system, "s", values, note=note))
    for name, values in sorted(stalls.items()):
        results.append(Result(f"{name}, limit {HANG_TIMEOUT_S:g} s", "keepstep", "s", values))
    note = "not measured: without a limit of its own it waits for the process group's (gloo: 30 minutes)"
    results.append(Result("hang and SIGSTOP", "torchrun", "s", note=note))
    if FT_LAUNCHER not in systems:
        note = "not installed here (no ft_launcher on PATH; pip install nvidia-resiliency-ext)"
        results.append(Result("SIGKILL to first step of all", FT_LAUNCHER, "s", note=note))
    return results


def run_all(args: argparse.Namespace, folder: Path) -> tuple[list[Result], list[Target]]:
    rounds, faults = (3, 5) if args.full else (2, 3)
    systems = ["torchrun", "keepstep"]
    if shutil.which(FT_LAUNCHER):
        systems.append(FT_LAUNCHER)
    kills = measure_kills(folder, systems, rounds=rounds, faults=faults, args=args)
    stalls = stall_job(["sleep", "stop"] * (5 if args.full else 3), folder / "stalls")
    later = "recovery inside the process is not built yet"
    targets = [
        ratio_target("kill_ratio_vs_torchrun", kills, "ddp", 12.0),
        ratio_target("kill_ratio_bare", kills, "bare", 8.0),
        median_target("hang_overshoot_s", stalls["sleep overshoot"], 0.2),
        median_target("stop_overshoot_s", stalls["stop overshoot"], 0.2),
        median_target("detect_to_respawn_s", stalls["detect to respawn"], 0.3),
        Target("in_process_kill_s", None, "s", "<=", 0.5, later),
        Target("in_process_lost_steps", None, "steps", "==", 0, later),
    ]
    return results_of(kills, stalls, systems), targets


def main() -> None:
    args = argument_parser("Time from a fault to the first step after it.").parse_args()
    with work_folder(args.keep) as folder:
        results, targets = run_all(args, folder)
    emit("restart", results, targets, output=args.output, packages=["keepstep", "torch"])


if __name__ == "__main__":
    main()
