"""Reading progress pages, and the deadline by which a rank must have made progress."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import deque

import msgspec

from keepstep.launcher.procs import make_memfd
from keepstep.launcher.ranks.rankmain import IMPORTS_BYTES
from keepstep.records import page as layout

LEARN_STEPS = 20
"""Observations after which a limit is learned from them."""
LEARN_WINDOW = 200
"""Observations that are kept: what was slow once is forgotten after that many others."""
SAFETY_FACTOR = 8.0
SPREAD_FACTOR = 4.0
"""A learned limit is SAFETY_FACTOR times the longest observation plus SPREAD_FACTOR times their standard deviation."""
LEARNED_MIN_S = 300.0
"""Floor of a learned limit: an evaluation or a compilation between steps looks like a hang to a limit learned from steps."""
KNOWN_SECTIONS_MIN_S = {"compile": 3600.0, "checkpoint": 1800.0, "evaluation": 3600.0}
"""Sections of these names have a limit of their own from the beginning, and this floor when it is learned: they are rare and long.
So has "first_step", whose floor is the limit of the first step."""


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
    heartbeat_ns: int
    left_ns: int
    """Out of all sections since then; 0 while one is open or when none was ever used."""
    section_sums_ns: dict[str, int]
    """Time spent in each section so far, without what is open."""
    imported: int
    torn: bool

    @property
    def has_steps(self) -> bool:
        return self.completed_ns > 0

    @property
    def trains(self) -> bool:
        """Whether it has shown how often it moves: steps were completed, or heartbeats came and no step has begun."""
        if self.has_steps:
            return self.phase == "train"
        return self.heartbeat_ns > 0 and self.phase == "init"


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
        if not self.words[layout.W_STOP_REQUEST]:
            self.words[layout.W_STOP_REQUEST] = time.monotonic_ns()

    def set_lease(self, expiry_ns: int) -> None:
        """The rank begins no step and commits no checkpoint after this time (CLOCK_MONOTONIC ns; 0: no lease)."""
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
        # Entries above the top of the stack keep the times they were last entered and left: that was progress too.
        stack = words[layout.W_SECTIONS : layout.W_SECTIONS + 2 * layout.MAX_SECTION_DEPTH].tolist()
        for name_id, entered in zip(stack[::2], stack[1::2], strict=True):
            if name_id == 0 or name_id > layout.MAX_SECTION_NAMES:
                break
            sections.append((_name(data, name_id), entered))
        sums = words[layout.W_SECTION_SUMS : layout.W_SECTION_SUMS + layout.MAX_SECTION_NAMES].tolist()
        w = layout
        times = (w.W_SPAWNED_NS, w.W_ATTACHED_NS, w.W_BEAT_NS, w.W_HEARTBEAT_NS, w.W_COMPLETED_NS, w.W_PHASE_NS)
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
            progress_ns=max(*stack, self._seen_imports_ns, *(words[i] for i in times)),
            sections=sections,
            heartbeat_ns=words[w.W_HEARTBEAT_NS],
            left_ns=stack[0] if stack[0] > layout.MAX_SECTION_NAMES else 0,
            section_sums_ns={_name(data, i + 1): total for i, total in enumerate(sums) if total},
            imported=used,
            torn=torn,
        )


def _name(data: bytes, name_id: int) -> str:
    start = layout.NAMES_OFFSET + (name_id - 1) * layout.NAME_BYTES
    return _as_on_page(data[start : start + layout.NAME_BYTES])


def _as_on_page(name: bytes) -> str:
    """How a section's name can be read back from a page, which keeps NAME_BYTES of it."""
    return name[: layout.NAME_BYTES].rstrip(b"\0").decode(errors="replace")


class _Learned:
    """A limit from the latest observations of how long something took."""

    def __init__(self) -> None:
        self.seen_s: deque[float] = deque(maxlen=LEARN_WINDOW)

    def limit_s(self, floor_s: float) -> float | None:
        """At least `floor_s`; None while too little was seen."""
        if len(self.seen_s) < LEARN_STEPS:
            return None
        mean = math.fsum(self.seen_s) / len(self.seen_s)
        spread = math.sqrt(math.fsum((seen - mean) ** 2 for seen in self.seen_s) / len(self.seen_s))
        return max(floor_s, SAFETY_FACTOR * max(self.seen_s) + SPREAD_FACTOR * spread)


