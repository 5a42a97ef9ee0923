"""Ordinary scripts of Hugging Face Accelerate and PyTorch Lightning, which know nothing of keepstep, under `keepstep run`."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.launcher.harness import Launch, wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS, STEPS_PER_EPOCH, KILL_AFTER = 8, 8, 3


class Framework(NamedTuple):
    """A framework, the example written for it, and what its own launchers would pass on a machine without GPUs."""

    package: str
    example: str
    args: tuple[str, ...]
    env: dict[str, str]


FRAMEWORKS = [
    # `accelerate launch --cpu` sets this; without it Accelerate does not use several processes on a CPU, whoever starts them.
    Framework("accelerate", "accelerate_plain.py", (), {"ACCELERATE_USE_CPU": "1"}),
    Framework("pytorch_lightning", "lightning_plain.py", ("--devices", "2"), {}),
]


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.package)
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework that is installed."""
    chosen: Framework = request.param
    if importlib.util.find_spec(chosen.package) is None:
        pytest.skip(f"{chosen.package} is not installed (dependency group `integrations`)")
    return chosen


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """End the launchers that a failed test has left."""
    yield
    for launch in Launch.started:
        if launch.process.poll() is None:
            launch.process.kill()
    Launch.started.clear()


def start(folder: Path, framework: Framework) -> Launch:
    """`keepstep run` of the example with two ranks; an epoch takes a quarter of a second."""
    folder.mkdir()
    script = [str(EXAMPLES / framework.example), "--output", str(folder / "out"), "--epochs", str(EPOCHS)]
    args = (*script, "--step-seconds", "0.03", *framework.args)
    env: dict[str, Any] = dict(framework.env)
    return Launch(folder, None, "--nproc-per-node", "2", args=args, **env)


def test_script_does_not_import_keepstep(framework: Framework) -> None:
    text = (EXAMPLES / framework.example).read_text()
    assert not re.search(r"^\s*(import|from)\s+keepstep", text, re.MULTILINE)


@pytest.mark.slow
def test_a_killed_rank_costs_at_most_an_epoch(tmp_path: Path, framework: Framework) -> None:
    """The same steps and, to the last bit, the same checkpointed weights as without the kill."""
    disturbed = start(tmp_path / "disturbed", framework)
    disturbed.wait_line(rf"^epoch {KILL_AFTER} ")
    wait_until(lambda: disturbed.cycles[0].ranks[1].pid is not None)
    victim = disturbed.cycles[0].ranks[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert disturbed.finish() == 0, disturbed.output
    resumed = int(disturbed.wait_line(r"resuming after epoch (\d+)")[1])
    assert KILL_AFTER - 1 <= resumed < EPOCHS
    assert [cycle.ranks[1].exit for cycle in disturbed.cycles] == ["SIGKILL", "exit 0"]

    quiet = start(tmp_path / "quiet", framework)
    assert quiet.finish() == 0, quiet.output
    assert len(quiet.cycles) == 1
    assert "resuming" not in quiet.output
    for launch in (disturbed, quiet):
        launch.wait_line(rf"finished at step {EPOCHS * STEPS_PER_EPOCH} on 2 processes")
    assert weights(disturbed.folder / "out") == weights(quiet.folder / "out")


def weights(output: Path) -> dict[str, list[float]]:
    """The parameters in the last checkpoint that a framework wrote."""
    import torch

    lightning = output / "last.ckpt"
    if lightning.exists():
        state = torch.load(lightning, weights_only=True)["state_dict"]
    else:
        from safetensors.torch import load_file

        state = load_file(output / f"epoch_{EPOCHS}" / "model.safetensors")
    assert state
    return {name: tensor.flatten().tolist() for name, tensor in state.items()}
