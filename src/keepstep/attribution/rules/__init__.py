"""Rules: what follows from several events together and from none alone.

A rule is a function `(events, catalog) -> list[Event]`. The events it makes have signatures of the catalog ("derived.*") like any
other, so that their weight is argued there and shown by `why --explain`. RULES is the list of all, in the order they run; each
sees the events of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.attribution.rules.ownstacks import late_ranks
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

Rule = Callable[[Sequence[Event], Catalog], list[Event]]

RULES: tuple[Rule, ...] = (late_ranks,)
