"""A training script for tests of the tiers: `ks.Checkpointer` over replicated or fully sharded state, told what to do by variables.

EVERY and MEMORY_EVERY: steps between saves and between images in memory. WRAP: "plain" (gradients averaged by hand) or "fsdp".
HOLD: before this step the ranks of cycle 0 wait for the file `GATE.0`, those of a later cycle for `GATE.CYCLE`; before the last
step all wait for `GATE`. Each rank writes a ledger of the samples it used; all say digests of the whole state, which is the same
on every rank.
"""

SCRIPT = """
import hashlib, json, os, pathlib, signal, time
import torch, torch.distributed as dist
import keepstep.trainer as ks

env = os.environ
EVERY, MEMORY_EVERY, TOTAL = int(env.get("EVERY", "10")), int(env.get("MEMORY_EVERY", "3")), int(env.get("TOTAL", "20"))
HOLD, WIDTH, SAMPLES = int(env.get("HOLD", "-1")), int(env.get("WIDTH", "8")), int(env.get("SAMPLES", "400"))
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
ledger = open(f"{env['ROOT']}.ledger-c{cycle:04d}-r{rank}", "w")
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
        ckpt.maybe_save(step)
        if step == TOTAL or run.stop_requested:
            break
    if run.stop_requested:
        break
ckpt.close()
run.finish()
print(f"end {step} {digest()}", flush=True)
dist.destroy_process_group()
"""
