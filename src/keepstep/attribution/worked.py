"""Whether the job worked after something had happened: steps that were made, or a good end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepstep.attribution.current import PROGRESS, begin_after, end_of, goes_on, stops
from keepstep.attribution.order import compare, gap_s, same_text
from keepstep.catalog.load import Catalog
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event
from keepstep.records.verdict import NODE_ACTIONS

LEAST_GAP_S = 5.0
"""A step that is printed so soon after a failure was under way when it came: ranks run ahead of each other and flush late."""


PASSING_SCOPES = frozenset({"rank", "job", "storage", "cluster"})
"""What is wrong with these comes as it goes; what is wrong with a machine stays."""

_ANY = "any"


class Worked:
    """The signs that the job worked, of which only the last ones are looked at: thousands of ranks each give one."""

    def __init__(self, signs: Sequence[Event]) -> None:
        self._last: dict[tuple[object, ...], tuple[int, Event]] = {}
        self._qualities = sorted({end_of(s).time_quality for s in signs})
        for sign in signs:
            end, text = end_of(sign), (sign.evidence.path, sign.source)
            before_last = sign.attrs.get("before_last_order", end.order) if sign.kind == PROGRESS else end.order
            for rank in (_ANY, sign.rank):
                if end.time_ns is not None:
                    self._keep(("time", rank, None, end.time_quality), end.time_ns, sign)
                    self._keep(("time", rank, text, end.time_quality), end.time_ns, sign)
                if isinstance(before_last, int):
                    self._keep(("order", rank, text), before_last, sign)

    def _keep(self, key: tuple[object, ...], at: int, sign: Event) -> None:
        held = self._last.get(key)
        if held is None or at > held[0]:
            self._last[key] = (at, sign)

    def after(self, event: Event) -> bool:
        """Whether any sign proves that the job worked after an event."""
        return any(outlived(event, sign) for sign in self._candidates(event))

    def _candidates(self, event: Event) -> Iterator[Event]:
        text = (event.evidence.path, event.source)
        alone = event.kind.startswith("rank.") and event.rank is not None
        for rank in (event.rank, None) if alone else (_ANY,):
            keys: list[tuple[object, ...]] = [("order", rank, text)]
            keys += [("time", rank, place, quality) for place in (None, text) for quality in self._qualities]
            for key in keys:
                if key in self._last:
                    yield self._last[key][1]


def worked(events: Sequence[Event], catalog: Catalog) -> Worked:
    """The signs among events that the job works, or has ended well."""
    return Worked([e for e in events if goes_on(catalog[e.signature])])


def steps_after(events: Sequence[Event], catalog: Catalog) -> list[bool]:
    """For each event whether the job made steps, or ended well, after it, so that it cannot be why the job stopped later.

    Only for what passes by itself; the order must be known.
    """
    signs = worked(events, catalog)
    return [_passes(catalog[e.signature]) and signs.after(e) for e in events]


def _passes(entry: Signature) -> bool:
    return stops(entry) or (entry.scope in PASSING_SCOPES and entry.action not in NODE_ACTIONS)


def outlived(event: Event, sign: Event) -> bool:
    """Whether a sign that the job works came so long after the event that it proves something."""
    if event.kind.startswith("rank.") and None not in (event.rank, sign.rank) and event.rank != sign.rank:
        return False  # what stopped one rank is not disproved by another that ran ahead
    if sign.kind != PROGRESS:
        return begin_after(event, sign)
    end, last = end_of(event), end_of(sign)
    gap = gap_s(end, last)
    if gap is not None and not {end.time_quality, last.time_quality} & {"neighbour", "none"}:
        return gap > LEAST_GAP_S and compare(end, last) == "before"
    # Lines without times of their own: one step may have been under way, two were made.
    before_last = sign.attrs.get("before_last_order")
    return same_text(event, sign) and isinstance(before_last, int) and before_last > end.order and sign.count > 1
