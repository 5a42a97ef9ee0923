"""Random state of a process: torch on the CPU and on every device in use, numpy, Python."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any

import msgspec
import torch

from keepstep.checkpoint.format.index import RNG_ABSENT
from keepstep.records.errors import RefuseToStartError


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def rng_state() -> dict[str, Any]:
    """Random state of this process: torch on the CPU and, once CUDA is in use, on every device; numpy; Python."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    try:
        import numpy
    except ImportError:
        pass
    else:
        state["numpy"] = numpy.random.get_state()
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Any, checkpoint: str) -> None:
    """Set what `rng_state` gave. Raises RefuseToStartError when a part is missing or does not fit this process.

    A checkpoint made from another tool's files says that there never was one; then this process keeps its own.
    """
    if isinstance(state, dict) and RNG_ABSENT in state:
        if os.environ.get("RANK", "0") == "0":
            print(
                f"keepstep: WARNING: {checkpoint}: {state[RNG_ABSENT]}; random numbers go on as the script seeded them",
                file=sys.stderr,
                flush=True,
            )
        return
    if not isinstance(state, dict) or "torch" not in state or "python" not in state:
        raise RefuseToStartError(f"{checkpoint} holds no random state for this rank")
    cuda = state.get("cuda")
    if cuda is None and _cuda_in_use():
        raise RefuseToStartError(f"{checkpoint} holds no CUDA random state, but this process uses CUDA")
    if cuda is not None and torch.cuda.device_count() != len(cuda):
        raise RefuseToStartError(
            f"{checkpoint} holds the random state of {len(cuda)} CUDA devices, "
            f"this process sees {torch.cuda.device_count()}"
        )
    try:
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        raise RefuseToStartError(f"{checkpoint}: the random state does not fit this process: {error}") from error


class Reseed(msgspec.Struct, frozen=True):
    """In place of a random state: derive new ones from rank 0's `saved`, the `step` and the rank."""

    saved: Any
    step: int


def reseed(how: Reseed, rank: int, checkpoint: str) -> None:
    """Seed every generator: the same numbers each time, others on each rank.

    For a changed number of ranks, where no saved state belongs to a rank. Raises RefuseToStartError without a saved state.
    """
    if not isinstance(how.saved, dict) or not isinstance(how.saved.get("torch"), torch.Tensor):
        raise RefuseToStartError(f"{checkpoint} holds no random state to derive new ones from")
    material = bytes(how.saved["torch"].reshape(-1).view(torch.uint8).tolist())
    seed = hashlib.sha256(b"keepstep-reseed" + material + f"{how.step}/{rank}".encode()).digest()
    if rank == 0:
        print(
            f"keepstep: {checkpoint} was written by another number of ranks: the random state of each rank is reseeded "
            "from rank 0's, the step and the rank",
            file=sys.stderr,
            flush=True,
        )
    torch.manual_seed(int.from_bytes(seed[:8], "big") >> 1)  # seeds every device too
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(int.from_bytes(seed[:4], "big"))
