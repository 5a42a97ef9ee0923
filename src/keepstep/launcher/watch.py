"""Reading progress pages, and the deadline by which a rank must have made progress."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque

import msgspec

from keepstep.launcher.procs import make_memfd
from keepstep.launcher.rankmain import IMPORTS_BYTES
from keepstep.records import page as layout

LEARN_STEPS = 20
SAFETY_FACTOR = 8.0
LEARNED_MIN_S = 300.0
"""Floor of a learned limit: an evaluation or a compilation between steps looks like a hang to a limit learned from steps."""


class PageLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says. Times in CLOCK_MONOTONIC ns, 0 when not yet."""

    rank: int
    cycle: int
    spawned_ns: int
    attached_ns: int
    step: int
    in_step: bool
    completed: int
    completed_ns: int
    first_step: int
    first_done_ns: int
    phase: str
    finished: bool
    progress_ns: int
    """The latest time at which any word changed."""
    sections: list[tuple[str, int]]
    """Open sections, outermost first: (name, entered ns)."""
    imported: int
    torn: bool

    @property
    def has_steps(self) -> bool:
        return self.completed_ns > 0


class RankPages:
    """The memory an agent shares with one rank: progress page, stack dumps, names of imported modules."""

    def __init__(self, rank: int, cycle: int) -> None:
        self.rank = rank
        self.page_fd = make_memfd(f"keepstep-page-{rank}", layout.PAGE_BYTES)
        self.stacks_fd = os.memfd_create(f"keepstep-stacks-{rank}", os.MFD_CLOEXEC)
        self.imports_fd = make_memfd(f"keepstep-imports-{rank}", IMPORTS_BYTES)
        self._page = mmap.mmap(self.page_fd, layout.PAGE_BYTES)
        self._imports = mmap.mmap(self.imports_fd, IMPORTS_BYTES)
        self.words = memoryview(self._page).cast("Q")
        self.words[layout.W_CYCLE] = cycle
        self.words[layout.W_RANK] = rank
        self.words[layout.W_SPAWNED_NS] = time.monotonic_ns()
        self.words[layout.W_MAGIC] = layout.MAGIC
        self._seen_imports = 0
        self._seen_imports_ns = 0

    def close(self) -> None:
        """Release the memory. Nothing may look at the page after this."""
        self.words.release()
        self._page.close()
        self._imports.close()
        for fd in (self.page_fd, self.stacks_fd, self.imports_fd):
            os.close(fd)

    def request_stop(self) -> None:
        """Tell the rank that the job is asked to stop; it proposes so at its next shared decision."""
        self.words[layout.W_STOP_REQUEST] = 1

    def set_lease(self, expiry_ns: int) -> None:
        """Tell the rank until when it may run (CLOCK_MONOTONIC ns, 0: no lease)."""
        self.words[layout.W_LEASE_EXPIRY_NS] = expiry_ns

    def imported_names(self) -> list[str]:
        """Modules the rank really imported, in order (not those it found in the zygote)."""
        used = int.from_bytes(self._imports[0:8], "little")
        return bytes(self._imports[8 : 8 + min(used, IMPORTS_BYTES - 8)]).decode(errors="replace").split("\n")[:-1]

    def look(self) -> PageLook:
        """Read the page: two equal looks, or the second one marked torn."""
        first = self._page[:]
        for _ in range(3):
            second = self._page[:]
            if first == second:
                return self._parse(second, torn=False)
            first = second
        return self._parse(first, torn=True)

    def _parse(self, data: bytes, torn: bool) -> PageLook:
        words = memoryview(data).cast("Q")
        used = int.from_bytes(self._imports[0:8], "little")
        if used != self._seen_imports:
            self._seen_imports, self._seen_imports_ns = used, time.monotonic_ns()
        sections: list[tuple[str, int]] = []
        # Entries above the top of the stack keep the time they were last entered: that was progress too.
        stack = words[layout.W_SECTIONS : layout.W_SECTIONS + 2 * layout.MAX_SECTION_DEPTH].tolist()
        for name_id, entered in zip(stack[::2], stack[1::2], strict=True):
            if name_id == 0 or name_id > layout.MAX_SECTION_NAMES:
                break
            sections.append((_name(data, name_id), entered))
        w = layout
        times = (w.W_SPAWNED_NS, w.W_ATTACHED_NS, w.W_BEAT_NS, w.W_COMPLETED_NS, w.W_PHASE_NS)
        return PageLook(
            rank=self.rank,
            cycle=words[w.W_CYCLE],
            spawned_ns=words[w.W_SPAWNED_NS],
            attached_ns=words[w.W_ATTACHED_NS],
            step=words[w.W_STEP] >> 8,
            in_step=bool(words[w.W_STEP] & 1),
            completed=words[w.W_STEP] >> 8 if words[w.W_COMPLETED_NS] else 0,
            completed_ns=words[w.W_COMPLETED_NS],
            first_step=words[w.W_FIRST_STEP],
            first_done_ns=words[w.W_FIRST_DONE_NS],
            phase=layout.PHASE_NAMES.get(words[w.W_PHASE], "?"),
            finished=bool(words[w.W_FLAGS] & layout.FLAG_FINISHED),
            progress_ns=max(*stack[1::2], self._seen_imports_ns, *(words[i] for i in times)),
            sections=sections,
            imported=used,
            torn=torn,
        )


