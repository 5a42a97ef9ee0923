"""The same save and restore over every back-end of the side channel, two ranks each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.checkpoint.support import FakeRun, Loader, report_of, run_ranks
from tests.trainer.test_channel import AgentServer

from keepstep.trainer.channel import AgentChannel, Channel, MemoryChannel, StoreChannel
from keepstep.trainer.checkpointer import Checkpointer

Make = Callable[[int, int], Channel]


@pytest.fixture(params=["memory", "store", "agent"])
def make_end(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes the channel of (cycle, rank)."""
    made: list[AgentChannel | StoreChannel] = []
    if request.param == "memory":
        cycles: dict[int, MemoryChannel] = {}
        lock = threading.Lock()

        def memory(cycle: int, rank: int) -> Channel:
            with lock:
                return cycles.setdefault(cycle, MemoryChannel())

        yield memory
    elif request.param == "store":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)

        def store(cycle: int, rank: int) -> Channel:
            client = TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=20), wait_for_workers=False)
            made.append(StoreChannel(client, f"keepstep/job7/{cycle}"))
            return made[-1]

        yield store
    else:
        with AgentServer(tmp_path / "agent.sock", cycle=0) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()

            def agent(cycle: int, rank: int) -> Channel:
                if server.cycle != cycle:
                    server.cycle, server.keys = cycle, MemoryChannel()
                made.append(AgentChannel(str(server.server_address), run_id="job7", cycle=cycle, rank=rank))
                return made[-1]

            yield agent
            server.shutdown()
            thread.join()
            server.memory.close()
    for channel in made:
        channel.close()


def test_save_and_restore(root: Path, make_end: Make) -> None:
    def life(cycle: int) -> list[object]:
        ends = [make_end(cycle, rank) for rank in range(2)]

        def body(rank: int) -> tuple[int, float, int]:
            run = FakeRun(ends[rank], rank=rank, world_size=2, cycle=cycle)
            loader = Loader(rank)
            ckpt = Checkpointer(root, {"w": torch.zeros(5000), "loader": loader}, run=run, timeout_s=20.0)
            step = ckpt.restore()
            before = float(ckpt.state["w"][0])
            for _ in range(3):
                step += 1
                ckpt.state["w"].fill_(float(step))
                loader.next()
                assert ckpt.save(step)
            ckpt.close()
            assert ckpt.last_committed_step == step
            return step, before, loader.position

        return run_ranks(2, body)

    assert life(0) == [(3, 0.0, 3)] * 2
    assert life(1) == [(6, 3.0, 6)] * 2
    folders = sorted(root.glob("job7-*"))
    assert len(folders) == 6
    assert all(report_of(folder).ok for folder in folders)


SCRIPT = """
import sys
import torch
import keepstep.trainer as ks

run = ks.init()
model = torch.nn.Linear(50, 50)
ckpt = ks.Checkpointer(sys.argv[1], {"model": model}, every_steps=2)
step = ckpt.restore()
begun = step
while step < begun + 4:
    with run.step(step):
        with torch.no_grad():
            model.weight.add_(1.0)
    step += 1
    ckpt.maybe_save(step)
ckpt.close()
run.finish()
sys.stdout.write(f"rank {run.rank}: {begun} to {ckpt.last_committed_step}\\n")
sys.stdout.flush()
"""


def launched(root: Path, script: Path, *launcher: str) -> list[str]:
    """What each rank of `script` said, in the order of ranks."""
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), str(root)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "KEEPSTEP_RUN_ID")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_plain_python_resumes_what_it_saved(root: Path, tmp_path: Path) -> None:
    assert launched(root, tmp_path / "train.py") == ["rank 0: 0 to 4"]
    assert launched(root, tmp_path / "train.py") == ["rank 0: 4 to 8"]
    assert all(report_of(folder).ok for folder in root.glob("*-step-*"))


@pytest.mark.slow
def test_torchrun_resumes_what_another_run_saved(root: Path, tmp_path: Path) -> None:
    """Two ranks under torchrun, on its store, before there is any process group."""
    channel = MemoryChannel()

    def save(rank: int) -> None:
        run = FakeRun(channel, rank=rank, world_size=2)
        ckpt = Checkpointer(root, {"model": torch.nn.Linear(50, 50)}, run=run)
        ckpt.restore()
        ckpt.save(4)
        ckpt.close()

    run_ranks(2, save)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert launched(root, tmp_path / "train.py", *launcher) == ["rank 0: 4 to 8", "rank 1: 4 to 8"]
    assert all(report_of(folder).ok for folder in root.glob("*-step-*"))


def test_importing_the_library_loads_neither_torch_nor_cryptography() -> None:
    script = (
        "import sys, keepstep.trainer.checkpointer, keepstep.trainer.channel, keepstep.checkpoint.restore.verify\n"
        "sys.exit(','.join({'torch', 'numpy', 'cryptography'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, ""), done.stderr
