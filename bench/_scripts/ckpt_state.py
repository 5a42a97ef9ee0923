"""What the checkpoint benchmark's scripts share: a sharded model with AdamW, the disk's raw speed, and files of times.

The state lies as FSDP2 leaves it: every parameter a DTensor, Shard(0) over all ranks, and AdamW's two moments alike.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

CHUNK_BYTES = 16 << 20
ALIGN_BYTES = 4096
LAYERS = 33
WIDTH = 512  # 108 million parameters, 200 tensors: 1.3 GB with both moments


class Times:
    """Seconds by variant and by what was measured, written down for the driver when the script is done."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def note(self, variant: str, **seconds: float) -> None:
        for what, value in seconds.items():
            self.rows[variant][what].append(value)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.rows))


def timed(work: Callable[[], object]) -> float:
    """Seconds `work` took; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def make_model(mesh: DeviceMesh, *, layers: int = LAYERS, width: int = WIDTH, seed: int = 0) -> nn.Module:
    """A transformer's parameters, sharded. Only their names, shapes and sizes matter here."""
    chance = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())

    def parameter(*shape: int) -> nn.Parameter:
        local = torch.randn(shape[0] // mesh.size(), *shape[1:], generator=chance)
        return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))

    def layer() -> nn.Module:
        shapes = {
            "norm1": (width,),
            "qkv": (3 * width, width),
            "out": (width, width),
            "norm2": (width,),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        module = nn.Module()
        for name, shape in shapes.items():
            module.register_parameter(name, parameter(*shape))
        return module

    model = nn.Module()
    model.register_parameter("token", parameter(16 * width, width))
    model.add_module("layers", nn.ModuleList([layer() for _ in range(layers)]))
    model.register_parameter("norm", parameter(width))
    return model


def start() -> DeviceMesh:
    """Process group and mesh, one compute thread a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One AdamW step with made-up gradients, which creates the moments."""
    for parameter in model.parameters():
        local = torch.randn_like(parameter.to_local())
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
    optimizer.step()
    optimizer.zero_grad()


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's memory of everything that is saved."""
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    whole = [*model.parameters(), *moments]
    return [value.to_local().detach() if isinstance(value, DTensor) else value for value in whole]


# ---- the disk


def chunks_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size_bytes, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, size_bytes)


def write_raw(path: Path, data: memoryview, *, direct: bool) -> None:
    """The bytes into a new file, durable on return: no hash, no format, no second copy."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    try:
        # O_DIRECT takes whole pages only; the few bytes after the last one do not matter for a speed.
        size = len(data) - len(data) % ALIGN_BYTES if direct else len(data)
        for begin, end in chunks_of(size):
            view = data[begin:end]
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def read_raw(path: Path, into: memoryview) -> None:
    """All of a file into memory that is there already."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for begin, end in chunks_of(os.fstat(fd).st_size):
            view, at = into[begin:end], begin
            while view:
                count = os.preadv(fd, [view], at)
                view, at = view[count:], at + count
    finally:
        os.close(fd)


def make_cold(paths: list[Path]) -> None:
    """Drop the files from the page cache. Raises RuntimeError when more than a hundredth of one stays."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = cached_share(fd)
        finally:
            os.close(fd)
        if cached > 0.01:
            raise RuntimeError(f"{path}: {cached:.0%} of it stay in the page cache")


def cached_share(fd: int) -> float:
    """Share of a file's pages that are in the page cache (mincore(2))."""
    size = os.fstat(fd).st_size
    if not size:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as area:
        pages = -(-size // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(area)
        result = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), seen)
        del anchor
        if result != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(byte & 1 for byte in seen) / pages


def touch_memory(size_bytes: int) -> None:
    """Have the machine's free memory backed.

    A virtual machine gives memory that was free for seconds back to its host, and the next to touch it waits for the host,
    several times as long as for the copy. Without this, a variant that allocates would be charged for the idle time before it.
    """
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(area, dtype=torch.uint8).fill_(1)


def faulted_buffer(size_bytes: int) -> torch.Tensor:
    """Memory whose pages are all there; page-aligned, so O_DIRECT takes it too."""
    buffer = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    return buffer.fill_(1)


def view_of(buffer: torch.Tensor, size_bytes: int) -> memoryview:
    return memoryview(buffer.numpy())[:size_bytes]
