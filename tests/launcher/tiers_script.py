"""A training script for tests of the tiers: `ks.Checkpointer` over replicated or fully sharded state, told what to do by variables.

EVERY and MEMORY_EVERY: steps between saves and between images in memory; each is waited for, unless NO_WAIT is set: then some
are left out, but not one of step HOLD. SLOW_SAVE: seconds that each takes longer. WRAP: "plain" (gradients averaged by hand) or
"fsdp". HOLD: before this step the ranks of each cycle wait for the file `GATE.CYCLE`; before the last step all wait for `GATE`.
DIE_STAGING: "STEP:CYCLES", rank 1 kills itself when half of the pieces of that step's image are staged, in so many cycles, and
says so before. Each rank writes a ledger of the samples it used; all say digests of the whole state, which is the same on every
rank.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from keepstep.trainer.loader import make_order, mix
from tests.launcher.harness import Launch

SAMPLES = 400

SCRIPT = """
import hashlib, json, os, pathlib, signal, time
import torch, torch.distributed as dist
import keepstep.trainer as ks

env = os.environ
EVERY, MEMORY_EVERY, TOTAL = int(env.get("EVERY", "10")), int(env.get("MEMORY_EVERY", "3")), int(env.get("TOTAL", "20"))
HOLD, WIDTH, SAMPLES = int(env.get("HOLD", "-1")), int(env.get("WIDTH", "8")), 400
dist.init_process_group("gloo")
run = ks.init()
rank, world, cycle = dist.get_rank(), dist.get_world_size(), int(env["KEEPSTEP_CYCLE"])
gate = env["GATE"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2))
if env.get("WRAP") == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optim = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = ks.ResumableSampler(SAMPLES, batch_size=4, seed=1)
inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))
ckpt = ks.Checkpointer(
    env["ROOT"], state={"model": model, "optim": optim, "loader": sampler},
    every_steps=EVERY, memory_every_steps=MEMORY_EVERY or None, rng_on_reshard="reseed",
    memory=None if MEMORY_EVERY else False,
)

def die_while_staging(at, cycles):
    from keepstep.checkpoint.torch import state
    stage, copy = state.stage, state.copy_piece
    def stage_half(captured, table, layout, blob, room):
        copied, count = [], len(table.pieces)
        def copy_some(source, piece, room, offset):
            if len(copied) == count // 2:
                print(f"cycle {cycle} dies with {len(copied)} of {count} pieces staged", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            copied.append(piece.key)
            return copy(source, piece, room, offset)
        if run.completed_steps == at and rank == 1 and cycle < cycles:
            state.copy_piece = copy_some
        stage(captured, table, layout, blob, room)
    state.stage = stage_half

if env.get("DIE_STAGING"):
    die_while_staging(*map(int, env["DIE_STAGING"].split(":")))

if slow_s := float(env.get("SLOW_SAVE", "0")):
    from keepstep.checkpoint.save.saver import Saver
    store = Saver._store
    def slow(self, job, folder, number):
        print(f"cycle {cycle} stores {job.name.step} durable {job.durable}", flush=True)
        time.sleep(slow_s)
        return store(self, job, folder, number)
    Saver._store = slow

def digest():
    parts = hashlib.sha256()
    for p in model.parameters():
        for t in (p, *(v for k, v in sorted(optim.state.get(p, {}).items()))):
            t = t.full_tensor() if hasattr(t, "full_tensor") else t
            parts.update(t.detach().numpy().tobytes())
    return parts.hexdigest()[:16]

def hold(path):
    while not os.path.exists(path):
        time.sleep(0.02)

step = ckpt.restore()
print(f"cycle {cycle} rank {rank} of {world} restored {step} state {digest()} pid {os.getpid()}", flush=True)
ledger = open(f"{gate}.ledger-c{cycle:04d}-r{rank}", "w")
while step < TOTAL:
    for batch in sampler.deliver(sampler):
        if step == HOLD:
            print(f"cycle {cycle} rank {rank} holds", flush=True)
            hold(f"{gate}.{cycle}")
        if step == TOTAL - 1:
            hold(gate)
        with run.step(step):
            optim.zero_grad()
            model(inputs[batch]).pow(2).mean().backward()
            if env.get("WRAP") != "fsdp":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            optim.step()
            time.sleep(float(env.get("STEP_S", "0.01")))
        step += 1
        print(json.dumps({"step": step, "ids": batch}), file=ledger, flush=True)
        print(f"cycle {cycle} step {step} state {digest()}", flush=True)
        if step == HOLD:
            ckpt.wait()
        ckpt.maybe_save(step)
        if step == HOLD or not env.get("NO_WAIT"):
            ckpt.wait()
        if step == TOTAL or run.stop_requested:
            break
    if run.stop_requested:
        break
ckpt.close()
run.finish()
print(f"end {step} {digest()}", flush=True)
dist.destroy_process_group()
"""


def digests(launch: Launch, cycle: int) -> dict[int, str]:
    """Digest of the whole state after each step of a cycle, as far as some rank said it, and of the restored one."""
    found: dict[int, str] = {}
    pattern = rf"cycle {cycle} (?:rank \d+ of \d+ restored|step) (\d+) state (\w+)"
    for step, digest in re.findall(pattern, launch.output):
        assert found.setdefault(int(step), digest) == digest, f"ranks differ at step {step}"
    return found


def last_line(*launches: Launch) -> str:
    """The line with which all ranks of a run ended alike."""
    lines: set[str] = {line for launch in launches for line in re.findall(r"\bend \d+ \w{16}$", launch.output, re.M)}
    assert len(lines) == 1, lines
    return lines.pop()


def restored(launch: Launch, cycle: int, world: int = 2) -> set[tuple[int, int]]:
    """Wait until all ranks that this launcher shows have restored; (rank, step) of each."""
    pattern = rf"cycle {cycle} rank (\d+) of {world} restored (\d+) "
    launch.wait_line(pattern, count=world)
    return {(int(rank), int(step)) for rank, step in re.findall(pattern, launch.output)}


def check_ledger(folder: Path, begins: dict[int, int], worlds: dict[int, int], total: int) -> None:
    """Each sample of the order was used once, in its order, by the steps that led to the end. `begins`: the step of each cycle."""
    steps: dict[int, list[int]] = {}
    for cycle, begin in begins.items():
        steps = {step: ids for step, ids in steps.items() if step <= begin}
        for rank in range(worlds[cycle]):
            text = (folder / f"gate.ledger-c{cycle:04d}-r{rank}").read_text()
            for line in map(json.loads, text.splitlines()):
                steps.setdefault(line["step"], []).extend(line["ids"])
    assert sorted(steps) == list(range(1, total + 1))
    used = [sample for step in sorted(steps) for sample in steps[step]]
    order = make_order(SAMPLES, mix(1, 0))
    assert used == [order(place) for place in range(len(used))]


def buffers(pid: int) -> dict[str, Path]:
    """Memory files of a launcher's: name of each -> where it can be opened."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:keepstep-"):
            found[target.removeprefix("/memfd:keepstep-").removesuffix(" (deleted)")] = path
    return found


def memory_ids(pid: int) -> set[tuple[int, int]]:
    """Identities of the memory files that a process holds."""
    found = set()
    with contextlib.suppress(OSError):  # it ended
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith("/memfd:keepstep-"):
                    status = path.stat()
                    found.add((status.st_dev, status.st_ino))
    return found


def all_memory_ids() -> set[tuple[int, int]]:
    """Those that any process holds."""
    return set().union(*(memory_ids(int(process.name)) for process in Path("/proc").glob("[0-9]*")))
