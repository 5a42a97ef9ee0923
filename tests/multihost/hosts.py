"""Hosts for tests: network namespaces joined by veth pairs and a bridge, each with an address, a name and a boot id of its own.

What they share is the kernel, its clock and its pids, and the file system. A link is cut at the bridge's end, as a switch port
that goes down: nothing comes through any more and no connection is closed. `tc netem` is not needed: a slow link is a relay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.launcher.coordination.journal import read_records
from tests.launcher.harness import LIMIT_S, Launch

LEASE_S = 2.0
LONG_LEASE_S = 15.0
"""For a test in which a lease is used up in part and must not run out: what a loaded machine adds to each time fits in too."""
PORT = 29400
RELAY = "10.77.0.100"
POLL_S = 0.05
LINK = "eth0"

SCRIPT = """
import hashlib, os, pathlib, time
import torch, torch.distributed as dist
import keepstep.trainer as ks

dist.init_process_group("gloo")
run = ks.init()
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optim = torch.optim.AdamW(model.parameters())
ckpt = ks.Checkpointer(os.environ["ROOT"], state={"model": model, "optim": optim}, every_steps=5)
step = ckpt.restore()
print(f"restored {step} rank {rank} pid {os.getpid()}", flush=True)
gate = pathlib.Path(os.environ["GATE"])
while step < TOTAL:
    while step == TOTAL - 2 and not gate.exists():
        time.sleep(0.05)
    with run.step(step):
        optim.zero_grad()
        loss = model(torch.full((2, 8), step + rank / 7.0)).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        time.sleep(0.03)
    step += 1
    print("completed", step, flush=True)
    ckpt.maybe_save(step)
ckpt.close()
run.finish()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("end", step, hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
"""
"""Every rank has data of its own, so that a rank that ran twice or not at all shows in the weights. Before its last two steps it
waits for the file GATE: a test opens it when all that it wanted to happen has happened."""

TOTAL_STEPS = 30
GATED_STEP = TOTAL_STEPS - 2
"""Steps that are completed when the script comes to its gate."""

_numbers = itertools.count()


def script(total: int = TOTAL_STEPS) -> str:
    """The training script, `total` steps long, a checkpoint every five."""
    return SCRIPT.replace("TOTAL", str(total))


def why_not() -> str | None:
    """Why hosts cannot be made here, None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command {tool!r}"
    name = f"ks{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    try:
        link = ["ip", "-n", name, "link", "add", "va", "type", "veth", "peer", "name", "vb"]
        bridge = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
        for command in (link, bridge):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                return f"{' '.join(command[3:])}: {result.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Host:
    """One host: hK at 10.77.0.K."""

    def __init__(self, net: Net, number: int) -> None:
        self.net = net
        self.name = f"h{number}"
        self.address = f"10.77.0.{number}"
        self.namespace = f"{net.prefix}h{number}"
        self.own = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        """This host's own files: what would be in its /run and on its local disk."""
        self._boot = self.own / "boot_id"
        self._boot.write_text(f"{uuid.uuid4()}\n")
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        switch, port = net.switch, f"p{number}"
        _ip("-n", switch, "link", "add", "name", port, "type", "veth", "peer", "name", LINK, "netns", self.namespace)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", LINK)
        _ip("-n", self.namespace, "link", "set", LINK, "up")
        self._port = port

    @property
    def prefix(self) -> list[str]:
        """Command that execs another one on this host. /sys is the namespace's, the boot id the host's."""
        setup = f'hostname {self.name} && mount --bind {self._boot} /proc/sys/kernel/random/boot_id && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", setup, "sh"]

    def launch(
        self,
        *flags: str,
        run_dir: Path | None = None,
        node: str | None = None,
        verb: str = "run",
        token: bool = True,
        **env: str,
    ) -> Launch:
        """Start `keepstep run script.py` here. `run_dir`: default is the one all hosts share. `token`: give it the token file."""
        net = self.net
        more = ["--rdzv-id", net.run_id]
        if not any(f.startswith("--rdzv-endpoint") for f in flags):
            more += ["--rdzv-endpoint", net.endpoints]
        if token:
            more += ["--token-file", str(net.token_file)]
        if not any(f.startswith("--rdzv-conf") for f in flags):
            more += ["--rdzv-conf", f"lease={LEASE_S:g}"]
        if verb == "run":
            more += ["--node-name", node or self.name]
        environment: dict[str, Any] = {
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(self.own),
            "GATE": str(net.gate),
            **env,
        }
        last = ["script.py"] if verb == "run" else []
        return Launch(
            net.folder, None, *more, *flags, *last, prefix=self.prefix, verb=verb, run_dir=run_dir, **environment
        )

    def pids(self) -> list[int]:
        """All processes of this host."""
        return [int(p) for p in _ip("netns", "pids", self.namespace).split()]

    def cut(self) -> None:
        """Cut its link: nothing gets through, no connection is closed."""
        _ip("-n", self.net.switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Make its link whole again."""
        _ip("-n", self.net.switch, "link", "set", self._port, "up")

    def kill(self) -> None:
        """The loss of power: everything that runs here is gone, and its network first, so that nobody hears of it."""
        self.cut()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Net:
    """Hosts on one switch, and what is the same for all launchers of a run."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.prefix = f"ks{os.getpid()}-{next(_numbers)}-"
        self.switch = f"{self.prefix}sw"
        self.run_id = f"job-{secrets.token_hex(4)}"
        self.token = secrets.token_urlsafe(32)
        self.token_file = folder / "job.token"
        self.token_file.write_text(self.token)
        self.token_file.chmod(0o600)
        self.gate = folder / "gate"
        self.run_dir = folder / "run"
        self.hosts: list[Host] = []
        self.launches: list[Launch] = []
        self._relays: list[subprocess.Popen[bytes]] = []
        (folder / "script.py").write_text(script())
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "set", "lo", "up")
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        _ip("-n", self.switch, "addr", "add", f"{RELAY}/24", "dev", "br0")
        for number in range(1, count + 1):
            self.hosts.append(Host(self, number))
        self.endpoints = f"{self.hosts[0].address}:{PORT}"

    def open_gate(self) -> None:
        """Let the job come to its end."""
        self.gate.touch()

    def relay(self, delay_s: float) -> str:
        """A slow way to the first host's coordinator; returns the endpoint. A process in the switch delays what it forwards."""
        command = [sys.executable, "-m", "tests.multihost.relay", RELAY, str(PORT), self.hosts[0].address, str(delay_s)]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *command], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
        )
        self._relays.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        relay.stdout.close()
        return f"{RELAY}:{PORT}"

    def close(self) -> None:
        """End everything that runs in the namespaces and remove them."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for host in self.hosts:
            with contextlib.suppress(AssertionError):
                host.kill()
        for name in [self.switch, *(h.namespace for h in self.hosts)]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for host in self.hosts:
            shutil.rmtree(host.own, ignore_errors=True)


def remove_stale() -> None:
    """Namespaces of test processes that were killed before they could remove them."""
    for line in _ip("netns", "list").splitlines():
        found = re.match(r"ks(\d+)-", line)
        if found is None or Path(f"/proc/{found[1]}").exists():
            continue
        name = line.split()[0]
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def network(folder: Path, count: int) -> Iterator[Net]:
    """`count` hosts, removed again whatever happens."""
    net = Net(folder, count)
    try:
        yield net
    finally:
        net.close()


# ---- what happened


class Death:
    """When a process was seen dead (UTC ns), noticed by a thread of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._at_ns = 0
        self._fd = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.poll()
        self._at_ns = time.time_ns()
        os.close(self._fd)

    def at_ns(self) -> int:
        """Wait for it."""
        self._thread.join(LIMIT_S)
        assert self._at_ns, f"process {self.pid} still runs"
        return self._at_ns


