"""What rank 0 of a save or an upload does with the other ranks' words: wait for all of them, and for the first failure.

Keys lie under one prefix for each save or upload: `<what>/<rank>` is a rank's word, with `error` in it when its part failed, and
`failed` the first failure, which rank 0 looks at now and then, so that nobody waits for the slowest rank after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

from keepstep.checkpoint.exchange import Exchange
from keepstep.records.errors import ChannelError, StorageError

_KEYS_AT_ONCE = 500  # values of that many ranks fit into one frame of the side channel
_LOOK_EVERY_S = 1.0


def gather(channel: Exchange, prefix: str, what: str, ranks: range, timeout_s: float) -> dict[int, dict[str, Any]]:
    """What `ranks` say of their part.

    Raises StorageError as soon as a rank is found to have failed, ChannelError at the time limit.
    """
    deadline_s = time.monotonic() + timeout_s
    result: dict[int, dict[str, Any]] = {}
    for begin in range(ranks.start, ranks.stop, _KEYS_AT_ONCE):
        keys = {f"{prefix}/{what}/{rank}": rank for rank in ranks if begin <= rank < begin + _KEYS_AT_ONCE}
        values = _wait(channel, prefix, list(keys), deadline_s)
        for key, rank in keys.items():
            if "error" in values[key]:
                raise StorageError(f"rank {rank}: {values[key]['error']}")
            result[rank] = values[key]
    return result


def tell_failure(channel: Exchange, prefix: str, keys: Iterable[str], rank: int, error: str) -> None:
    """Tell the other ranks under `keys`, where they wait for it, that `rank` failed. A word of it that was said stays."""
    for key in keys:
        with contextlib.suppress(ChannelError):
            channel.cas(f"{prefix}/{key}", {"error": error, "rank": rank})


def _wait(channel: Exchange, prefix: str, keys: list[str], deadline_s: float) -> dict[str, Any]:
    """Values of `keys`; looks now and then whether some rank has failed meanwhile."""
    while True:
        begin_s = time.monotonic()
        slice_s = max(0.0, min(_LOOK_EVERY_S, deadline_s - begin_s))
        try:
            return channel.wait(keys, slice_s)
        except ChannelError:
            now_s = time.monotonic()
            if now_s >= deadline_s or now_s - begin_s < slice_s:
                raise  # not just the end of this slice
        failed = channel.get(f"{prefix}/failed")
        if isinstance(failed, dict):
            raise StorageError(f"rank {failed['rank']}: {failed['error']}")
