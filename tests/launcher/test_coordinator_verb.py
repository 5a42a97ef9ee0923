"""`keepstep coordinator`: a job whose coordinator is on its own, ended and started again; and the token it makes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from keepstep.cli.main import main
from keepstep.launcher.coordination.journal import read_records
from keepstep.launcher.ranks.spawn import free_port
from tests.launcher.harness import Launch, training, wait_until


def test_new_token_is_long_and_new_each_time() -> None:
    made = {CliRunner().invoke(main, ["coordinator", "--new-token"]).output.strip() for _ in range(3)}
    assert len(made) == 3
    assert all(len(token) >= 40 for token in made)


def test_no_token_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keepstep.cli.main", "coordinator", "--run-dir", str(tmp_path / "run")]
    command += ["--rdzv-id", "job", "--nnodes", "2", "--rdzv-endpoint", "host-a:29400"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 2
    assert "keepstep coordinator --new-token" in done.stderr


@pytest.mark.slow
def test_the_attempt_goes_on_when_the_coordinator_is_started_again(tmp_path: Path) -> None:
    """Away for longer than a lease: nobody listens meanwhile, so nobody can have given the ranks away."""
    token = tmp_path / "token"
    token.write_text("a token that is long enough")
    token.chmod(0o600)
    common: tuple[str, ...] = (
        "--rdzv-id",
        "job",
        "--nnodes",
        "2",
        "--token-file",
        str(token),
        "--rdzv-conf",
        "lease=2,is_host=false",
    )
    common = (*common, "--rdzv-endpoint", f"127.0.0.1:{free_port(random.Random())}")
    own = tmp_path / "coordinator"
    own.mkdir()
    led = tmp_path / "led"
    first = Launch(own, None, *common, verb="coordinator", run_dir=led)
    nodes = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        root = str(tmp_path / "ckpt")
        nodes.append(Launch(folder, training(total=900, every=100000), *common, "--node-name", name, ROOT=root))
    nodes[0].wait_line(r"^completed 5$")
    first.signal(signal.SIGTERM)
    assert first.finish() == 128 + signal.SIGTERM
    # Ranks train on without it, for longer than two leases of two seconds.
    done = len(nodes[0].lines)
    nodes[0].wait_line(r"^completed \d+$", count=done + 400)
    again = Launch(own, None, *common, verb="coordinator", run_dir=led)
    wait_until(lambda: len([r for r in read_records(led) if r["type"] == "open"]) == 2)
    assert [launch.finish() for launch in (*nodes, again)] == [0, 0, 0], nodes[0].output
    records = read_records(led)
    assert {r["attempt"] for r in records if r["type"] == "open"} == {0}
    assert len([r for r in records if r["type"] == "cycle"]) == 1
    assert not [r for r in records if r["type"] == "node_lost"]
    assert "end 900" in (led / "logs" / "cycle-0000.log").read_text()
