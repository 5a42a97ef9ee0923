"""`keepstep.hang/1`: which ranks a hang waits for, from flight-recorder dumps (CONTRACT section 4)."""

from __future__ import annotations

from typing import Literal

import msgspec

HangKind = Literal["absent_rank", "desync", "mismatch", "slow_rank", "no_fault"]


class Culprit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank that others wait for. `sequence`: of the collective in its process group; None where only its absence is known."""

    rank: int
    node: str | None = None
    why: str
    process_group: str | None = None
    collective: str | None = None
    sequence: int | None = None


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """What the dumps say. `ranks_missing`: ranks of a known process group without a dump, or with an empty one."""

    schema: str = "keepstep.hang/1"
    kind: HangKind
    culprits: list[Culprit] = []
    ranks_seen: list[int] = []
    ranks_missing: list[int] = []
    notes: list[str] = []
    """What could not be read, and what limits the answer."""
