"""Work on many files, shared out over processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from keepstep.records.errors import StorageError

Part = TypeVar("Part")
Result = TypeVar("Result")


def shared_out(work: Callable[[Part], Result], parts: Sequence[Part], jobs: int) -> Iterator[tuple[int, Result]]:
    """What `work` makes of each part, with the part's number, in any order; `jobs` processes, of which this is one.

    The others are started afresh, never forked from this one: it may have threads. `work` and parts are sent to them by pickle.
    Raises StorageError when one of them was killed.
    """
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    with ProcessPoolExecutor(min(jobs, len(parts)) - 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            futures = [pool.submit(work, part) for part in parts]
            # The others begin at the front; meanwhile this one takes from the end what none of them has begun.
            for number in reversed(range(len(parts))):
                if futures[number].cancel():
                    yield number, work(parts[number])
            for number, future in enumerate(futures):
                if not future.cancelled():
                    yield number, future.result()
        except BrokenProcessPool as error:
            raise StorageError(
                "a process that reads files was killed, maybe for lack of memory; try --jobs 1"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
