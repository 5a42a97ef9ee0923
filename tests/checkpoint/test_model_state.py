"""Model and optimizer under the names of the plain module, however it is wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.support import FakeRun, checkpointer

from keepstep.checkpoint.torch import ModelState
from keepstep.records.errors import ConfigError
from keepstep.trainer.channel import MemoryChannel


class Wrapped(torch.nn.Module):
    """A compiled module, as torch.compile names its part, without the compiler."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self._orig_mod(x)


def train(steps: int, *, swap: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    parameters = list(model.parameters())
    optim = torch.optim.AdamW(parameters[::-1] if swap else parameters, lr=0.1)
    for _ in range(steps):
        optim.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optim.step()
    return model, optim


def moments(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optim.state[value]["exp_avg"] for name, value in model.named_parameters()}


def test_optimizer_state_goes_by_name_not_by_number(root: Path) -> None:
    model, optim = train(3)
    ckpt = checkpointer(root, {"train": ModelState(model, optim)}, FakeRun(MemoryChannel()))
    ckpt.restore()
    ckpt.save(3)
    ckpt.close()
    other, swapped = train(0, swap=True)
    again = checkpointer(root, {"train": ModelState(other, swapped)}, FakeRun(MemoryChannel(), cycle=1))
    assert again.restore() == 3
    again.close()
    for (name, ours), theirs in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    kept = moments(model, optim)
    for name, value in moments(other, swapped).items():
        assert torch.equal(value, kept[name]) and value.any(), name
    index = next(root.glob("job7*/index.json")).read_text()
    assert '"train/model/0.weight"' in index and '"train/optim/state/0.weight/exp_avg"' in index


def test_buffers_are_written_by_one_rank_also_through_wrappers() -> None:
    model, optim = train(1)
    paths = set(ModelState(Wrapped(model), optim).buffer_paths())
    assert paths == {("model", f"1.{name}") for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_other_things_are_refused() -> None:
    model, _ = train(0)
    with pytest.raises(ConfigError, match=r"ModelState: Linear is not a torch Optimizer"):
        ModelState(model, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
