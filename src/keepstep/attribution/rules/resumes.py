"""What a second life of a run says of the first: bytes, positions and rates that do not fit; failures that another build has not.

Also what looks like a lost checkpoint and is the first launch of a run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from keepstep.attribution.current import PROGRESS
from keepstep.attribution.order import compare
from keepstep.attribution.rules.checkpoints import step_of
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 200
"""Facts of one kind that are compared pairwise."""
LEAST_SAVES = 3
"""Steps with the same bytes from which on it is no chance; two, where the state in memory is known to differ."""
JUMP = 2.0
"""Factor by which no schedule changes its rate from one step to the next."""
NEAR_STEPS = 100
"""Steps between the last rate before a resume and the first one after it that are compared."""
FIRST_STEPS = 1000
"""A first life logs its first step by then."""
PROBES = 3
"""Probes that fail from which on it is not one client."""

_UNCHANGING = re.compile(
    r"(?i)tokenizer|config|vocab|\brng|random|args|\.json\b|\.ya?ml\b|frozen|scheduler|generation|license"
)
"""Parts of a checkpoint that do not change with training."""
_NO_BUILD = re.compile(
    r"(?i)NCCL_|\b\w*(?:dir|path|batch|seq|len|lr|rate|micro|data|workers|mem\w*|timeout|nodes?|ranks?|world\w*|seed)\b *=|=/"
)
"""Settings that change what the job does or where, not how the software does it. Those of NCCL have rules of their own."""
_STILL = re.compile(
    r"(?i)\b(?:still|also) (?:fail|hang|crash|the same)|\bno (?:change|effect|difference)\b|\bnot (?:work|help|fix)"
)
SECOND_LIVES = frozenset({"ckpt.resumed", "ckpt.loaded", "job.loading"})
"""Where a second life of a run begins."""
_LIVES = frozenset(
    {"launcher.cycle", "elastic.restarting", "slurm.job_requeued", "ckpt.resumed", "ckpt.tracker", "ckpt.committed"}
)


def _of(events: Iterable[Event], *signatures: str) -> list[Event]:
    return [e for e in events if e.signature in signatures][:MOST]


def _line(event: Event) -> tuple[str, int]:
    """Where it stands. Documents of one file are in the order in which somebody put them together."""
    return event.evidence.path, event.evidence.line


def follows(earlier: Event, later: Event) -> bool:
    """Whether one was before another, or stands before it in the same file where no clock tells."""
    sense = compare(earlier, later)
    if sense not in (None, "together"):
        return sense == "before"
    return _line(earlier)[0] == _line(later)[0] and _line(earlier) < _line(later)


def saves_repeat(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Saves of different steps with the same bytes."""
    groups: dict[tuple[str, str], dict[int, Event]] = defaultdict(dict)
    for event in _of(events, "ckpt.digest"):
        step = step_of(event)
        if step is not None and _UNCHANGING.search(event.evidence.text) is None:
            name = str(event.attrs.get("file") or "").rpartition("/")[2]
            groups[name, str(event.attrs.get("digest")).lower()][step] = event
    live = {str(e.attrs.get("digest")).lower() for e in _of(events, "ckpt.digest_live")}
    for (_, digest), steps in groups.items():
        if len(steps) >= LEAST_SAVES or (len(steps) > 1 and live and digest not in live):
            names = ", ".join(str(s) for s in sorted(steps)[:8])
            return [derive(catalog, "derived.ckpt.saves_repeat", steps[max(steps)], attrs={"steps": names})]
    return []


def data_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Data that begins again after a resume, while the step counter goes on."""
    positions = [(p, e) for e in _of(events, "ckpt.data_index") if (p := number(e.attrs.get("pos"))) is not None]
    for life in _of(events, *SECOND_LIVES):
        after = [(p, e) for p, e in positions if follows(life, e)]
        before = [p for p, e in positions if follows(e, life)]
        if not after or (step_of(life) == 0):
            continue
        first, where = min(after, key=lambda pair: _line(pair[1]))
        if before and first < max(before):
            explains = ["slurm.step_exit", "exit.sigkill", "exit.failed", "elastic.rank_failed", "loss.not_finite"]
            return [derive(catalog, "derived.ckpt.data_again", where, attrs={"pos": first}, explains=explains)]
    return []


def rate_jumps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A learning rate that jumps at a resume, or is zero long before the run ends; the script's where the script is quoted."""
    rates: list[tuple[int, float, Event]] = []
    for event in _of(events, "ckpt.rate"):
        step = step_of(event)
        try:
            rate = float(str(event.attrs.get("rate")))
        except ValueError:
            continue
        if step is not None:
            rates.append((step, rate, event))
    rates.sort(key=lambda r: _line(r[2]))
    own = _of(events, "ckpt.own_schedule_code")
    lives = _of(events, *SECOND_LIVES)
    for (step, rate, event), (later_step, later_rate, later) in pairwise(rates):
        ended = (
            own
            and later_rate == 0 < rate
            and any(r == 0 for _, r, e in rates if e is not later and _line(e) > _line(later))
        )
        resumed = any(follows(event, x) and follows(x, later) for x in lives) and 0 < later_step - step <= NEAR_STEPS
        jump = resumed and min(rate, later_rate) * JUMP < max(rate, later_rate)
        if jump or ended:
            return [derive(catalog, "derived.ckpt.own_schedule" if own else "derived.ckpt.rate_jumps", later)]
    return []


