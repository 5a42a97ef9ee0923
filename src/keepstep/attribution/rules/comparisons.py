"""Two runs, or two lives of one, held against each other: counts that jump, states that freeze, audits that see what is not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, WAITS, number, of
from keepstep.attribution.rules.resumes import SECOND_LIVES, follows
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 128
JUMP = 10.0
"""Times what a step adds: batches that grow double at most."""
GROWN = 1.5
"""Times the count before, so that a few odd samples are no jump."""
EQUALS = 2
"""Facts of equality that it takes to doubt an audit."""
_RANGE = re.compile(r"\b(?P<first>\d{1,12})(?: ?(?:\.\.|-|to) ?(?P<last>\d{1,12}))?\b")
_WHERE = re.compile(r"(?i)\b(?:steps?|iter\w*|at|of)[ =:]{1,3}(?P<rest>\d[^\n]{0,40})")


def parallel_degree(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks that wait, beside the remark that another degree of parallelism works; not where memory ran out with it."""
    told, waiting = of(events, "job.degree_fails"), of(events, *WAITS)
    if not told or not waiting or of(events, "torch.cuda_oom"):
        return []
    machine = (catalog[e.signature] for e in events)
    if any(e.role == "root" and e.scope in ("gpu", "nic", "node") for e in machine):
        return []
    explains = sorted({e.signature for e in waiting})
    return [derive(catalog, "derived.parallel_degree", waiting[0], explains=explains, placed=False)]


def state_frozen(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A data loader that goes back to the beginning in a later save, or a later life, after it was restored further on."""
    states = [(p, e) for e in of(events, "ckpt.loader_state")[:MOST] if (p := number(e.attrs.get("pos"))) is not None]
    for life in of(events, *SECOND_LIVES)[:MOST]:
        here = [(p, e) for p, e in states if (e.evidence.path, e.rank) == (life.evidence.path, life.rank)]
        after = sorted(((p, e) for p, e in here if follows(life, e)), key=lambda s: s[1].evidence.line or 0)
        if len(after) < 2 or "epoch" in " ".join(e.evidence.text for _, e in after).lower():
            continue  # an epoch that ended begins the data again by right
        (restored, _), *later = after
        back = next(((p, e) for p, e in later if p == 0 < restored), None)
        if back is not None:
            attrs = {"restored": restored, "pos": back[0]}
            return [derive(catalog, "derived.ckpt.state_frozen", back[1], attrs=attrs, placed=False)]
    return []


def count_jumps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A count that one step after a resume adds many steps' worth to."""
    series: dict[tuple[str, str], list[tuple[int, int, Event]]] = defaultdict(list)
    for event in of(events, "ckpt.running_count")[:MOST]:
        step, count = number(event.attrs.get("step")), number(event.attrs.get("count"))
        if step is not None and count is not None:
            series[event.evidence.path, str(event.attrs.get("name")).lower()].append((step, count, event))
    lives = of(events, *SECOND_LIVES)[:MOST]
    for (_, name), points in series.items():
        points.sort(key=lambda p: p[2].evidence.line or 0)
        usual = 0.0
        for (step, count, event), (later_step, later_count, later) in pairwise(points):
            steps, grown = later_step - step, later_count - count
            if steps <= 0 or grown < 0:
                continue
            if not any(follows(event, x) and follows(x, later) for x in lives):
                usual = grown / steps
            elif usual > 0 and grown > JUMP * usual * steps and later_count > GROWN * count:
                attrs = {"name": name, "before": count, "after": later_count}
                return [derive(catalog, "derived.ckpt.count_jumps", later, attrs=attrs, placed=False)]
    return []


def runs_equal(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An audit that calls a resume wrong, where all that is measured after it is the same in both runs and nothing failed."""
    alarms = of(events, "ckpt.resume_anomaly")
    pairs = [(e, str(e.attrs.get("one")) == str(e.attrs.get("other"))) for e in of(events, "fact.runs_pair")[:MOST]]
    if not alarms or of(events, "fact.runs_differ", "fact.hang_told") or not all(same for _, same in pairs):
        return []
    equal = [*of(events, "fact.runs_equal")[:MOST], *(e for e, _ in pairs)]
    told = {e.evidence.line for e in (*alarms, *equal)} | {_last(e) for e in equal}
    lives = [e for e in of(events, *SECOND_LIVES) if e.evidence.line not in told]
    resumed = max((n for e in lives if (n := number(e.attrs.get("step"))) is not None), default=None)
    if sum(e.count for e in equal) < EQUALS or not any(_after_resume(e, resumed) for e in equal):
        return []
    own = {id(e) for e in (*alarms, *equal)}
    others = (catalog[e.signature] for e in events if id(e) not in own)
    if any(e.role in FAILING and e.severity in ("error", "fatal") for e in others):
        return []
    last = max((*alarms, *equal), key=lambda e: e.evidence.line or 0)
    return [derive(catalog, "derived.alarm.runs_equal", last, placed=False)]


def _last(event: Event) -> int:
    """Line of the last of several that one event stands for."""
    last = event.attrs.get("last_order")
    return last if isinstance(last, int) else event.evidence.line or 0


def _after_resume(event: Event, resumed: int | None) -> bool:
    """Whether an equality is of steps after the resume: its numbers go beyond it, or do not begin with the first step."""
    where = _WHERE.search(event.evidence.text)
    match = _RANGE.search(where["rest"]) if where is not None else None
    if match is None:
        return False
    first, last = int(match["first"]), int(match["last"] or match["first"])
    return first > 1 and (resumed is None or last > resumed)


COMPARISON_RULES = (parallel_degree, state_frozen, count_jumps, runs_equal)
"""Each: `(events, catalog) -> list[Event]`."""