def _name(data: bytes, name_id: int) -> str:
    start = layout.NAMES_OFFSET + (name_id - 1) * layout.NAME_BYTES
    return _as_on_page(data[start : start + layout.NAME_BYTES])


def _as_on_page(name: bytes) -> str:
    """How a section's name can be read back from a page, which keeps NAME_BYTES of it."""
    return name[: layout.NAME_BYTES].rstrip(b"\0").decode(errors="replace")


class HangLimits:
    """How long a rank may go without progress.

    `setting`: "off", seconds, or "auto": `start_s` until LEARN_STEPS gaps between signs of progress were seen, then the larger of
    `learned_min_s` and SAFETY_FACTOR times the longest of the last 200 gaps. Limits of sections given by name apply in addition.
    """

    def __init__(
        self, setting: str, start_s: float, sections_s: dict[str, float], learned_min_s: float = LEARNED_MIN_S
    ) -> None:
        self._learned_min_s = learned_min_s
        self.fixed_s = None if setting in ("auto", "off") else float(setting)
        self.off = setting == "off"
        self.start_s = start_s
        self.sections_s: dict[str, float] = {}
        for name, limit_s in sections_s.items():
            short = _as_on_page(name.encode())
            self.sections_s[short] = min(limit_s, self.sections_s.get(short, limit_s))
        self._gaps_s: deque[float] = deque(maxlen=200)

    def learn(self, gap_s: float) -> None:
        """Note a time between two signs of progress of a training rank."""
        self._gaps_s.append(gap_s)

    def limit_s(self, look: PageLook) -> float:
        """Seconds without progress that are tolerated for a rank in this state."""
        if self.off:
            return float("inf")
        if look.finished:
            # Training is over; what a script does after that (exports, uploads) reports no progress.
            return max(self.start_s, self.fixed_s or 0.0)
        if self.fixed_s is not None:
            return self.fixed_s
        if not look.has_steps or look.phase != "train" or len(self._gaps_s) < LEARN_STEPS:
            return self.start_s
        return max(self._learned_min_s, SAFETY_FACTOR * max(self._gaps_s))

    def deadline_ns(self, look: PageLook) -> tuple[float, str]:
        """CLOCK_MONOTONIC ns by which the rank must show progress, and what limit that is."""
        limit = self.limit_s(look)
        best = look.progress_ns + limit * 1e9
        why = f"no progress for {limit:g} s"
        for name, entered in look.sections:
            if name in self.sections_s and entered + self.sections_s[name] * 1e9 < best:
                best = entered + self.sections_s[name] * 1e9
                why = f"section {name!r} open for {self.sections_s[name]:g} s"
        return best, why
