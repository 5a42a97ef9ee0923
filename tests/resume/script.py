"""An ordinary training script for `keepstep doctor resume`. `--mistake` makes one of the mistakes that scripts make."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepstep.trainer as ks

SAMPLES, BATCH = 64, 4


class PlainLoader:
    """Counts on through the data; a script that uses it as it is has nothing to save."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))
        self.position = 0

    def next(self) -> torch.Tensor:
        begin = self.position % SAMPLES
        self.position += BATCH
        return self.inputs[begin : begin + BATCH]


class Loader(PlainLoader):
    """The same, with its place as state."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def endless() -> Iterator[torch.Tensor]:
    loader = PlainLoader()
    while True:
        yield loader.next()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    mistake = args.mistake
    torch.set_num_threads(1)
    run = ks.init(guard=())
    if mistake != "unseeded":
        torch.manual_seed(0)
    else:
        torch.seed()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    ema: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    loader = PlainLoader() if mistake == "plain-loader" else Loader()
    stream = endless()
    state = {"model": model, "optim": optim, "sched": sched, "ema": ema, "scaler": scaler, "loader": loader}
    for name in {"plain-loader": ["loader"], "stream": ["loader"], "nothing": list(state)}.get(mistake, [mistake]):
        state.pop(name, None)
    ckpt = ks.Checkpointer("/nowhere/checkpoints", state=state)
    step = 0 if mistake == "no-restore" else ckpt.restore()
    if mistake == "rng":
        torch.manual_seed(0)
    while step < args.steps:
        with run.step(step) as s:
            batch = next(stream) if mistake == "stream" else loader.next()
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            sched.step()
            ema.update_parameters(model)
            s.observe(loss=loss)
        step += 1
        if mistake != "no-save":
            ckpt.maybe_save(step)
        if run.stop_requested:
            break
    ckpt.close()
    run.finish()


if __name__ == "__main__":
    main()
