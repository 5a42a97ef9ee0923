"""A real run whose checkpoints go up to a real S3 server: the flags reach the ranks, the store outlives the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from keepstep.cli.main import main
from tests.checkpoint.s3 import S3, moto_server, s3  # noqa: F401 - fixtures
from tests.launcher.harness import run

SCRIPT = """
import os, torch
import keepstep.trainer as ks
run = ks.init()
model = torch.nn.Linear(8, 8)
ckpt = ks.Checkpointer(os.environ["ROOT"], {"model": model}, every_steps=2, upload_root=os.environ["UPLOADS"])
step = ckpt.restore()
print("begins at", step, flush=True)
while step < int(os.environ["TOTAL"]):
    with run.step(step):
        pass
    step += 1
    ckpt.maybe_save(step)
ckpt.close()
run.finish()
"""


@pytest.mark.slow
def test_uploaded_by_one_run_and_restored_by_the_next(tmp_path: Path, s3: S3) -> None:  # noqa: F811
    root = tmp_path / "root"
    flags = ["--standalone", "--nproc-per-node", "2", "--store-endpoint", s3.endpoint, "--store-allow-http"]
    flags += ["--store-region", "us-east-1", "--on-busy", "skip"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    env: dict[str, Any] = {
        "KEEPSTEP_HOME": str(tmp_path / "home"),
        "ROOT": str(root),
        "UPLOADS": f"s3://{s3.bucket}/team/ckpt",
        "OMP_NUM_THREADS": "1",
    }
    code, first = run(tmp_path / "first", SCRIPT, *flags, TOTAL="4", **env)
    assert code == 0, first.output
    reached = [mark.attrs for mark in first.marks if mark.kind == "tier_reached"]
    assert reached and reached[-1]["tier"] == "object" and reached[-1]["files"] == 3
    result = CliRunner().invoke(main, ["get", "checkpoints", str(first.run_dir), "-o", "json"])
    assert "object" in [one["tier"] for one in json.loads(result.stdout)[-1]["tiers"]]
    shutil.rmtree(root)
    code, second = run(tmp_path / "second", SCRIPT, *flags, TOTAL="6", **env)
    assert code == 0, second.output
    assert second.output.count(f"begins at {reached[-1]['step']}") == 2
    assert second.cycles[0].restored_from == "object"
