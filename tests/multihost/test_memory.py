"""Memory checkpoints over real hosts: a node is lost and its spare gets its ranks' bytes from a peer's memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.harness import Launch
from tests.launcher.memory_script import SCRIPT
from tests.launcher.test_memory_runs import memory_of
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import Net, records, seats, wait_cycle, wait_record

pytestmark = pytest.mark.slow


def start(net: Net, *flags: str, **env: Any) -> dict[str, Launch]:
    (net.folder / "script.py").write_text(SCRIPT)
    return {h.name: h.launch("--nnodes", "2", "--spares", "1", *flags, **env) for h in net.hosts}


def copied(net: Net) -> dict[str, object]:
    """Wait until all of the checkpoint is in two memories."""
    record = wait_record(net.run_dir, "mark", lambda r: r["mark"]["kind"] == "tier_reached")
    attrs: dict[str, object] = record["mark"]["attrs"]
    return attrs


def open_gate(net: Net, cycle: int) -> None:
    Path(f"{net.gate}.{cycle}").touch()


def lose_one(net: Net) -> tuple[str, str]:
    """Kill the host of the node that does not lead; returns it and the spare."""
    before = wait_cycle(net.run_dir, 0)
    (spare,) = before["spares"]
    victim = next(h for h in net.hosts if h.name in seats(before) and h.name != "h1")
    victim.kill()
    return victim.name, spare


@pytest.mark.parametrize("tls", [True, False])
def test_a_spare_goes_on_with_the_bytes_that_a_peer_copied(tls: bool, make_net: MakeNet) -> None:
    net = make_net(3)
    launches = start(net, *([] if tls else ["--no-tls"]), IMAGE_BYTES="40000000")
    attrs = copied(net)
    assert (attrs["tier"], attrs["files"], attrs["step"]) == ("peer", 3, 5)
    victim, spare = lose_one(net)
    after = wait_cycle(net.run_dir, 1)
    moved = seats(after).index(spare)
    launches[spare].wait_line(rf"rank {moved} cycle 1 sees \[\(True, 3\)\]")
    launches[spare].wait_line(rf"rank {moved} cycle 1 fetched peer equal True")
    launches["h1"].wait_line(rf"rank {1 - moved} cycle 1 fetched shm equal True")
    open_gate(net, 1)
    assert [launches[n].finish() for n in launches if n != victim] == [0, 0]
    cycle = launches["h1"].cycles[1]
    assert (cycle.restored_from, cycle.recovery, cycle.restored_step) == ("peer", "spare", 5)
    assert launches["h1"].verdict["last_committed_step"] is None
    launches["h1"].check_partition()


def test_a_damaged_copy_is_refused_and_listed_no_more(make_net: MakeNet) -> None:
    net = make_net(3)
    launches = start(net, LOOK_AGAIN="1")
    copied(net)
    pids = {r["node"]: r["pid"] for r in records(net.run_dir, "node")}
    for path in Path(f"/proc/{pids['h1']}/fd").iterdir():
        if "/memfd:keepstep-copy" in str(path.readlink()):
            with path.open("r+b") as memory:
                memory.seek(max(0, os.fstat(memory.fileno()).st_size - 1))
                byte = memory.read(1)
                memory.seek(-1, os.SEEK_CUR)
                memory.write(bytes([byte[0] ^ 0x10]))
    victim, spare = lose_one(net)
    after = wait_cycle(net.run_dir, 1)
    moved = seats(after).index(spare)
    launches[spare].wait_line(rf"rank {moved} cycle 1 refused: .*node h1: .*fingerprint xxh3_128-16m:")
    launches["h1"].wait_line("is damaged: not offered any more")
    open_gate(net, 1)
    # Its own image, which rank 0 kept itself, is as good as before; the other is in no list any more.
    launches["h1"].wait_line(rf"rank {1 - moved} cycle 1 fetched shm equal True", count=2)
    launches[spare].wait_line(rf"rank {moved} cycle 1 refused: .*(in the memory of no node|no longer held here)")
    assert [launches[n].finish() for n in launches if n != victim] == [0, 0]
    assert launches["h1"].cycles[1].restored_from == "none"


def test_a_coordinator_that_was_killed_still_knows(make_net: MakeNet) -> None:
    net = make_net(2)
    (net.folder / "script.py").write_text(SCRIPT)
    launches = {h.name: h.launch("--nnodes", "2", LOOK_AGAIN="1") for h in net.hosts}
    copied(net)
    opened = wait_record(net.run_dir, "open")
    os.kill(opened["pid"], signal.SIGKILL)
    wait_record(net.run_dir, "open", count=2)
    open_gate(net, 0)
    codes = {name: launch.finish() for name, launch in launches.items()}
    assert codes == {"h1": 0, "h2": 0}
    said = "\n".join(launch.output for launch in launches.values())
    for rank in (0, 1):
        assert f"rank {rank} cycle 0 sees [(True, 3)]" in said
        assert f"rank {rank} cycle 0 fetched shm equal True" in said
    reached = records(net.run_dir, "mark", lambda r: r["mark"]["kind"] == "tier_reached")
    assert len(reached) == 1, "said again by the second coordinator"


def test_launchers_of_one_host_share_without_a_network(tmp_path: Path) -> None:
    """Two launchers without an endpoint: Unix sockets, and each copies the other's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    shared = ("--nnodes", "2", "--rdzv-id", "job-unix", "script.py")
    launches = [
        Launch(tmp_path, None, "--node-name", name, *shared, GATE=str(tmp_path / "gate"), OMP_NUM_THREADS="1")
        for name in ("n1", "n2")
    ]
    try:
        wait_record(tmp_path / "run", "mark", lambda r: r["mark"]["kind"] == "tier_reached")
        held = [memory_of(r["pid"]) for r in records(tmp_path / "run", "node")]
        assert all("keepstep-copy" in names for names in held)
        Path(f"{tmp_path}/gate.0").touch()
        assert [launch.finish() for launch in launches] == [0, 0]
    finally:
        for launch in launches:
            launch.process.kill()
            launch.process.wait()
            Launch.started.remove(launch)
