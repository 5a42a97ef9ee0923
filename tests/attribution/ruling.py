"""Short ways to make events of the shipped catalog in an order, and to run one rule on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from keepstep.catalog.load import Catalog, shipped
from keepstep.records.event import Event, Evidence

S = 1_000_000_000
T0 = 1_900_000_000 * S


@functools.cache
def catalog() -> Catalog:
    return shipped()


def event(
    signature: str, second: float | None = None, *, text: str = "", path: str = "a.log", line: int = 0, **more: Any
) -> Event:
    """An event of a shipped entry, at a second of the story or without time."""
    entry = catalog()[signature]
    fields: dict[str, Any] = {name: more.pop(name) for name in ("node", "rank", "job") if name in more}
    return Event(
        kind=entry.kind,
        signature=signature,
        severity=entry.severity,
        source="text",
        time_ns=None if second is None else T0 + int(second * S),
        time_quality="none" if second is None else "exact",
        order=line,
        attrs=more,
        evidence=Evidence(path=path, line=line, text=text),
        **fields,
    )


def steps(first: float, last: float, last_step: int = 100) -> Event:
    """Training that went on from one second to another."""
    one = event("job.progress", first, last_step=last_step)
    return type(one)(**{f: getattr(one, f) for f in one.__struct_fields__} | {"last_ns": T0 + int(last * S)})


Rule = Callable[[Sequence[Event], Catalog], list[Event]]


def told(rule: Rule, *events: Event) -> list[str]:
    """Signatures of what a rule concludes."""
    return [e.signature for e in rule(list(events), catalog())]


def conclusion(rule: Rule, *events: Event) -> Event:
    """The only thing that a rule concludes."""
    found = rule(list(events), catalog())
    assert len(found) == 1, [e.signature for e in found]
    return found[0]