class HangLimits:
    """How long a rank may go without progress, and how long its sections may stay open.

    `setting`: "off", seconds, or "auto": `start_s` until LEARN_STEPS gaps between signs of progress were seen, then what
    they teach. Limits of sections given by name apply in addition, whatever the setting: to every open section, however
    they are nested. With "auto" sections of known names and those seen often enough have limits too, and a rank inside a
    section with a limit may be silent for as long as that limit. `out_of_section_s` bounds the time that a rank which has
    used sections spends outside all of them. `patience` multiplies the floors of learned limits.
    `start_given`: `start_s` holds before the first step also where the setting is a number.
    """

    def __init__(
        self,
        setting: str,
        start_s: float,
        sections_s: dict[str, float],
        *,
        out_of_section_s: float | None = None,
        patience: float = 1.0,
        start_given: bool = False,
        floor_s: float = LEARNED_MIN_S,
    ) -> None:
        """`floor_s`: floor of the limit between steps that is learned."""
        self.fixed_s = None if setting in ("auto", "off") else float(setting)
        self.off = setting == "off"
        self.start_s = start_s
        self.start_given = start_given
        self.out_of_section_s = out_of_section_s
        self.sections_s: dict[str, float] = {}
        for name, limit_s in sections_s.items():
            short = _as_on_page(name.encode())
            self.sections_s[short] = min(limit_s, self.sections_s.get(short, limit_s))
        self._auto = setting == "auto"
        self._patience = patience
        self._floor_s = floor_s
        self._known_s = {**KNOWN_SECTIONS_MIN_S, "first_step": start_s}
        self._gaps = _Learned()
        self._sections: dict[str, _Learned] = {}

    def learn(self, gap_s: float) -> None:
        """Note a time between two signs of progress of a training rank."""
        self._gaps.seen_s.append(gap_s)

    def learn_section(self, name: str, open_s: float) -> None:
        """Note how long a section was open."""
        self._sections.setdefault(name, _Learned()).seen_s.append(open_s)

    def learn_from(self, before: PageLook, look: PageLook) -> None:
        """Learn from two looks at one rank, a short while apart.

        The time spent in a section between them is taken as one stay: too long by no more than the time between the looks.
        """
        for name, total_ns in look.section_sums_ns.items():
            spent_ns = total_ns - before.section_sums_ns.get(name, 0)
            if spent_ns > 0:
                self.learn_section(name, spent_ns / 1e9)
        inside = any(self.section_limit_s(name) is not None for name, _ in before.sections)
        if look.trains and not inside and look.progress_ns > before.progress_ns:
            # A silence inside a section with a limit of its own says nothing about the time between steps.
            self.learn((look.progress_ns - before.progress_ns) / 1e9)

    def section_limit_s(self, name: str) -> float | None:
        """Seconds that a section (its name as on the page) may be open, None when only progress counts in it."""
        given = self.sections_s.get(name)
        if given is not None or not self._auto:
            return given
        known_s = self._known_s.get(name)
        floor_s = self._patience * (known_s or LEARNED_MIN_S)
        learned = self._sections[name].limit_s(floor_s) if name in self._sections else None
        return floor_s if learned is None and known_s is not None else learned

    def limit_s(self, look: PageLook) -> float:
        """Seconds without progress that are tolerated for a rank in this state."""
        if self.off:
            return float("inf")
        if look.finished:
            # Training is over; what a script does after that (exports, uploads) reports no progress.
            return max(self.start_s, self.fixed_s or 0.0)
        if self.fixed_s is not None:
            return self.fixed_s if look.trains or not self.start_given else self.start_s
        learned = self._gaps.limit_s(self._patience * self._floor_s) if look.trains else None
        own = [limit for name, _ in look.sections if (limit := self.section_limit_s(name)) is not None]
        return max([self.start_s if learned is None else learned, *own])

    def deadline_ns(self, look: PageLook) -> tuple[float, str]:
        """CLOCK_MONOTONIC ns by which the rank must show progress, and what limit that is."""
        limit = self.limit_s(look)
        limits = [(look.progress_ns + limit * 1e9, f"no progress for {limit:g} s")]
        for name, entered in look.sections:
            own = self.section_limit_s(name)
            if own is not None:
                limits.append((entered + own * 1e9, f"section {name!r} open for {own:g} s"))
        outside = self.out_of_section_s
        if outside is not None and look.left_ns and look.phase in ("init", "train") and not look.finished:
            limits.append((look.left_ns + outside * 1e9, f"in no section for {outside:g} s"))
        return min(limits)
