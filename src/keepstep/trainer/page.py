"""The rank's end of its progress page: steps and sections as plain stores into shared memory.

Layout and meaning of each word: keepstep.records.page. No system call, no lock: a step costs a few clock reads and stores.
The contexts are classes closed over the page, because CPython reads a closure variable faster than an attribute.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from time import monotonic_ns, sleep
from typing import Any, Protocol

from keepstep.records import page as layout
from keepstep.records.frames import ENV_PAGE_FD

LEASE_LOOK_S = 0.01
"""How often a rank without a lease looks whether it has one again."""

Words = Any  # a writable memoryview cast to "Q"; mypy has no notion of cast formats


def open_page() -> tuple[Words, bool]:
    """Map the page handed over by the agent, or a private one. Returns (words, supervised).

    The descriptor number alone proves nothing (a subprocess may have reused it), so the magic word is checked.
    """
    fd_text = os.environ.get(ENV_PAGE_FD, "")
    if fd_text.isdigit():
        try:
            shared = mmap.mmap(int(fd_text), layout.PAGE_BYTES)
        except (OSError, ValueError):
            pass
        else:
            words = memoryview(shared).cast("Q")
            if words[layout.W_MAGIC] == layout.MAGIC:
                return words, True
    return memoryview(bytearray(layout.PAGE_BYTES)).cast("Q"), False


class StepContext(Protocol):
    """What `with run.step(n) as s` gives: sections and observations of that step.

    `section(name)` returns a context manager whose time is added up under `name`; `observe(...)` reports scalars.
    """

    section: Callable[[str], Any]
    observe: Callable[..., None]

    def __enter__(self) -> StepContext: ...

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None: ...


def make_steps(
    words: Words, attend: Callable[[int], int], observe: Callable[..., None]
) -> tuple[Callable[[int], StepContext], Callable[[str], Any]]:
    """Return (step, section), both writing to `words`. `step` waits while the lease on the page has run out.

    `attend(step)` is called at the entry of the first step and whenever a step reaches the number it returned last: everything
    rare (first-step bookkeeping, injections) lives there so that a usual step pays one comparison.
    A step is counted as completed only when its block ends without an exception. Of a section opened inside itself only the
    innermost part is added to its sum.
    """
    clock = monotonic_ns
    w_step, w_beat = layout.W_STEP, layout.W_BEAT_NS
    w_completed_ns, w_lease = layout.W_COMPLETED_NS, layout.W_LEASE_EXPIRY_NS
    stack = layout.W_SECTIONS
    top = layout.W_SECTIONS + 2 * layout.MAX_SECTION_DEPTH
    current = 0
    special = -sys.maxsize

    class Step:
        __slots__ = ("observe", "section")

        section: Callable[[str], Any]
        observe: Callable[..., None]

        def __enter__(self) -> StepContext:
            return self

        def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
            if kind is None:
                words[w_completed_ns] = clock()
                words[w_step] = current + 1 << 8

    class Sections(dict[str, Any]):
        """Contexts by name. A subscript is one call in C where a function of Python would cost as much as the section itself."""

        def __missing__(self, name: str) -> Any:
            context = self[name] = new_section(name)
            return context

    sections = Sections()

    def new_section(name: str) -> Any:
        name_id = len(sections) + 1
        if name_id > layout.MAX_SECTION_NAMES:
            raise ValueError(f"section {name!r}: more than {layout.MAX_SECTION_NAMES} section names in one run")
        write_name(words, name_id, name)
        sum_word = layout.W_SECTION_SUMS + name_id - 1
        total = began = 0

        class Section:
            __slots__ = ()

            def __enter__(self) -> None:
                nonlocal stack, began
                began = clock()
                if stack < top:
                    words[stack + 1] = began
                    words[stack] = name_id
                stack += 2

            def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
                nonlocal stack, total
                stack -= 2
                if stack < top:
                    words[stack] = now = clock()
                    total += now - began
                    words[sum_word] = total

        return Section()

    section: Callable[[str], Any] = sections.__getitem__
    context = Step()
    context.section = section
    context.observe = observe

    def step(number: int) -> StepContext:
        nonlocal current, special
        if number >= special:
            special = attend(number)
        now = clock()
        if 0 < words[w_lease] < now:
            now = wait_for_lease(words)
        current = number
        words[w_step] = number << 8 | 1
        words[w_beat] = now
        return context

    return step, section


def lease_overdue_s(words: Words) -> float:
    """Seconds since this node's lease ran out; 0 while it holds or there is none."""
    expiry_ns = words[layout.W_LEASE_EXPIRY_NS]
    return max(0.0, (monotonic_ns() - expiry_ns) / 1e9) if expiry_ns else 0.0


def wait_for_lease(words: Words) -> int:
    """Sleep until the lease is renewed; returns the time then (CLOCK_MONOTONIC ns).

    Without a lease another node may have taken over this rank already, so there is no limit: the rank goes on when the
    launcher says so, or is ended.
    """
    print("keepstep: this node's lease ran out; no step begins before it is renewed", file=sys.stderr, flush=True)
    while lease_overdue_s(words):
        sleep(LEASE_LOOK_S)
    print("keepstep: the lease was renewed; going on", file=sys.stderr, flush=True)
    return monotonic_ns()


def write_name(words: Words, name_id: int, name: str) -> None:
    """Write a section's name (cut to NAME_BYTES of UTF-8) into its slot; ids begin with 1."""
    encoded = name.encode()[: layout.NAME_BYTES].ljust(layout.NAME_BYTES, b"\0")
    base = (layout.NAMES_OFFSET + (name_id - 1) * layout.NAME_BYTES) // 8
    for i in range(layout.NAME_BYTES // 8):
        words[base + i] = int.from_bytes(encoded[8 * i : 8 * i + 8], sys.byteorder)
