"""A model sharded as the arguments say; prints a digest of its whole state. Run by test_meshes.py."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepstep.trainer as ks


def digest(value: Any, into: Any) -> None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        into.update(bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    elif isinstance(value, dict):
        for key in value:
            into.update(str(key).encode())
            digest(value[key], into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            digest(item, into)
    else:
        into.update(repr(value).encode())


def build(kind: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 12), torch.nn.LayerNorm(12)
    )
    world = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "tp-fsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def main() -> None:
    root, kind, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = ks.init()
    dist.init_process_group("gloo")
    model, optim = build(kind)
    ckpt = ks.Checkpointer(root, {"model": model, "optim": optim}, every_steps=steps, rng_on_reshard="reseed")
    step = ckpt.restore()
    print_digest("restored", step, model, optim)
    generator = torch.Generator().manual_seed(5)
    while step < steps:
        with run.step(step):
            optim.zero_grad()
            model(torch.randn(16, 12, generator=generator)).square().mean().backward()
            optim.step()
        step += 1
        ckpt.maybe_save(step)
    ckpt.close()
    print_digest("trained", step, model, optim)
    run.finish()
    del model, optim, ckpt
    dist.destroy_process_group()


def print_digest(what: str, step: int, model: torch.nn.Module, optim: Any) -> None:
    whole = hashlib.sha256()
    digest(model.state_dict(), whole)
    digest(optim.state_dict()["state"], whole)
    if os.environ["RANK"] == "0":
        print(f"DIGEST {what} {step} {whole.hexdigest()}", flush=True)


main()
