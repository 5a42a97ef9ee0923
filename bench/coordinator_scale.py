"""One real coordinator process and up to 2,048 simulated agents of 8 ranks: forming a cycle, heartbeats, a node's death, memory.

Agents join all at once, which real ones do not. Each run is a whole job of N nodes and one spare: cycle 0 forms, heartbeats come
once a second, one agent dies (its connection closes and its guardian says so), the others are stopped, the spare takes the
dead node's ranks in cycle 1, and a stop request ends the job. The clients share the machine with the coordinator.
Control of the same run: as many connections and lines a second against a bare asyncio server that answers each with a constant.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import _bare
from _common import Result, Target, argument_parser, cpu_s, emit, say
from _fleet import RANKS, Fleet, SimulatedAgent
from keepstep.launcher import messages as m
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.lead import make_folder_id
from keepstep.launcher.node.guardian import tell
from keepstep.launcher.trust import fence_key, make_token
from keepstep.records.codec import from_json, to_pretty_json
from keepstep.records.cycle import VerdictFile

SIZES = [256, 512, 1024, 2048]
BEATS_S = 10.0
"""How long heartbeats are counted at the largest size; half as long at the others."""
LIMIT_S = 120.0
SETTLE_S = 1.5
"""Between the end of a start and the count of heartbeats: files of the cycle are written meanwhile."""


@dataclass
class Coordinator:
    """The process that is measured."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]
    run_dir: Path
    run_id: str
    token: bytes
    tls: bool
    journal: bytearray = field(default_factory=bytearray)

    def memory_mb(self, key: str) -> float:
        """A figure of /proc/PID/status: VmRSS now, VmHWM at most so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{key}:"))

    def journaled(self, what: bytes) -> bool:
        """Whether the journal on disk holds these bytes; reads on from where it was last looked at."""
        with (self.run_dir / "journal" / "000001.jsonl").open("rb") as file:
            file.seek(len(self.journal))
            self.journal += file.read()
        return what in self.journal


def start_coordinator(run_dir: Path, nodes: int, tls: bool, profile: Path | None) -> Coordinator:
    """The real process on a run folder of its own, with a token, listening on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    token, run_id = make_token().encode(), f"scale-{nodes}"
    for name in ("", "logs", "journal", "cycles"):
        (run_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    config = RunConfig(
        run_id=run_id,
        run_dir=str(run_dir),
        node="node-0000",
        script="train.py",
        nnodes=nodes,
        min_nodes=nodes,
        spares=1,
        nproc=RANKS,
        endpoints=[f"127.0.0.1:{address[1]}"],
        tls=tls,
    )
    (run_dir / "run.json").write_bytes(to_pretty_json(config))
    make_folder_id(run_dir)
    read_end, write_end = os.pipe()
    os.write(write_end, token)
    os.close(write_end)
    command = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else [])]
    command += ["-m", "keepstep.launcher.coordination.coordinatormain", "--run-dir", str(run_dir)]
    command += ["--socket", str(run_dir / "coordinator.sock"), "--listen", f"127.0.0.1:{address[1]}"]
    command += ["--started-ns", str(boot_ns()), "--launch", secrets.token_hex(8), "--token-fd", str(read_end)]
    with (run_dir / "logs" / "launcher.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[read_end])
    os.close(read_end)
    found = Coordinator(process, address, run_dir, run_id, token, tls)
    wait_listening(found)
    return found


def wait_listening(coordinator: Coordinator) -> None:
    """Until its Unix socket takes connections: the last thing that it opens."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and coordinator.process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(coordinator.run_dir / "coordinator.sock"))
            return
        time.sleep(0.02)
    sys.exit(f"coordinator_scale: the coordinator did not start; see {coordinator.run_dir}/logs/launcher.log")


@dataclass
class Job:
    """What one job of `nodes` nodes took, by the name of the row."""

    nodes: int
    tls: bool
    figures: dict[str, float]


def run_job(run_dir: Path, nodes: int, tls: bool, beats_s: float, profile: Path | None) -> Job:
    """A whole job; leaves the benchmark with a message when any part of it does not come to its end."""
    coordinator = start_coordinator(run_dir, nodes, tls, profile)
    fleet = Fleet(coordinator.address, coordinator.run_id, coordinator.token, nodes + 1, tls)
    figures: dict[str, float] = {}
    try:
        form(coordinator, fleet, nodes, figures)
        fleet.run_for(SETTLE_S)
        beat(coordinator, fleet, beats_s, figures)
        lose_one(coordinator, fleet, nodes, figures)
        end(coordinator, fleet, nodes, figures)
    finally:
        fleet.close()
        coordinator.process.kill()
        coordinator.process.wait()
    return Job(nodes, tls, figures)


def form(coordinator: Coordinator, fleet: Fleet, nodes: int, figures: dict[str, float]) -> None:
    """From the release of all agents until cycle 0 runs and every rank has said so."""
    used_s = cpu_s(coordinator.process.pid)
    released = fleet.release()
    fleet.run_until(lambda: fleet.seen["start 0"] == nodes, LIMIT_S, "form a cycle")
    figures["joined"] = fleet.last_s["welcomed"] - released
    figures["formed"] = fleet.last_s["start 0"] - released
    assigned = b'"kind":"assigned"'
    fleet.run_until(lambda: coordinator.journaled(assigned), LIMIT_S, "journal `assigned`")
    figures["assigned on disk"] = time.monotonic() - released
    fleet.run_until(lambda: fleet.seen["answered attached 0"] == nodes, LIMIT_S, "attach all ranks")
    fleet.run_until(lambda: fleet.seen["rank map"] == nodes or not fleet.map_bytes, LIMIT_S, "send all rank maps")
    figures["ranks attached"] = fleet.last_s["answered attached 0"] - released
    if fleet.map_bytes:
        figures["rank maps"] = fleet.last_s["rank map"] - released
    check_ranks(fleet, nodes, 0)
    figures["processor time to there"] = cpu_s(coordinator.process.pid) - used_s


def check_ranks(fleet: Fleet, nodes: int, cycle: int) -> None:
    """Every rank of the cycle was given to one agent, once."""
    if sorted(fleet.first_ranks[cycle]) != list(range(0, nodes * RANKS, RANKS)):
        sys.exit(f"coordinator_scale: cycle {cycle}: ranks were given twice or not at all")


def beat(coordinator: Coordinator, fleet: Fleet, seconds: float, figures: dict[str, float]) -> None:
    """Nothing but heartbeats for a while."""
    del fleet.beat_rtts_s[:]
    used_s, began = cpu_s(coordinator.process.pid), time.monotonic()
    fleet.run_for(seconds)
    figures["core share of heartbeats"] = (cpu_s(coordinator.process.pid) - used_s) / (time.monotonic() - began)
    answered = len(fleet.beat_rtts_s)
    if answered < 0.9 * seconds * len(fleet.agents):
        sys.exit(f"coordinator_scale: only {answered} heartbeats of {len(fleet.agents)} agents in {seconds:g} s")
    rtts_s = sorted(fleet.beat_rtts_s)
    figures["heartbeat answered, median"] = rtts_s[len(rtts_s) // 2]
    figures["heartbeat answered, slowest"] = rtts_s[-1]
    figures["memory (RSS)"] = coordinator.memory_mb("VmRSS")


def lose_one(coordinator: Coordinator, fleet: Fleet, nodes: int, figures: dict[str, float]) -> None:
    """One agent dies: from the close of its connection until every other knows, and until the spare runs in its place."""
    dead = next(agent for agent in fleet.agents if agent.cycle == 0)
    word = {
        "node": dead.node,
        "pid": dead.pid,
        "boot_id": dead.boot_id,
        "key": fence_key(coordinator.token, coordinator.run_id).hex(),
        "targets": ["{}:{}".format(*coordinator.address)],
        "tls": coordinator.tls,
    }
    guardian = threading.Thread(target=tell, args=(word,))
    died = time.monotonic()
    fleet.drop(dead)
    guardian.start()
    fleet.run_until(lambda: fleet.seen["stop 0"] == nodes - 1, LIMIT_S, "stop all others")
    figures["fan-out of a stop"] = fleet.last_s["stop 0"] - died
    fleet.run_until(lambda: fleet.seen["start 1"] == nodes, LIMIT_S, "start cycle 1")
    figures["stop to next start"] = fleet.last_s["start 1"] - fleet.last_s["stop 0"]
    fleet.run_until(lambda: fleet.seen["answered attached 1"] == nodes, LIMIT_S, "attach all ranks again")
    check_ranks(fleet, nodes, 1)
    guardian.join()


def end(coordinator: Coordinator, fleet: Fleet, nodes: int, figures: dict[str, float]) -> None:
    """A stop request, until everybody has heard how the job ended; the verdict is checked."""
    asker: SimulatedAgent = next(agent for agent in fleet.agents if agent.welcomed)
    asked = time.monotonic()
    fleet.ask(asker, "stop request", m.StopRequest(id=0, signum=15, node=asker.node))
    fleet.run_until(lambda: fleet.seen["end"] == nodes, LIMIT_S, "end the job")
    figures["stop request to end"] = fleet.last_s["end"] - asked
    figures["memory (RSS), most"] = coordinator.memory_mb("VmHWM")
    status = coordinator.process.wait(LIMIT_S)
    verdict = from_json((coordinator.run_dir / "verdict.json").read_bytes(), VerdictFile)
    if status != 0 or verdict.outcome not in ("preempted", "stopped"):
        sys.exit(f"coordinator_scale: ended with status {status}, {verdict.outcome}: {verdict.message}")


UNITS = {"core share of heartbeats": "cores", "memory (RSS)": "MB", "memory (RSS), most": "MB"}
NOTES = {
    "joined": "last Welcome since all agents were let go at once",
    "formed": "last StartCycle",
    "assigned on disk": "every node has started its ranks, journaled",
    "ranks attached": "a message of each node for its ranks, journaled and answered",
    "rank maps": "last agent has the map of all ranks",
    "processor time to there": "of the coordinator",
    "fan-out of a stop": "from an agent's death until the last other agent is told",
    "stop to next start": "every agent's word that its ranks are gone, and the spare's start in their place",
}


def rows(jobs: list[Job], control: dict[str, list[float]], nodes: int) -> list[Result]:
    """One row for each figure and size, with the values of all jobs of that size; the control's beside its counterpart."""
    groups: dict[tuple[str, bool, int], list[float]] = {}
    for job in jobs:
        for name, value in job.figures.items():
            groups.setdefault((name, job.tls, job.nodes), []).append(value)
    order = list(dict.fromkeys(name for name, _, _ in groups))
    found = []
    for name in order:
        for tls, at in sorted({(tls, at) for n, tls, at in groups if n == name}):
            system = "keepstep, TLS" if tls else "keepstep"
            values = groups[name, tls, at]
            found.append(Result(f"{name}, {at} agents", system, UNITS.get(name, "s"), values, NOTES.get(name)))
        if name in control:
            found.append(Result(f"{name}, {nodes} agents", "bare asyncio", UNITS.get(name, "s"), control[name]))
    return found


def log_rows(folder: Path, nodes: int) -> list[Result]:
    """The log funnel at the same size, where this keepstep has one (bench/log_funnel.py has more)."""
    if importlib.util.find_spec("keepstep.launcher.output.logserver") is None:
        note = "not measured: this keepstep has no keepstep.launcher.output.logserver"
        return [Result(f"log funnel on file, {nodes} agents", "keepstep", "MB/s", note=note)]
    import log_funnel

    folder.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(log_funnel.measure(folder, nodes, tls=False, windows=3, window_s=1.0))
    for path in folder.glob("logs/*.log"):
        path.unlink()  # gigabytes of one line; what they had to show is checked
    return list(log_funnel.rows("log funnel", nodes, found))


def targets(results: list[Result]) -> list[Target]:
    """The figures that are promised: 2,048 agents, without TLS."""
    median = {(r.name, r.system): r.median for r in results}

    def at_2048(name: str) -> float | None:
        return median.get((f"{name}, 2048 agents", "keepstep"))

    note = None if at_2048("formed") is not None else "not run at 2048 agents (--sizes)"
    return [
        Target("form_2048_s", at_2048("assigned on disk"), "s", "<=", 3.0, note),
        Target("heartbeat_core_share", at_2048("core share of heartbeats"), "cores", "<=", 0.35, note),
        Target("fanout_2048_s", at_2048("fan-out of a stop"), "s", "<=", 0.3, note),
    ]


def run_all(folder: Path, sizes: list[int], repeats: int, tls_too: bool, profile: Path | None) -> list[Result]:
    """All jobs, then the control and the log funnel at the largest size."""
    largest = max(sizes)
    # The promised figures are medians of three jobs at least.
    plan = [(nodes, False) for _ in range(repeats) for nodes in sizes] + [(largest, False)] * 2
    plan += [(largest, True)] * (repeats if tls_too else 0)
    jobs = []
    for number, (nodes, tls) in enumerate(plan):
        say(f"job {number + 1} of {len(plan)}: {nodes} agents{', TLS' if tls else ''}")
        name = f"{number}-{nodes}{'-tls' if tls else ''}"
        profiled = profile / f"{name}.prof" if profile else None
        jobs.append(run_job(folder / name, nodes, tls, BEATS_S if nodes == largest else BEATS_S / 2, profiled))
    say("control: bare asyncio server")
    control: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, value in _bare.measure(largest, BEATS_S / 2).items():
            control.setdefault(name, []).append(value)
    say("log funnel")
    return rows(jobs, control, largest) + log_rows(folder / "log-funnel", largest)


def main() -> None:
    parser = argument_parser("One coordinator and thousands of agents.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="AGENTS")
    parser.add_argument("--no-tls-run", action="store_true", help="leave the job with TLS out")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="run each coordinator under cProfile")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="keepstep-scale-") as scratch:
        repeats = 3 if args.full else 1
        results = run_all(args.keep or Path(scratch), args.sizes, repeats, not args.no_tls_run, args.profile)
    packages = ["keepstep", "uvicorn", "websockets", "msgspec"]
    emit("coordinator_scale", results, targets(results), output=args.output, packages=packages)


if __name__ == "__main__":
    main()
