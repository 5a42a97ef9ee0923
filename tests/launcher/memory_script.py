"""A script for tests that keeps its rank's bytes in memory in cycle 0 and looks for them in later cycles.

It speaks to the side channel directly. Files named by the variable GATE: `GATE.CYCLE` lets the ranks of a cycle end.
"""

SCRIPT = """
import hashlib, os, pathlib, signal, time
import torch.distributed as dist
import keepstep.trainer as ks
from keepstep.checkpoint.format.blocks import BLOCK_BYTES
from keepstep.checkpoint.format.fingerprint import fingerprint
from keepstep.records.errors import ChannelError
from keepstep.trainer.channel import open_channel

SIZE = int(os.environ.get("IMAGE_BYTES", "3000000"))
FOLDER = "%s-step-00000005-c0000-a0000" % os.environ["KEEPSTEP_RUN_ID"]
run = ks.init()
rank, cycle = int(os.environ["RANK"]), int(os.environ["KEEPSTEP_CYCLE"])
world = int(os.environ["WORLD_SIZE"])
channel = open_channel()
gate = pathlib.Path(os.environ["GATE"] + "." + str(cycle))

def data_of(rank):
    return (b"rank %08d " % rank) * (SIZE // 14 + 1)

def keep(file, data):
    fd = channel.buffer("slot-" + file, len(data))
    os.pwrite(fd, data, 0)
    os.close(fd)
    blocks = [data[at:at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    facts = {"step": 5, "fingerprint": fingerprint(blocks)}
    print("kept", file, channel.keep("slot-" + file, FOLDER, file, len(data), facts), flush=True)

def look():
    sets = [(s.checkpoint == FOLDER, s.files) for s in channel.kept()]
    print("rank", rank, "cycle", cycle, "sees", sets, flush=True)
    try:
        got = channel.fetch(FOLDER, "rank-%d" % rank)
    except ChannelError as error:
        print("rank", rank, "cycle", cycle, "refused:", error, flush=True)
        return None
    with open(got.fd, "rb") as file:
        same = file.read(got.size_bytes) == data_of(rank)
    print("rank", rank, "cycle", cycle, "fetched", got.tier, "equal", same, flush=True)
    return got.tier if same else None

if cycle == 0:
    keep("rank-%d" % rank, data_of(rank))
    channel.set("kept/%d" % rank, 1)
    if rank == 0:
        channel.wait(["kept/%d" % r for r in range(world)], 60)
        keep("manifest.json", b"{}")
    run.channel.report("restored", {"step": 0, "source": "none"}) if rank == 0 else None
else:
    channel.set("tier/%d" % rank, look())
    tiers = list(channel.wait(["tier/%d" % r for r in range(world)], 60).values())
    if rank == 0:
        source = "none" if None in tiers else "peer" if "peer" in tiers else "shm"
        channel.report("restored", {"step": 5, "source": source, "checkpoint": FOLDER})
print("rank", rank, "cycle", cycle, "waits", flush=True)
while not gate.exists():
    time.sleep(0.05)
if os.environ.get("LOOK_AGAIN"):
    look()
print("rank", rank, "cycle", cycle, "ends", flush=True)
run.finish()
"""
