"""A small training that has whatever a resume can get wrong. Each rank writes what it used and what it ended with.

Files in `out`: `ledger-rR-cC.jsonl`, a line a step (samples, loss, random numbers), and `state-rR-cC.json`, digests of all state
right after restoring (`restored`), after each step that saves (`saved`), and at the end (`final`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import keepstep.trainer as ks

WINDOW = 2
"""Micro steps of one optimizer step with the part "window"."""


class Options(msgspec.Struct, kw_only=True):
    """What one life of the training does. `kill_at`: rank `kill_rank` kills itself with SIGKILL before that step begins.
    `term_at`: SIGTERM reaches the ranks and the workers of their loaders in the middle of that step.

    `parts`: any of sched, scaler, window (gradient accumulation), dropout, norm (batch norm), ema, critic (a second model and
    optimizer), workers.
    `forget`: this entry of the state ("rng": the random state) is not loaded, the mistake a test must be able to see.
    """

    root: str
    out: str
    steps: int = 9
    every: int = 3
    parts: list[str] = []
    wrap: str = ""
    kill_at: int | None = None
    kill_rank: int = 0
    term_at: int | None = None
    forget: str = ""
    samples: int = 40
    global_batch: int = 8
    seed: int = 3
    rng_on_reshard: str = ""
    loader_name: str = "loader"
    exact: bool = False
    """Arithmetic without rounding, so that results do not depend on the order of sums, nor on the number of ranks."""


class Samples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Fixed inputs and targets; with `augment` noise from the seed that comes with the index."""

    def __init__(self, count: int, *, exact: bool, augment: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        if exact:
            self.inputs = torch.randint(-1, 2, (count, 6), generator=generator).double()
            self.targets = torch.randint(-2, 3, (count, 1), generator=generator).double()
        else:
            self.inputs, self.targets = (
                torch.randn(count, 6, generator=generator),
                torch.randn(count, 1, generator=generator),
            )
        self.augment = augment

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
        index, seed = at if self.augment else (at, 0)
        x = self.inputs[index]
        if self.augment:
            x = x + 0.1 * torch.randn(6, generator=torch.Generator().manual_seed(seed))
        return index, x, self.targets[index]


class Gradients:
    """Gradients of a window that is not complete yet, as an entry of the state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = state[name].clone() if name in state else None


class NotLoaded:
    """An entry that is saved and not loaded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        pass


def digests(value: Any, path: str, into: dict[str, str]) -> dict[str, str]:
    """Every leaf of nested state under its path: tensors as dtype, shape and SHA-256, everything else as text.

    Sharded tensors are put together first, which all ranks do together.
    """
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        into[path] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digests(item, f"{path}/{key}", into)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            digests(item, f"{path}/{number}", into)
    else:
        into[path] = value.hex() if isinstance(value, float) else repr(value)
    return into


class Training:
    """Everything that is trained, by name of its entry in the state."""

    def __init__(self, options: Options, rank: int, world: int) -> None:
        self.options, self.rank, self.world = options, rank, world
        self.parts = set(options.parts)
        torch.manual_seed(options.seed)
        if options.exact:
            self.model: torch.nn.Module = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
            torch.nn.init.zeros_(self.model.weight)
            self.optim: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-3, momentum=0.5)
        else:
            norm = torch.nn.BatchNorm1d(16) if "norm" in self.parts else torch.nn.LayerNorm(16)
            drop = torch.nn.Dropout(0.3 if "dropout" in self.parts else 0.0)
            self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), norm, drop, torch.nn.Linear(16, 1))
            self.optim = None  # type: ignore[assignment]
        self.net = self._wrap()
        if not options.exact:
            self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}
        self._add_parts()
        self.sampler = ks.ResumableSampler(
            options.samples, options.global_batch // world, seed=options.seed, seeded="workers" in self.parts
        )
        self.state[options.loader_name] = self.sampler
        for seeded in (torch.manual_seed, numpy.random.seed, random.seed):
            seeded(1000 * options.seed + rank)  # every rank its own dropout

    def _wrap(self) -> torch.nn.Module:
        if self.options.wrap == "ddp":
            # Otherwise DDP lays its buckets out anew after the first backward pass of a process, and with more than two ranks
            # the place in a bucket decides in which order gradients are added: the last bits of one step would differ.
            return torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
        if self.options.wrap == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world,)))
        return self.model

    def _add_parts(self) -> None:
        if "sched" in self.parts:
            self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 20)
            self.state["sched"] = self.sched
        if "scaler" in self.parts:
            # So large that some steps overflow and are skipped, and soon again after each growth.
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
            self.state["scaler"] = self.scaler
        if "ema" in self.parts:
            self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
            self.state["ema"] = self.ema
        if "critic" in self.parts:
            self.critic = torch.nn.Linear(6, 1)
            self.critic_optim = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
            self.state |= {"critic": self.critic, "critic_optim": self.critic_optim}
        if "window" in self.parts:
            self.state["grads"] = Gradients(self.model)

    def batches(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch."""
        augment = "workers" in self.parts
        data = Samples(self.options.samples, exact=self.options.exact, augment=augment)
        more: dict[str, Any] = {"num_workers": 2, "worker_init_fn": ks.outlive_sigterm} if augment else {}
        loader = DataLoader(data, batch_sampler=self.sampler, **more)
        while True:
            yield from self.sampler.deliver(loader)

    def step(self, number: int, batch: Any) -> dict[str, Any]:
        """One micro step; what it used and computed, for the ledger."""
        ids, x, y = batch
        last = "window" not in self.parts or (number + 1) % WINDOW == 0
        error = self.net(x) - y
        loss = error.square().sum() / self.options.global_batch * (1 if self.options.exact else self.world)
        scale = self.scaler.scale if "scaler" in self.parts else (lambda value: value)
        if self.options.wrap == "ddp" and not last:
            with self.net.no_sync():  # type: ignore[operator]
                scale(loss).backward()
        else:
            scale(loss).backward()
        if last:
            self._update()
        if "critic" in self.parts:
            self.critic_optim.zero_grad()
            (self.critic(x) - error.detach()).square().mean().backward()
            self._average(self.critic)
            self.critic_optim.step()
        mask = F.dropout(torch.ones(64), 0.5)
        return {
            "ids": ids.tolist(),
            "inputs": x.double().sum().item().hex(),
            "loss": loss.item().hex() if not self.options.exact else "",
            "mask": hashlib.sha256(mask.numpy().tobytes()).hexdigest()[:16],
            "random": [random.random().hex(), float(numpy.random.rand()).hex()],
        }

    def _update(self) -> None:
        if not self.options.wrap:
            self._average(self.model)
        if "scaler" in self.parts:
            self.scaler.step(self.optim)
            self.scaler.update()
        else:
            self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        if "sched" in self.parts:
            self.sched.step()
        if "ema" in self.parts:
            self.ema.update_parameters(self.model)

    def _average(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters() if self.world > 1 else ():
            dist.all_reduce(parameter.grad)
            if not self.options.exact:
                parameter.grad.div_(self.world)  # type: ignore[union-attr]

    def digests(self) -> dict[str, str]:
        """All state of this rank."""
        own = {"torch": torch.get_rng_state(), "python": str(random.getstate()), "numpy": str(numpy.random.get_state())}
        found = digests(own, "rng", {})
        for name, entry in self.state.items():
            digests(entry.state_dict(), name, found)
        return found


def send_notice() -> None:
    """SIGTERM to this process and its children, from a process that is none of them, as a scheduler's daemon is."""
    group = os.getpgrp()
    sender = os.fork()
    if sender == 0:
        os.setpgid(0, 0)
        os.killpg(group, signal.SIGTERM)
        os._exit(0)
    os.waitpid(sender, 0)


def train(options: Options) -> None:
    """One life of one rank: restore, train to the end or to the kill. Rank, world and cycle are in the environment."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    run = ks.init(guard=())
    if world > 1:
        dist.init_process_group("gloo")
    training = Training(options, rank, world)
    state = dict(training.state)
    if options.forget in state:
        state[options.forget] = NotLoaded(state[options.forget])
    more = {"rng_on_reshard": options.rng_on_reshard} if options.rng_on_reshard else {}
    own = {options.loader_name, "grads"} & set(state) if options.loader_name == "loader" else {"grads"} & set(state)
    ckpt = ks.Checkpointer(options.root, state, every_steps=options.every, per_rank=own, timeout_s=30.0, **more)  # type: ignore[arg-type]
    step = ckpt.restore()
    if options.forget == "rng":
        torch.manual_seed(options.seed)
    tag = f"r{rank}-c{cycle}"
    record: dict[str, Any] = {"begin": step, "restored": training.digests(), "saved": {}}
    report = Path(options.out, f"state-{tag}.json")
    report.write_text(json.dumps(record))
    batches = training.batches()
    with Path(options.out, f"ledger-{tag}.jsonl").open("w") as ledger:
        while step < options.steps:
            if step == options.kill_at and rank == options.kill_rank:
                ckpt.wait()  # which checkpoint is the newest is the scenario's choice, not a race's
                os.kill(os.getpid(), signal.SIGKILL)
            with run.step(step):
                batch = next(batches)
                if step == options.term_at:
                    send_notice()
                used = training.step(step, batch)
            print(json.dumps({"step": step, **used}), file=ledger, flush=True)
            step += 1
            if ckpt.maybe_save(step):
                record["saved"][step] = training.digests()
            if run.stop_requested:
                break
    batches.close()  # type: ignore[attr-defined]
    report.write_text(json.dumps({**record, "final": training.digests()}))
    ckpt.close()
    run.finish()
    if world > 1:
        del training
        dist.destroy_process_group()
