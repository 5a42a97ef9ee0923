"""What `keepstep doctor resume` tells the ranks of the runs it compares, and what they write for it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Value of KEEPSTEP_RESUME_CHECK. After the first save at or after `until_step` is committed, ranks end with exit code 0."""

    folder: str
    until_step: int


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One thing the script holds. `kind`: "object" has a state of its own, "variable" is a plain number or text.

    `value`: JSON form (checkpoint.format.values) in which a tensor is {"$": "bytes_of", "dtype", "shape", "v": base64}.
    """

    kind: Literal["object", "variable"]
    type: str
    value: Any


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank held right after a save. File `observed-c0000-s00000005-r00000.json`."""

    step: int
    cycle: int
    rank: int
    held: dict[str, Observed]


def observation_name(cycle: int, step: int, rank: int) -> str:
    """File name of an observation."""
    return f"observed-c{cycle:04d}-s{step:08d}-r{rank:05d}.json"
