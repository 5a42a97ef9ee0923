"""Calls that may never come back: drivers, dead mounts, tools of others.

Each runs in a daemon thread of its own, never in a pool: a thread that hangs holds nobody else up, and neither the end of the event
loop nor of the interpreter waits for it. Only the kernel does, when the call is in an uninterruptible wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A call under way in its own thread."""

    def __init__(self, call: Callable[[], T], on_end: Callable[[], object] | None = None) -> None:
        self._call = call
        self._on_end = on_end
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="keepstep-bounded")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        if self._on_end is not None:
            # The loop may be closed by now: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._on_end()

    @property
    def running(self) -> bool:
        """Whether the call has not come back yet."""
        return self._thread.is_alive()

    def result(self, timeout_s: float) -> T:
        """Its value, or its exception. Raises TimeoutError when it does not come back within `timeout_s`."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def call_bounded(call: Callable[[], T], timeout_s: float) -> T:
    """`call()`, given up after `timeout_s`. Raises TimeoutError then, else what the call raises."""
    return Pending(call).result(timeout_s)


async def await_bounded(call: Callable[[], T], timeout_s: float) -> T:
    """As `call_bounded`, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pending = Pending(call, lambda: loop.call_soon_threadsafe(ended.set))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), timeout_s)
    # The thread sets the event as its last act: this join takes no time.
    return pending.result(1.0 if ended.is_set() else 0.0)


def run_tool(command: Sequence[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a program with its output captured together. Raises OSError, or TimeoutError after it was killed."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            **options,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]}: no answer within {timeout_s:g} s") from error
