"""Runs over several hosts in which nothing breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.harness import command_line
from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import check_success, files_with, records, seats, wait_cycle


def _own_folders(count: int, folder: Path) -> list[Path]:
    return [folder / f"run-h{k}" for k in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "shared"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, False, marks=pytest.mark.slow),
     pytest.param(4, True, marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.slow
def test_run_over_hosts(
    count: int, shared: bool, make_net: MakeNet, reference: Callable[[int], str], tmp_path: Path
) -> None:
    net = make_net(count)
    net.open_gate()
    folders = [net.run_dir] * count if shared else _own_folders(count, tmp_path)
    flags = ["--nnodes", str(count)]
    launches = [h.launch(*flags, run_dir=f) for h, f in zip(net.hosts, folders, strict=True)]
    check_success(launches, reference(count), printed_by=count)
    (cycle,) = launches[0].cycles
    assert sorted(cycle.active_nodes) == [h.name for h in net.hosts]
    assert sorted(place.host for place in cycle.ranks) == [h.name for h in net.hosts]


def test_the_token_is_seen_nowhere(make_net: MakeNet, reference: Callable[[int], str], tmp_path: Path) -> None:
    """Not in a command line, a rank's environment, or any file of the run but the token file itself."""
    net = make_net(2)
    # One gets it from a file, the other from the variable, which must be gone at once.
    first = net.hosts[0].launch("--nnodes", "2")
    second = net.hosts[1].launch("--nnodes", "2", token=False, KEEPSTEP_JOB_TOKEN=net.token)
    wait_cycle(net.run_dir, 0)
    first.wait_line(r"completed 20$")
    secret = net.token.encode()
    looked = 0
    for host in net.hosts:
        for pid in host.pids():
            looked += 1
            line = command_line(pid)
            assert secret not in line, line
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert secret not in environment, f"{line!r} has the token in its environment"
    assert looked >= 2 * 5, "two launchers with coordinator, zygote, guardian, store and rank"
    net.open_gate()
    check_success([first, second], reference(2), printed_by=2)
    assert files_with(tmp_path, secret) == [net.token_file]
    assert seats(records(net.run_dir, "cycle")[0]) == ["h1", "h2"]
    for launch in (first, second):
        assert net.token not in launch.output
