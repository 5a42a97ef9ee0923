"""The all-reduce test over a job's nodes, with real gloo ranks, one of them really slow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.health.gangcheck import (
    baseline_path,
    load_baseline,
    members_of,
    nccl_tests_gb_per_s,
    node_of,
    parse_args,
)
from keepstep.records.errors import ConfigError

ARGS = ("--sizes-mb", "0.25,1", "--iterations", "12", "--tolerance", "0.6")
# Ranks are forked after torch was imported once, as the zygote does it. Each is a node of its own.
RANKS = """
import os, sys, torch, torch.distributed
from keepstep.launcher.health.gangcheck import main
world, argv = int(sys.argv[1]), sys.argv[2:]
pids = []
for rank in range(world):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", GROUP_RANK=str(rank), WORLD_SIZE=str(world))
        torch.set_num_threads(1)
        code = 1
        try:
            code = main(argv)
        finally:
            os._exit(code)
    pids.append(pid)
print("ranks", *pids, flush=True)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def mostly_stopped(pid: int) -> Iterator[None]:
    """The process runs 4 ms out of 40, by SIGSTOP and SIGCONT: as slow as a host whose CPU is taken away from it."""
    over = threading.Event()

    def cycle() -> None:
        while not over.is_set():
            try:
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.036)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            time.sleep(0.004)

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def gang(folder: Path, world: int, *more: str, slow: int | None = None) -> dict[str, Any]:
    """Run the test with `world` nodes of one rank; returns the result that rank 0 wrote."""
    result = folder / "gang.json"
    result.unlink(missing_ok=True)
    argv = [*ARGS, "--result", str(result), "--baselines", str(folder / "baselines"), *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANKS), str(world), *argv], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        pids = [int(p) for p in process.stdout.readline().split()[1:]]
        assert len(pids) == world
        try:
            if slow is None:
                process.stdout.read()
            else:
                with mostly_stopped(pids[slow]):
                    process.stdout.read()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
    record: dict[str, Any] = json.loads(result.read_bytes())
    return record


def test_the_slow_node_is_named_and_the_others_are_fine(tmp_path: Path) -> None:
    first = gang(tmp_path, 4, "--save-baseline")
    assert (first["schema"], first["ok"], first["baseline_gb_per_s"]) == ("keepstep.gang_check/1", None, None)
    assert (first["backend"], first["ranks"], len(first["nodes"])) == ("gloo", 4, 4)
    assert [s["size_bytes"] for s in first["sizes"]] == [1 << 18, 1 << 20]
    assert first["bandwidth_gb_per_s"] == first["sizes"][-1]["bus_gb_per_s"] > 0

    # Bandwidth is measured on a machine that others use too: what slows all ranks for a moment is nobody's fault.
    for _ in range(3):
        second = gang(tmp_path, 4, slow=2)
        if len(second["suspects"]) < 4:
            break
    assert second["baseline_gb_per_s"] == first["bandwidth_gb_per_s"]
    assert second["ok"] is False
    assert second["suspects"] == [second["nodes"][2]]
    assert second["without_suspects_gb_per_s"] > 2 * second["bandwidth_gb_per_s"]
    assert all(len(part["members"]) >= 2 for part in second["parts"])


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path: Path) -> None:
    result = gang(tmp_path, 2)
    for size in result["sizes"]:
        # 2 (n-1)/n is 1 for two ranks.
        assert size["bus_gb_per_s"] == pytest.approx(size["size_bytes"] / size["time_s"] / 1e9)


class TestUnits:
    def test_nodes_with_their_ranks_or_the_ranks_of_the_only_node(self) -> None:
        assert [(m.name, m.ranks) for m in members_of(["a", "a", "b", "b"])] == [("a", [0, 1]), ("b", [2, 3])]
        assert [(m.name, m.ranks) for m in members_of(["a", "a"])] == [("rank 0", [0]), ("rank 1", [1])]

    def test_a_node_is_called_as_in_the_cycle_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        record = tmp_path / "cycle.json"
        record.write_text(json.dumps({"ranks": [{"rank": 0, "node": "x"}, {"rank": 1, "node": "y"}]}))
        monkeypatch.setenv("KEEPSTEP_CYCLE_INFO", str(record))
        monkeypatch.setenv("GROUP_RANK", "3")
        assert (node_of(0), node_of(1)) == ("x", "y")
        assert node_of(2).endswith("#3")
        monkeypatch.delenv("KEEPSTEP_CYCLE_INFO")
        assert node_of(1).endswith("#3")


class TestBaselines:
    def test_none_yet(self, tmp_path: Path) -> None:
        assert load_baseline(tmp_path, "H100, 4 nodes x 8 ranks, nccl") is None

    def test_each_kind_of_node_has_its_own(self, tmp_path: Path) -> None:
        keys = ["H100, 4 nodes x 8 ranks, nccl", "H100. 4 nodes x 8 ranks, nccl", "H100, 8 nodes x 8 ranks, nccl"]
        assert len({baseline_path(tmp_path, k) for k in keys}) == 3

    def test_a_file_that_is_none_is_named(self, tmp_path: Path) -> None:
        path = baseline_path(tmp_path, "k")
        path.write_text("{}")
        with pytest.raises(ConfigError, match=path.name):
            load_baseline(tmp_path, "k")


@pytest.mark.parametrize("argv", [["--sizes-mb", "a"], ["--sizes-mb", ""], ["--tolerance", "1"], ["--iterations", "0"]])
def test_arguments_that_make_no_sense_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0]):
        parse_args(argv)


class TestNcclTests:
    """With a stand-in for all_reduce_perf: there is no GPU here."""

    OUTPUT = "#  size  count\n  268435456  67108864  float  sum  -1  1234  217.5  380.6\n# Avg bus bandwidth    : 380.612\n#\n"

    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
        tool = folder / "all_reduce_perf"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def test_average_bus_bandwidth_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out").write_text(self.OUTPUT)
        self.install(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args; cat {tmp_path}/out')
        assert nccl_tests_gb_per_s(8) == 380.612
        assert "-g 8" in (tmp_path / "args").read_text()

    def test_a_failed_run_gives_no_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out").write_text(self.OUTPUT)
        self.install(tmp_path, monkeypatch, f"cat {tmp_path}/out; exit 3")
        assert nccl_tests_gb_per_s(8) is None

    def test_it_may_be_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert nccl_tests_gb_per_s(8) is None
