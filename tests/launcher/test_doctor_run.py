"""`keepstep doctor` on the folder of a real run: what it measured, and a rank that made the others wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.launcher.doctor import examine
from keepstep.launcher.doctor.facts import gather
from tests.launcher.harness import run

# Rank 0 alone exports for longer than the hang limit; the next life leaves that out.
SCRIPT = """
import datetime, os, time
import torch, torch.distributed as dist
import keepstep.trainer as ks
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
run = ks.init()
ckpt = ks.Checkpointer(os.environ["ROOT"], state={"m": torch.nn.Linear(64, 64)}, every_steps=3)
step = ckpt.restore()
while step < 9:
    with run.step(step) as s:
        if dist.get_rank() == 0 and step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with s.section("export"):
                time.sleep(80)
        dist.all_reduce(torch.ones(3))
    step += 1
    ckpt.maybe_save(step)
ckpt.close()
run.finish()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_real_run_is_measured_and_its_evidence_used(tmp_path: Path) -> None:
    code, launch = run(tmp_path, SCRIPT, "--nproc-per-node", "2", "--hang-timeout", "3")
    assert code == 0, launch.output
    facts = gather(run_dir=launch.run_dir, script=tmp_path / "script.py", checkpoints=tmp_path / "ckpt", env={})
    assert facts.measured is not None
    for seconds in (facts.measured.save_s, facts.measured.first_step_s, facts.measured.restore_s):
        assert seconds is not None
        assert 0 < seconds < 30
    # Two tensors of 64 * 64 and 64 floats, once for both ranks, and the files around them.
    assert facts.shard_bytes is not None
    assert facts.shard_bytes >= 4 * (64 * 64 + 64)
    slow = next(f for f in examine(facts).findings if f.id == "slow-rank")
    assert slow.severity == "warning"
    assert slow.seen.value == "rank 0 in section 'export', 1 waiting"
    assert {"group-timeout-measured", "group-timeout-range", "progress-marker", "save-memory"} <= set(
        examine(facts).passed
    )
