"""One real coordinator process and up to 2,048 simulated agents of 8 ranks: forming a cycle, heartbeats, a node's death, memory.

Agents join all at once, which real ones do not. Each run is a whole job of N nodes and one spare: cycle 0 forms, heartbeats come
once a second, one agent dies (its connection closes and its guardian says so), the others are stopped, the spare takes the
dead node's ranks in cycle 1, and a stop request ends the job. The clients share the machine with the coordinator.
Control of the same run: the same agents and heartbeats against a bare asyncio server that answers each line with a constant.
"""

from __future__ import annotations

import contextlib
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

from _common import Result, Target, argument_parser, emit, say
from _fleet import RANKS, Fleet, SimulatedAgent
from keepstep.launcher import messages as m
from keepstep.launcher.clock import boot_ns
from keepstep.launcher.config import RunConfig
from keepstep.launcher.guardian import tell
from keepstep.launcher.lead import make_folder_id
from keepstep.launcher.trust import fence_key, make_token
from keepstep.records.codec import from_json, to_pretty_json
from keepstep.records.cycle import VerdictFile

SIZES = (256, 512, 1024, 2048)
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
    journal_bytes: int = 0
    journal: bytearray = field(default_factory=bytearray)

    def cpu_s(self) -> float:
        """Processor time so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
    command += ["-m", "keepstep.launcher.coordinatormain", "--run-dir", str(run_dir)]
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
    cpu_s = coordinator.cpu_s()
    released = fleet.release()
    fleet.run_until(lambda: fleet.seen["start 0"] == nodes, LIMIT_S, "form a cycle")
    figures["joined"] = fleet.last_s["welcomed"] - released
    figures["formed"] = fleet.last_s["start 0"] - released
    assigned = b'"kind":"assigned"'
    fleet.run_until(lambda: coordinator.journaled(assigned), LIMIT_S, "journal `assigned`")
    figures["assigned on disk"] = time.monotonic() - released
    fleet.run_until(lambda: fleet.seen["answered attached 0"] == nodes * RANKS, LIMIT_S, "attach all ranks")
    fleet.run_until(lambda: fleet.seen["rank map"] == nodes or not fleet.map_bytes, LIMIT_S, "send all rank maps")
    figures["ranks attached"] = fleet.last_s["answered attached 0"] - released
    if fleet.map_bytes:
        figures["rank maps"] = fleet.last_s["rank map"] - released
    check_ranks(fleet, nodes, 0)
    figures["processor time to there"] = coordinator.cpu_s() - cpu_s


def check_ranks(fleet: Fleet, nodes: int, cycle: int) -> None:
    """Every rank of the cycle was given to one agent, once."""
    if sorted(fleet.first_ranks[cycle]) != list(range(0, nodes * RANKS, RANKS)):
        sys.exit(f"coordinator_scale: cycle {cycle}: ranks were given twice or not at all")


def beat(coordinator: Coordinator, fleet: Fleet, seconds: float, figures: dict[str, float]) -> None:
    """Nothing but heartbeats for a while."""
    del fleet.beat_rtts_s[:]
    cpu_s, began = coordinator.cpu_s(), time.monotonic()
    fleet.run_for(seconds)
    figures["core share of heartbeats"] = (coordinator.cpu_s() - cpu_s) / (time.monotonic() - began)
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
    fleet.run_until(lambda: fleet.seen["answered attached 1"] == nodes * RANKS, LIMIT_S, "attach all ranks again")
    check_ranks(fleet, nodes, 1)
    guardian.join()


def end(coordinator: Coordinator, fleet: Fleet, nodes: int, figures: dict[str, float]) -> None:
    """A stop request, until everybody has heard how the job ended; the verdict is checked."""
    asker: SimulatedAgent = next(agent for agent in fleet.agents if agent.welcomed)
    asked = time.monotonic()
    fleet.ask(asker, "stop request", lambda i: m.StopRequest(id=i, signum=15, node=asker.node))
    fleet.run_until(lambda: fleet.seen["end"] == nodes, LIMIT_S, "end the job")
    figures["stop request to end"] = fleet.last_s["end"] - asked
    figures["memory (RSS), most"] = coordinator.memory_mb("VmHWM")
    status = coordinator.process.wait(LIMIT_S)
    verdict = from_json((coordinator.run_dir / "verdict.json").read_bytes(), VerdictFile)
    if status != 0 or verdict.outcome not in ("preempted", "stopped"):
        sys.exit(f"coordinator_scale: ended with status {status}, {verdict.outcome}: {verdict.message}")


UNITS = {"core share of heartbeats": "cores", "memory (RSS)": "MB", "memory (RSS), most": "MB"}


def rows(jobs: list[Job]) -> list[Result]:
    """One row for each figure and size, with the values of all jobs of that size."""
    groups: dict[tuple[str, bool, int], list[float]] = {}
    for job in jobs:
        for name, value in job.figures.items():
            groups.setdefault((name, job.tls, job.nodes), []).append(value)
    order = list(dict.fromkeys(name for name, _, _ in groups))
    return [
        Result(f"{name}, {nodes} agents", "keepstep, TLS" if tls else "keepstep", UNITS.get(name, "s"), values)
        for (name, tls, nodes), values in sorted(groups.items(), key=lambda g: (g[0][1], order.index(g[0][0]), g[0][2]))
    ]


def main() -> None:
    parser = argument_parser("One coordinator and thousands of agents.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="AGENTS")
    parser.add_argument("--no-tls-run", action="store_true", help="leave the run with TLS out")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="run each coordinator under cProfile")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = [(nodes, False) for _ in range(3 if args.full else 1) for nodes in args.sizes]
    plan += [] if args.no_tls_run else [(max(args.sizes), True)]
    jobs = []
    with tempfile.TemporaryDirectory(prefix="keepstep-scale-") as scratch:
        folder = args.keep or Path(scratch)
        for number, (nodes, tls) in enumerate(plan):
            say(f"{number + 1}/{len(plan)}: {nodes} agents{', TLS' if tls else ''}")
            name = f"{number}-{nodes}{'-tls' if tls else ''}"
            profile = args.profile / f"{name}.prof" if args.profile else None
            beats_s = 10.0 if nodes == max(args.sizes) else 5.0
            jobs.append(run_job(folder / name, nodes, tls, beats_s, profile))
            say("  " + ", ".join(f"{k} {v:.3g}" for k, v in jobs[-1].figures.items()))
    results = rows(jobs)
    emit("coordinator_scale", results, targets(results), output=args.output, packages=["keepstep", "uvicorn", "websockets"])


def targets(results: list[Result]) -> list[Target]:
    """The figures of the largest size that are promised, without TLS."""
    median = {(r.name, r.system): r.median for r in results}

    def at_2048(name: str) -> float | None:
        return median.get((f"{name}, 2048 agents", "keepstep"))

    note = None if at_2048("formed") is not None else "not run at 2048 agents (--sizes)"
    return [
        Target("form_2048_s", at_2048("formed"), "s", "<=", 3.0, note),
        Target("heartbeat_core_share", at_2048("core share of heartbeats"), "cores", "<=", 0.35, note),
        Target("fanout_2048_s", at_2048("fan-out of a stop"), "s", "<=", 0.3, note),
    ]


if __name__ == "__main__":
    main()
