"""Ranks of the save benchmark: every way to save the same state, in turn, in the same processes and on the same disk.

Blocking time is what training waits: from the call until the weights may change again. For DCP that is until staging is complete. A
round carries every variant out once (the quick ones twice), in an order that differs from round to round.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_state import (
    Times,
    faulted_buffer,
    local_tensors,
    make_model,
    start,
    timed,
    touch_memory,
    train_step,
    view_of,
    write_raw,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import keepstep.trainer as ks

QUICK = ("memcpy", "keepstep", "raw write")


class Bench:
    """The state, what each variant keeps from save to save, and what was measured."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.mesh = start()
        self.rank = dist.get_rank()
        self.model = make_model(self.mesh, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        train_step(self.model, self.optimizer)
        self.locals = local_tensors(self.model, self.optimizer)
        self.size_bytes = sum(tensor.nbytes for tensor in self.locals)
        self.buffer = faulted_buffer(self.size_bytes)
        self.folder = folder
        self.number = 0
        self.times = Times()
        self.group = dist.new_group(backend="gloo")
        options = StagingOptions(False, False, False, False)
        in_background = StagingOptions(False, False, True, False)
        shared = StagingOptions(False, True, False, False)
        self.stagers = {
            "async_save THREAD": DefaultStager(options),
            "async_save THREAD, async staging": DefaultStager(in_background),
            "async_save PROCESS": DefaultStager(shared),
        }
        self.checkpointer = ks.Checkpointer(
            folder / "keepstep", {"model": self.model, "optim": self.optimizer}, every_steps=1_000_000
        )
        self.checkpointer.restore()

    # ---- controls

    def memcpy(self) -> None:
        """The same bytes into a reused buffer, by the C library's copy and by torch's."""

        def by_memmove() -> None:
            address, at = self.buffer.data_ptr(), 0
            for tensor in self.locals:
                ctypes.memmove(address + at, tensor.data_ptr(), tensor.nbytes)
                at += tensor.nbytes

        def by_torch() -> None:
            at = 0
            for tensor in self.locals:
                self.buffer[at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8), non_blocking=False)
                at += tensor.nbytes

        self.times.note("memcpy", memmove=timed(by_memmove), copy_=timed(by_torch))

    def raw_write(self, *, direct: bool) -> None:
        path = self.place() / f"raw-{self.rank}"
        data = view_of(self.buffer, self.size_bytes)
        seconds = timed(lambda: write_raw(path, data, direct=direct))
        self.times.note("raw write, O_DIRECT" if direct else "raw write", total=seconds)

    def torch_save(self) -> None:
        """Each rank's tensors in a file of its own, as scripts without DCP do."""
        path = self.place() / f"{self.rank}.pt"
        state = {str(number): tensor for number, tensor in enumerate(self.locals)}

        def save() -> None:
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        self.times.note("torch.save", total=timed(save))

    # ---- DCP

    def state_dict(self) -> dict[str, Any]:
        """What DCP is given. No part of its times, though training waits for it as well; keepstep takes the state apart itself."""
        begin = time.perf_counter()
        model, optim = get_state_dict(self.model, self.optimizer)
        self.times.note("get_state_dict", before=time.perf_counter() - begin)
        return {"model": model, "optim": optim}

    def dcp_save(self) -> None:
        state, writer = self.state_dict(), dcp.FileSystemWriter(self.place(), thread_count=2)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        self.times.note("dcp.save", total=timed(lambda: dcp.save(state, storage_writer=writer, planner=planner)))

    def dcp_async(self, variant: str) -> None:
        kind = AsyncCheckpointerType.PROCESS if "PROCESS" in variant else AsyncCheckpointerType.THREAD
        state, place = self.state_dict(), self.place()
        done: list[Future[Any]] = []

        def save() -> None:
            answer = dcp.async_save(
                state,
                storage_writer=dcp.FileSystemWriter(place, thread_count=2),
                planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
                process_group=self.group,
                async_checkpointer_type=kind,
                async_stager=self.stagers[variant],
            )
            if isinstance(answer, AsyncSaveResponse):
                answer.staging_completion.result()
                done.append(answer.upload_completion)
            else:
                done.append(answer)

        block = timed(save)
        begin = time.perf_counter()
        done[0].result()
        self.times.note(f"dcp.{variant}", block=block, total=block + time.perf_counter() - begin)

    # ---- keepstep

    def keepstep(self) -> None:
        self.number += 1
        block = timed(lambda: self.checkpointer.save(self.number))
        begin = time.perf_counter()
        self.checkpointer.wait()
        total = block + time.perf_counter() - begin
        if self.checkpointer.last_committed_step != self.number:
            raise RuntimeError(f"the save of step {self.number} failed")
        self.times.note("keepstep", block=block, total=total)

    # ---- rounds

    def place(self) -> Path:
        """An empty folder that all ranks share."""
        path = self.folder / "scratch"
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        return path

    def clear(self) -> None:
        """What the variant wrote is gone, and nothing of it is still on its way to the disk."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / "scratch", ignore_errors=True)
            old = sorted((self.folder / "keepstep").glob("*-step-*"))
            for checkpoint in old[:-1]:
                shutil.rmtree(checkpoint)
            os.sync()
        dist.barrier()

    def carry_out(self, variant: str) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().mul_(0.999)  # no two saves are of the same bytes
        touch_memory(self.size_bytes)
        variants: dict[str, Callable[[], None]] = {
            "memcpy": self.memcpy,
            "raw write": lambda: self.raw_write(direct=False),
            "raw write, O_DIRECT": lambda: self.raw_write(direct=True),
            "torch.save": self.torch_save,
            "dcp.save": self.dcp_save,
            "keepstep": self.keepstep,
        }
        begin = time.monotonic()
        variants.get(variant, lambda: self.dcp_async(variant))()
        self.clear()
        if self.rank == 0:
            took = time.monotonic() - begin
            print(f"{variant}: {took:.1f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bench = Bench(args.folder, args.seed)
    names = ["memcpy", "raw write", "raw write, O_DIRECT", "torch.save", "dcp.save", *bench.stagers, "keepstep"]
    # First saves are another matter: buffers, processes and plans are made. keepstep has two buffers.
    for variant in ["memcpy", "keepstep", "keepstep", *bench.stagers]:
        bench.carry_out(variant)
    warm_up, bench.times = bench.times, Times()
    warm_up.write(args.folder / f"first-{bench.rank}.json")
    chance = random.Random(args.seed)
    for _ in range(args.rounds):
        order = [*names, *QUICK]
        chance.shuffle(order)
        for variant in order:
            bench.carry_out(variant)
    bench.times.write(args.folder / f"save-{bench.rank}.json")
    for stager in bench.stagers.values():
        stager.close()
    bench.checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