def other_works(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What fails around saves and loads with this build or setting, and works with another."""
    about = any(
        e.signature.startswith(("ckpt.", "job.saving", "job.loading")) and e.signature != "ckpt.other_works"
        for e in events
    )
    failed = [e for e in events if catalog[e.signature].role in ("root", "symptom", "cascade") and e.severity != "info"]
    if not about or not failed:
        return []
    for event in _of(events, "ckpt.other_works"):
        text = event.evidence.text
        if _NO_BUILD.search(str(event.attrs.get("setting") or "")) or _STILL.search(text):
            continue
        explains = {
            e.signature
            for e in failed
            if catalog[e.signature].scope in ("rank", "job")
            and catalog[e.signature].fault_class not in ("storage", "fabric")
        }
        basis = min((e for e in failed if e.signature in explains), key=_line, default=event)
        return [derive(catalog, "derived.ckpt.other_works", basis, explains=sorted(explains), placed=False)]
    return []


def write_passed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A write of a save that failed while the storage was away for a moment, with room left."""
    failed = _of(events, "torch.write_failed", "fs.io_error")
    back = _of(events, "lustre.restored", "nfs.ok", "ceph.restored")
    if not failed or not back or _of(events, "fs.no_space", "fs.quota", "lustre.evicted", "fs.readonly"):
        return []
    explains = sorted({e.signature for e in failed} | {"lustre.connection_lost", "nfs.not_responding"})
    return [derive(catalog, "derived.ckpt.write_passed", failed[0], explains=explains, placed=False)]


def out_for_all(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A file system that clients cannot use now, on more nodes than those of the job."""
    lost = _of(
        events,
        "lustre.evicted",
        "lustre.connection_lost",
        "nfs.not_responding",
        "fs.mount_lost",
        "beegfs.communication",
    )
    if not lost:
        return []
    stuck = _of(events, "storage.import_state")
    for probe in _of(events, "storage.probe"):
        bad, of = number(probe.attrs.get("failed")) or 0, number(probe.attrs.get("of")) or 0
        if PROBES <= bad <= of <= 2 * bad:
            explains = sorted({e.signature for e in lost})
            return [derive(catalog, "derived.storage.out_for_all", lost[0], explains=explains, placed=False)]
    states = {e.evidence.text for e in stuck}
    if len(states) >= PROBES:
        explains = sorted({e.signature for e in lost})
        return [derive(catalog, "derived.storage.out_for_all", lost[0], explains=explains, placed=False)]
    return []


def nan_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A loss that is not finite at the same step of several attempts, and of no other step."""
    counts: dict[int, int] = defaultdict(int)
    first: dict[int, Event] = {}
    for event in _of(events, "loss.at_step"):
        step = step_of(event)
        if step is not None:
            counts[step] += event.count
            first.setdefault(step, event)
    lives = _of(events, "ckpt.attempt", "launcher.cycle", *SECOND_LIVES)
    if len(counts) != 1 or len(lives) + sum(e.count - 1 for e in lives) < 2:
        return []
    (step, times), *_ = counts.items()
    if times < 2 or any(e.rank is not None for e in first.values()):
        return []  # the ranks of one attempt say the same
    return [derive(catalog, "derived.ckpt.nan_again", first[step], attrs={"step": step}, explains=["loss.not_finite"])]


def first_launch(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A run that found nothing to load, has no earlier life in sight, and makes steps."""
    starts = _of(events, "ckpt.fresh_start", "ckpt.none_yet")
    steps = [e for e in events if e.kind == PROGRESS][:MOST]
    if not starts or not steps:
        return []
    start = min(starts, key=_line)
    older = [e for e in _of(events, "ckpt.listed") if (step_of(e) or 0) > 0]
    lives = [e for e in events if e.signature in _LIVES and follows(e, start)]
    attempts = [e for e in _of(events, "ckpt.attempt") if (number(e.attrs.get("attempt")) or 0) > 1]
    wrong = [e for e in events if catalog[e.signature].role in ("root", "symptom", "cascade")]
    if older or lives or attempts or wrong:
        return []
    begun = [e for e in steps if follows(start, e)]
    low = min((n for e in begun if (n := number(e.attrs.get("first_step"))) is not None), default=None)
    if len(begun) < len(steps) or low is None or low > FIRST_STEPS or sum(e.count for e in begun) < 2:
        return []
    return [derive(catalog, "derived.ckpt.first_launch", start)]


def began_anew(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A run that saved, and in its next life found nothing to load and counts from the beginning."""
    steps = [e for e in events if e.kind == PROGRESS][:MOST]
    saves = _of(events, "job.saving", "ckpt.announced", "ckpt.committed")
    for start in _of(events, "ckpt.fresh_start", "ckpt.none_yet"):
        before = [number(e.attrs.get("last_step")) or 0 for e in steps if follows(e, start)]
        after = [n for e in steps if follows(start, e) and (n := number(e.attrs.get("first_step"))) is not None]
        if before and after and min(after) < max(before) and any(follows(e, start) for e in saves):
            return [derive(catalog, "derived.ckpt.fresh_over_existing", start, attrs={"newest": max(before)})]
    return []


RESUME_RULES = (
    saves_repeat,
    data_again,
    rate_jumps,
    other_works,
    write_passed,
    out_for_all,
    nan_again,
    began_anew,
    first_launch,
)
"""In the order they run, after those on checkpoints and schedulers."""
