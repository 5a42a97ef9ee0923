"""The no-progress stop: failed cycles are counted while a progress marker does not grow.

The marker is the integer in a file (--checkpoint-iteration-file, as Megatron-LM's latest_checkpointed_iteration.txt), or the
committed step of keepstep's own checkpoints. The state is part of the coordinator's journal, so a replaced node changes nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

MAX_MARKER_BYTES = 64


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """`last`: the marker at the end of the previous cycle (the baseline before the first); None: never readable so far."""

    last: int | None = None
    count: int = 0
    """Failed cycles in a row that brought less than the wanted growth."""


def read_marker(path: str | None) -> int | None:
    """The integer in a marker file; None when there is none, or it is empty, malformed, unreadable or negative."""
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_MARKER_BYTES + 1)
        digits = text.decode("ascii").strip()
    except (OSError, ValueError):
        return None
    # int() would take more than digits: signs, underscores.
    return int(digits) if digits.isdigit() and len(text) <= MAX_MARKER_BYTES else None


def after_failed_cycle(progress: Progress, marker: int | None, min_growth: int, rolled_back: bool) -> Progress:
    """State after a failed cycle that ended with `marker`.

    An unknown marker changes nothing. The first known one is the baseline. A cycle with a deliberate rollback or replay does
    not count and sets a new baseline. A marker that is still 0 leaves the check inactive: nothing was ever written.
    """
    if marker is None:
        return progress
    if progress.last is None or rolled_back:
        return Progress(last=marker, count=progress.count)
    if marker == 0 and progress.last == 0:
        return progress
    return Progress(last=marker, count=progress.count + 1 if marker - progress.last < min_growth else 0)