def wait_record(
    run_dir: Path, kind: str, condition: Callable[[dict[str, Any]], bool] = lambda _: True, count: int = 1
) -> dict[str, Any]:
    """Wait until the journal has `count` records of a kind that meet the condition; returns the last of these."""
    deadline = time.monotonic() + LIMIT_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = records(run_dir, kind, condition)
        if len(found) >= count:
            return found[count - 1]
        if all(launch.process.poll() is not None for launch in Launch.started):
            break
        time.sleep(POLL_S)
    tail = "\n".join(str(r)[:300] for r in read_records(run_dir)[-12:]) if (run_dir / "journal").exists() else "none"
    said = "\n".join(f"---- {launch.process.args!r}\n{launch.output}" for launch in Launch.started)
    raise AssertionError(f"{len(found)} of {count} {kind!r} records; the journal's end:\n{tail}\n{said}")


def records(
    run_dir: Path, kind: str, condition: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Records of a kind in the journal, oldest first."""
    return [r for r in read_records(run_dir) if r["type"] == kind and condition(r)]


def wait_cycle(run_dir: Path, number: int) -> dict[str, Any]:
    """Wait until all ranks of a cycle were started; returns its record."""
    cycle = wait_record(run_dir, "cycle", lambda r: r["cycle"] == number)
    for node, _, _ in cycle["layout"]:
        wait_record(run_dir, "started", lambda r, node=node: (r["cycle"], r["node"]) == (number, node))  # type: ignore[misc]
    return cycle


def seats(cycle: dict[str, Any]) -> list[str]:
    """Nodes of a cycle in rank order."""
    return [node for node, _, _ in cycle["layout"]]


def pids_of(run_dir: Path, cycle: int, node: str) -> list[int]:
    """pids of a node's ranks in a cycle."""
    started = wait_record(run_dir, "started", lambda r: (r["cycle"], r["node"]) == (cycle, node))
    return [rank["pid"] for rank in started["ranks"]]


def mark_ns(run_dir: Path, kind: str, cycle: int) -> int:
    """Time of the first mark of a kind in a cycle."""
    found = wait_record(run_dir, "mark", lambda r: (r["mark"]["kind"], r["mark"]["cycle"]) == (kind, cycle))
    return int(found["mark"]["t_ns"])


def ends(*launches: Launch) -> set[str]:
    """Digests of the final weights that ranks of these launchers printed, "STEP SHA256" each."""
    return {
        f"{m[1]} {m[2]}"
        for launch in launches
        for m in re.finditer(r"^.*\bend (\d+) ([0-9a-f]{64})$", launch.output, re.M)
    }


def check_success(launches: list[Launch], reference: str, printed_by: int) -> None:
    """All exit 0; the last cycle's ranks, of `printed_by` launchers, have the weights of the uninterrupted run; time adds up."""
    codes = [launch.finish() for launch in launches]
    told = "\n".join(f"---- {n}\n{launch.output}" for n, launch in enumerate(launches, 1))
    assert codes == [0] * len(launches), f"exit codes {codes}\n{told}"
    assert ends(*launches) == {reference}, told
    assert sum(bool(ends(launch)) for launch in launches) == printed_by, told
    launches[0].check_partition()
    assert launches[0].verdict["outcome"] == "succeeded"


def files_with(folder: Path, secret: bytes) -> list[Path]:
    """Regular files below `folder` that contain `secret`."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and secret in path.read_bytes():
                found.append(path)
    return found
