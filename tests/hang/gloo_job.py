"""Three ranks over gloo, forked from one process; one goes wrong, then each writes torch's own flight-recorder dump.

Arguments: folder, how rank 2 goes wrong ("absent" or "order"), form ("pickle" or "json").
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

RANKS = 3
C10D: Any = c10d


def progress() -> tuple[int, int]:
    """How many collectives this rank has issued, and completed of those of the default group."""
    dump = json.loads(C10D._dump_fr_trace_json())
    status = dump["pg_status"].get("0", {"last_completed_collective": "0"})
    return len(dump.get("entries", [])), int(status["last_completed_collective"])


def write_when(issued: int, path: Path, form: str) -> None:
    """Write the dump once this rank hangs, and tell by the file's name that it is whole."""
    while progress() != (issued, 2):
        time.sleep(0.01)
    data = C10D._dump_fr_trace_json() if form == "json" else C10D._dump_fr_trace()
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def train(rank: int, folder: Path, how: str, form: str) -> None:
    """Two all-reduces, then one in each of two groups. There rank 2 stops, or takes the groups in the other order."""
    store = C10D.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=100))
    groups = [None, dist.new_group()]
    issued = 2 if how == "absent" and rank == 2 else 3
    threading.Thread(target=write_when, args=(issued, folder / f"dump_rank_{rank}", form), daemon=True).start()
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    if issued == 3:
        for group in groups if rank < 2 else reversed(groups):
            dist.all_reduce(torch.ones(4), group=group)
    threading.Event().wait()


def main() -> None:
    folder, how, form = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                train(rank, folder, how, form)
            finally:
                os._exit(1)
        children.append(pid)
    print(*children, flush=True)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
