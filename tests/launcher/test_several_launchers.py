"""Several launchers on one machine: they meet without a secret; a spare or a smaller job takes over from a killed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from keepstep.launcher.coordination.journal import read_records
from tests.launcher.harness import Launch, wait_until

# A plain script without torch: it counts in a file, so that a later cycle goes on.
COUNTS = """
import os, pathlib, time
mark = pathlib.Path(os.environ["ROOT"])
mark.mkdir(exist_ok=True)
done = mark / "done"
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["GROUP_RANK"], flush=True)
while not done.exists():
    time.sleep(0.02)
"""


def launch(folder: Path, name: str, *flags: str) -> Launch:
    common = ("--rdzv-id", "job", "--node-name", name, "--no-zygote", "--rdzv-conf", "last_call_timeout=60")
    return Launch(folder, COUNTS, *common, *flags)


def finish(folder: Path, *launches: Launch) -> None:
    (folder / "ckpt").mkdir(exist_ok=True)
    (folder / "ckpt" / "done").touch()
    assert [one.finish() for one in launches] == [0] * len(launches), launches[0].output


def test_loopback_endpoint_without_a_token_means_this_host(tmp_path: Path) -> None:
    """As under torchrun: two launchers of one machine, no secret between them."""
    flags = ("--nnodes", "2", "--rdzv-id", "job", "--rdzv-endpoint", "localhost:29517", "--no-zygote")
    script = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    launches = [Launch(tmp_path, script, *flags, "--node-name", name) for name in ("a", "b")]
    assert [launch.finish() for launch in launches] == [0, 0], launches[0].output
    assert {launch.wait_line(r"^rank (\d) of 2$").group(1) for launch in launches} == {"0", "1"}


def test_a_spare_takes_the_ranks_of_a_killed_launcher(tmp_path: Path) -> None:
    a, b, c = (launch(tmp_path, name, "--nnodes", "2", "--spares", "1") for name in ("a", "b", "c"))
    a.wait_line(r"^rank 0 of 2 on 0$")
    b.wait_line(r"^rank 1 of 2 on 1$")
    b.signal(signal.SIGKILL)
    c.wait_line(r"^rank 1 of 2 on 1$")
    a.wait_line(r"^rank 0 of 2 on 0$", count=2)
    finish(tmp_path, a, c)
    first, second = a.cycles
    assert (first.active_nodes, first.spare_nodes) == (["a", "b"], ["c"])
    assert (second.active_nodes, second.recovery, second.substituted) == (["a", "c"], "spare", [["b", "c"]])
    assert first.end_reason == "node_lost" and not first.counted
    a.check_partition()
    # What the ranks left behind is swept away with them; the job's own processes are none of it.
    assert "log funnel" not in a.output + c.output


def test_without_a_spare_a_job_with_a_range_goes_on_smaller(tmp_path: Path) -> None:
    a, b = (launch(tmp_path, name, "--nnodes", "1:2") for name in ("a", "b"))
    a.wait_line(r"^rank 0 of 2 on 0$")
    b.wait_line(r"^rank 1 of 2 on 1$")
    b.signal(signal.SIGKILL)
    a.wait_line(r"^rank 0 of 1 on 0$")
    finish(tmp_path, a)
    assert [c.placement for c in a.cycles] == ["first", "shrink"]
    assert a.cycles[1].recovery == "respawn"


STEPS = """
import os, time
import keepstep.trainer as ks
run = ks.init()
step = 0
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "cycle", os.environ["KEEPSTEP_CYCLE"], flush=True)
done = os.environ["ROOT"] + "/done"
while not os.path.exists(done):
    with run.step(step):
        time.sleep(0.02)
    step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "code"), [("node-loss@node=b,step=20", -9), ("partition@node=b,step=20,seconds=6", 0)]
)
def test_an_injected_loss_of_a_node_is_found_by_its_lease(tmp_path: Path, spec: str, code: int) -> None:
    flags = ["--nnodes", "2", "--spares", "1", "--rdzv-id", "job", "--no-zygote", "--inject", spec]
    flags += ["--rdzv-conf", "lease=2,last_call_timeout=60"]
    # The leader is never the one that is lost: it starts first.
    a = Launch(tmp_path, STEPS, *flags, "--node-name", "a")
    wait_until((tmp_path / "run" / "id").exists)
    b, c = (Launch(tmp_path, STEPS, *flags, "--node-name", name) for name in ("b", "c"))
    c.wait_line(r"^rank 1 of 2 cycle 1$")
    lost = next(r for r in read_records(a.run_dir) if r["type"] == "node_lost")
    assert (lost["node"], lost["why"]) == ("b", "not heard of for its lease of 2 s")
    if code == 0:
        assert "stopping the ranks of cycle 0" in b.output
        b.wait_line(r"this node is a spare")
    finish(tmp_path, a, c)
    assert b.finish() == code


LEAVES = STEPS.replace(
    "        time.sleep(0.02)\n",
    "        time.sleep(0.02)\n"
    "    if (step, os.environ['RANK'], os.environ['KEEPSTEP_CYCLE']) == (20, '1', '0'):\n"
    "        run.request_exclude_node('its disk is full')\n",
)


def test_a_rank_has_its_node_left_out_and_a_spare_takes_the_ranks(tmp_path: Path) -> None:
    flags = ["--nnodes", "2", "--spares", "1", "--rdzv-id", "job", "--no-zygote"]
    flags += ["--rdzv-conf", "last_call_timeout=60"]
    a, b, c = (Launch(tmp_path, LEAVES, *flags, "--node-name", name) for name in ("a", "b", "c"))
    c.wait_line(r"^rank 1 of 2 cycle 1$")
    finish(tmp_path, a, b, c)
    first, second = a.cycles
    assert (first.end_reason, first.counted) == ("node_excluded", False)
    assert (second.active_nodes, second.recovery) == (["a", "c"], "spare")
    reasons = [r["reason"] for r in read_records(a.run_dir) if r["type"] == "excluded"]
    assert reasons == ["rank 1 asked for it: its disk is full"]
