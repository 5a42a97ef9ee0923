"""Who may not take part, and what it is told; the job does not notice."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable

import pytest

from tests.multihost.conftest import MakeNet
from tests.multihost.hosts import LEASE_S, check_success, pids_of, records, wait_cycle, wait_record

pytestmark = pytest.mark.slow

Reference = Callable[[int], str]
LOSSES = 3


def test_who_may_not_take_part(make_net: MakeNet, reference: Reference) -> None:
    net = make_net(4)
    *members, stranger = net.hosts
    shape = ("--nnodes", "2", "--spares", "1")
    launches = {h.name: h.launch(*shape) for h in members}
    cycle = wait_cycle(net.run_dir, 0)

    none = stranger.launch(*shape, token=False)
    other = net.folder / "other.token"
    other.write_text(secrets.token_urlsafe(32))
    other.chmod(0o600)
    wrong = stranger.launch(
        *shape, "--token-file", str(other), f"--rdzv-conf=lease={LEASE_S:g},join_timeout=3", token=False
    )
    namesake = stranger.launch(*shape, node="h2")
    another_run = stranger.launch(*shape, "--rdzv-id", "another-job", run_dir=net.folder / "another")
    assert none.finish() == 2
    assert "there is no job token" in none.output
    assert "--token-file" in none.output
    assert namesake.finish() == 1
    assert "node name 'h2' is taken by host h2" in namesake.output
    assert "--node-name" in namesake.output
    assert another_run.finish() == 1
    assert f"this is run {net.run_id!r}, not 'another-job'" in another_run.output
    assert wrong.finish() == 1
    assert "check that all hosts have the same token" in wrong.output
    assert net.token not in wrong.output + none.output

    # A spare whose launcher dies again and again.
    (spare,) = cycle["spares"]
    host = next(h for h in members if h.name == spare)
    for loss in range(1, LOSSES + 1):
        launches[spare].signal(signal.SIGKILL)
        wait_record(net.run_dir, "node_lost", lambda r: r["node"] == spare, count=loss)
        launches[spare] = host.launch(*shape)
        wait_record(net.run_dir, "node", lambda r: r["node"] == spare, count=loss + 1)
    launches[spare].wait_line("this node is left out of the job: flapping: lost 3 times")
    assert [r["node"] for r in records(net.run_dir, "excluded")] == [spare]

    # It is not taken when a node is lost; one that comes new is.
    victim = next(node for node in ("h2", "h3") if node != spare)
    assert pids_of(net.run_dir, 0, victim)
    launches[victim].signal(signal.SIGKILL)
    wait_record(net.run_dir, "decision")
    launches["h4"] = stranger.launch(*shape)
    after = wait_cycle(net.run_dir, 1)
    assert after["substituted"] == [[victim, "h4"]]
    net.open_gate()
    del launches[victim]
    check_success(list(launches.values()), reference(2), printed_by=2)
