"""NVLinks that a monitor misses and a look at them does not: links of another generation, links that were still training."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

CLAIMS = ("dcgm.health_nvlink", "condition.dcgm.nvlink", "nvlink.check_down", "gpud.nvlink_unsupported")
INACTIVE = ("nvlink.inactive", "nvlink.all_inactive", "nvlink.pair_missing")
NOT_OWN = ("condition.", "monitor.", "k8s.node_", "check.", "fact.", "dcgm.health")
LINKS = (
    (re.compile(r"\bV100\b"), 6),
    (re.compile(r"\bA[18]00\b"), 12),
    (re.compile(r"\b(?:H[128]00|H20|GH200|B[23]00|GB[23]00)\b"), 18),
)
"""Links of a GPU, by its product."""
_LINK = re.compile(r"(?i)\blink[ =:#]{1,3}(?P<link>\d{1,2})\b|GetNvLinkState\((?P<asked>\d{1,2})\)")


def fewer_links(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A link that this generation does not have, and links that carry data below the claim."""
    claims, missing = of(events, *CLAIMS), of(events, "nvlink.not_fitted")
    up = of(events, "nvlink.link_up")
    if not claims or not missing or of(events, *INACTIVE) or any(_speaks(e, catalog) for e in events):
        return []
    counts = {n for e in of(events, "gpu.product_linked") for pattern, n in LINKS if pattern.search(e.evidence.text)}
    asked = [_asked(e) for e in missing]
    if len(counts) != 1 or not asked or not all(a is not None and a >= max(counts) for a in asked):
        return []
    last = max(claims, key=_line)
    if not any(_below(last, u) for u in up) or any(_asked(e) is not None for e in of(events, "nvlink.check_down")):
        return []  # a monitor that names a link which the GPU has
    attrs = {"link": asked[0], "links": max(counts)}
    return [derive(catalog, "derived.alarm.fewer_links", max(up, key=_line), attrs=attrs, placed=False)]


def links_trained(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Links that were down after a reboot that somebody wanted, none of which is inactive by a later look."""
    claims, looks = of(events, *CLAIMS, *INACTIVE), of(events, "nvlink.inactive_counted")
    boots = of(events, "fact.reboot_told")
    if not claims or not looks or not boots or any(number(e.attrs.get("count")) != 0 for e in looks):
        return []
    if any(_speaks(e, catalog) for e in events if e not in claims):
        return []
    first, last = min(claims, key=_line), max(claims, key=_line)
    told = any(_below(b, first) for b in boots)
    end = number(last.attrs.get("last_order")) or _line(last)
    later = [k for k in looks if _below(last, k) and _line(k) > end]
    quiet = [q for q in of(events, "fact.no_more_events") if _below(last, q) and _line(q) > end]
    # One machine that was looked at speaks for itself; for others only a monitor that went quiet.
    alone = {str(k.attrs.get("node")) for k in later} >= {_named(c) for c in claims}
    if not told or not later or not (quiet or alone):
        return []
    return [derive(catalog, "derived.alarm.links_trained", max((*later, *quiet), key=_line), placed=False)]


def _named(claim: Event) -> str:
    """The machine that a claim is about; of several in one line none."""
    return claim.node if claim.node is not None and claim.count == 1 else ""


def _asked(event: Event) -> int | None:
    match = _LINK.search(event.evidence.text)
    return int(match["link"] or match["asked"]) if match is not None else None


def _speaks(event: Event, catalog: Catalog) -> bool:
    """Whether the machine or the job itself says that something is wrong."""
    entry = catalog[event.signature]
    return entry.role in FAILING and entry.severity != "info" and not event.signature.startswith(NOT_OWN)


def _line(event: Event) -> int:
    return event.evidence.line or 0


def _below(one: Event, other: Event) -> bool:
    """Whether `other` stands below `one` in the same text."""
    return one.evidence.path == other.evidence.path and (one.evidence.line or 0) < (other.evidence.line or 0)


FEW_LINK_RULES = (fewer_links, links_trained)
"""Each: `(events, catalog) -> list[Event]`."""
