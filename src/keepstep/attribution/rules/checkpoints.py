"""What several facts about checkpoints say together: what is durable, what was lost on resume, who wrote what when.

A step counts as saved when a marker or tracker file on storage says so, not when a save was announced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from keepstep.attribution.order import compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.scheduler import ENDS, HUNG
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MISSING = frozenset({"python.file_missing", "ckpt.part_missing"})
UNREADABLE = frozenset({"ckpt.torn_file", "ckpt.no_metadata"})
KILLS = frozenset(
    {"exit.sigkill", "exit.sigterm", "signal.stop_received", "exit.stopped_from_outside", "slurm.user_signal"}
)
MAX_FACTS = 300
"""Facts of one kind that are compared pairwise; more of them say the same."""


_PIECE = re.compile(
    r"(?:global_step|step|iter\w*|checkpoint|ckpt|epoch)[-_=]?\d+/|\.distcp\b|/\.metadata\b|_optim_states|_model_states"
)
"""Paths of parts of checkpoints."""
_STEPS = re.compile(r"(?i)\b(\w+)[ :.]{1,3}(?:step|iter\w*)[ =:]+(\d{1,15})\b|\b(\w+)[ :.]{1,3}(\d{1,15})\b")
LEAST_GROWTH = 1.15
"""Factor by which host memory grows from one save to the next, of at least three, before it is the saves that keep it."""


def broken(events: Iterable[Event]) -> list[Event]:
    """Checkpoints that cannot be read: damaged or unfinished files, or a part of one that is not there."""
    found = _of(events, *UNREADABLE, *MISSING)
    return [e for e in found if e.signature in UNREADABLE or _PIECE.search(e.evidence.text)]


def step_of(event: Event) -> int | None:
    """The step that a fact is about."""
    text = str(event.attrs.get("step", ""))
    return int(text) if text.isdigit() and len(text) < 16 else None


def value_differs(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A value, other than a loss, that is not the same after a resume as before; or a state dict that is not the one loaded."""
    for event in _of(events, "ckpt.value_compare"):
        before, after = _number(event.attrs.get("before")), _number(event.attrs.get("after"))
        named = re.search(
            r"(?i)\b(?:loss|ppl|perplexity|accuracy|time|took|elapsed|seconds|mem\w*|rss)\b", event.evidence.text
        )
        if before is not None and after is not None and before != after and named is None:
            return [derive(catalog, "derived.ckpt.value_differs", event)]
    loaded, now = _of(events, "ckpt.state_dict_loaded"), _of(events, "ckpt.state_dict_now")
    for one, other in zip(loaded, now, strict=False):
        same = "".join(str(one.attrs.get("state")).split()) == "".join(str(other.attrs.get("state")).split())
        if not same and compare(one, other) in ("before", None):
            return [derive(catalog, "derived.ckpt.value_differs", other)]
    return []


def _number(value: object) -> float | None:
    try:
        return float(str(value).rstrip("."))
    except ValueError:
        return None


def epochs_shrank(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Epochs that are much shorter after a resume than before: the rest of one is taken for all."""
    lengths = []
    for event in _of(events, "ckpt.epoch_length"):
        count = str(event.attrs.get("count", ""))
        if count.isdigit() and len(count) < 16:
            lengths.append((int(count), event))
    if len(lengths) < 3 or not any(e.signature == "ckpt.resumed" for e in events):
        return []
    (first, _), *rest = lengths
    short = [e for n, e in rest if 2 * n < first]
    # The epoch that was interrupted is short by right; the one after it is not.
    return [derive(catalog, "derived.ckpt.epochs_shrank", short[-1])] if len(short) > 1 else []


def mixed_steps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Parts of one checkpoint that are of different steps."""
    for event in _of(events, "ckpt.component_steps"):
        steps = {m[2] for m in _STEPS.finditer(event.evidence.text) if m[2]}
        if len(steps) > 1:
            return [derive(catalog, "derived.ckpt.mixed_steps", event, attrs={"steps": sorted(steps)[:8]})]
    return []


def memory_grows(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Host memory that grows with every save: the saver keeps its copies."""
    points: dict[int, float] = {}
    facts = _of(events, "ckpt.memory_at_save")
    for event in facts:
        step, amount = step_of(event), str(event.attrs.get("amount", ""))
        if step is not None and re.fullmatch(r"\d{1,9}(?:\.\d{1,6})?", amount):
            scale = {"m": 1.0, "g": 1024.0, "t": 1024.0**2}[str(event.attrs.get("unit", "g"))[:1].lower()]
            points[step] = float(amount) * scale
    values = [points[s] for s in sorted(points)]
    if len(values) < 3 or not all(b >= LEAST_GROWTH * a for a, b in pairwise(values)):
        return []
    explains = ["oom.cgroup", "oom.global", "k8s.oom_killed", "slurm.job_oom"]
    return [derive(catalog, "derived.ckpt.memory_grows", facts[0], explains=explains, placed=False)]


def _of(events: Iterable[Event], *signatures: str) -> list[Event]:
    return [e for e in events if e.signature in signatures][:MAX_FACTS]


def storage_first(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Storage that failed some ranks, and others that waited for them until their watchdog: one cause."""
    failed = [
        e
        for e in events
        if e.kind.startswith("storage.") and catalog[e.signature].role == "root" and e.severity in ("error", "fatal")
    ]
    waits = [e for e in events if e.kind in HUNG][:MAX_FACTS]
    for first in failed[:64]:
        later = [w for w in waits if compare(first, w) == "before"]
        if later:
            return [derive(catalog, "derived.ckpt.storage_stall", first, attrs={"waiting": len(later)}, placed=False)]
    return []


def torn_by_kill(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A checkpoint that cannot be read after its writer was killed: the save was cut off and written in place."""
    ends = [e for e in events if e.kind in ENDS or e.signature in KILLS or e.kind in ("host.oom", "sched.oom")][
        :MAX_FACTS
    ]
    for bad in broken(events):
        before = [e for e in ends if compare(e, bad) in ("before", None)]
        if before:
            explains = sorted({e.signature for e in before})
            return [derive(catalog, "derived.ckpt.torn_by_kill", before[0], explains=[*explains, bad.signature])]
    return []


def reported_good(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A step whose save was reported as good, and that cannot be read: the report was wrong, or something happened since."""
    claimed = {s: e for e in _of(events, "ckpt.committed") if (s := step_of(e)) is not None}
    for bad in broken(events):
        numbers = {int(n) for n in re.findall(r"\d{1,15}", bad.evidence.text)}
        claim = next((e for s, e in claimed.items() if s in numbers and compare(e, bad) in ("before", None)), None)
        if claim is not None:
            explains = sorted({bad.signature, "fs.no_space", "ckpt.dcp_exception"})
            return [derive(catalog, "derived.ckpt.reported_good", claim, explains=explains, placed=False)]
    return []


def announced_only(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The newest step that is durable, where a later one was announced: a fact for whoever resumes."""
    announced = [s for e in _of(events, "ckpt.announced") if (s := step_of(e)) is not None]
    proofs = _of(events, "ckpt.tracker") or _of(events, "ckpt.committed")
    durable = [s for e in proofs if (s := step_of(e)) is not None]
    if not announced or not durable or max(announced) <= max(durable):
        return []
    attrs = {"announced": max(announced), "committed": max(durable)}
    return [derive(catalog, "derived.ckpt.announced_only", proofs[-1], attrs=attrs)]


def fresh_over_existing(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Training that starts from nothing although checkpoints are there."""
    starts = _of(events, "ckpt.fresh_start")
    there = [e for e in _of(events, "ckpt.listed", "ckpt.committed", "ckpt.tracker") if (step_of(e) or 0) > 0]
    for start in starts:
        # A listing shows what is there whenever it was taken; a save that was reported counts only if it was before.
        older = [e for e in there if e.signature != "ckpt.committed" or compare(e, start) in ("before", None)]
        if older:
            newest = max(step_of(e) or 0 for e in older)
            return [derive(catalog, "derived.ckpt.fresh_over_existing", start, attrs={"newest": newest})]
    return []


def _odd_rank(restored: Sequence[Event]) -> Event | None:
    """The last that restored another position than others did; None where a rank did so twice, in several attempts."""
    for what in sorted({str(e.attrs.get("what")).lower() for e in restored}):
        values: dict[int | None, set[str]] = {}
        alike = [e for e in restored if str(e.attrs.get("what")).lower() == what]
        for event in alike:
            values.setdefault(event.rank, set()).add(str(event.attrs.get("value")))
        if all(len(v) == 1 for v in values.values()) and len(set().union(*values.values())) > 1:
            first = str(alike[0].attrs.get("value"))
            return [e for e in alike if str(e.attrs.get("value")) != first][-1]
    return None


def state_differs(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """State that came back other than it was saved: per rank, or a position of the data."""
    found = []
    pairs = [
        (e, str(e.attrs.get("saved", "")).lower(), str(e.attrs.get("restored", "")).lower())
        for e in _of(events, "ckpt.state_compare")
    ]
    wrong = [(e, saved, restored) for e, saved, restored in pairs if saved and restored and saved != restored]
    if wrong:
        one = len({restored for _, _, restored in pairs}) == 1 and len(pairs) > 1
        attrs = {"ranks": len(wrong), "of": len(pairs), "one_copy": one}
        found.append(derive(catalog, "derived.ckpt.state_differs", wrong[0][0], attrs=attrs, placed=False))
    odd = None if wrong else _odd_rank(_of(events, "ckpt.rank_restored"))
    if odd is not None:
        found.append(derive(catalog, "derived.ckpt.state_differs", odd, attrs={"one_copy": False}, placed=False))
    for event in _of(events, "ckpt.staged_compare"):
        if str(event.attrs.get("saved")).lower() != str(event.attrs.get("restored")).lower():
            found.append(derive(catalog, "derived.ckpt.staged_differs", event))
            break
    for event in _of(events, "ckpt.position"):
        if str(event.attrs.get("got")) != str(event.attrs.get("expected")):
            found.append(derive(catalog, "derived.ckpt.position_differs", event))
            break
    return found


def nothing_done(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A resume after which no step was made although the run says that it ended well."""
    resumes = _of(events, "ckpt.resumed")
    ends = [*_of(events, "job.train_ended", "job.finished_rank")]
    ends += (e for e in _of(events, "ckpt.exit_status") if e.attrs.get("code") == 0)
    for stuck in _of(events, "ckpt.zero_progress"):
        at = _bar(stuck)
        if at is not None and at[0] >= at[1] > 0:
            continue  # the work was done before
        after = [e for e in ends if compare(stuck, e) in ("before", None)]
        from_here = [r for r in resumes if compare(r, stuck) in ("before", "together", None)]
        if after and from_here and not _moved(events, from_here[-1], stuck):
            return [derive(catalog, "derived.ckpt.nothing_done", stuck)]
    return []


def _bar(event: Event) -> tuple[int, int] | None:
    step, total = str(event.attrs.get("step", "")), str(event.attrs.get("total", ""))
    return (int(step), int(total)) if step.isdigit() and total.isdigit() and len(step + total) < 32 else None


def _moved(events: Sequence[Event], resumed: Event, stuck: Event) -> bool:
    """Whether a step beyond the resumed one was seen after it."""
    begin = step_of(resumed)
    at = _bar(stuck)
    for event in events:
        if event.kind != "job.progress" or compare(event, resumed) == "before":
            continue
        last = event.attrs.get("last_step")
        if isinstance(last, int) and last > max(begin or 0, at[0] if at else 0):
            return True
    return False


def finalised_early(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A step that was called complete while one of its files was still being written."""
    for writing in _of(events, "ckpt.still_writing"):
        step = step_of(writing)
        for done in _of(events, "ckpt.tracker", "ckpt.committed"):
            if step is not None and step_of(done) == step and compare(done, writing) == "before":
                return [derive(catalog, "derived.ckpt.finalised_early", done, attrs={"step": step})]
    return []


def two_writers(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A writer of an attempt that should be dead, at work after a later attempt had begun."""
    attempts = [(a, e) for e in _of(events, "ckpt.attempt", "ckpt.late_writer") if (a := _attempt(e)) is not None]
    for number, late in attempts:
        if late.signature != "ckpt.late_writer":
            continue
        if any(other > number and compare(e, late) == "before" for other, e in attempts):
            explains = ["ckpt.exists_already", "python.user_exception", "ckpt.save_failed"]
            attrs = {"attempt": number}
            return [
                derive(
                    catalog,
                    "derived.ckpt.two_writers",
                    late,
                    attrs=attrs,
                    explains=[s for s in explains if s in catalog],
                )
            ]
    return []


def _attempt(event: Event) -> int | None:
    text = str(event.attrs.get("attempt", ""))
    return int(text) if text.isdigit() and len(text) < 9 else None


def pruned_too_early(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An older checkpoint that was deleted before the newer one was complete, which then never was."""
    bad = _of(events, *UNREADABLE, "ckpt.save_failed", "fs.no_space", "fs.quota")
    for pruned in _of(events, "ckpt.pruned"):
        proven = [
            e for e in _of(events, "ckpt.committed", "ckpt.tracker") if (step_of(e) or 0) > (step_of(pruned) or 0)
        ]
        if any(compare(e, pruned) == "before" for e in proven):
            continue
        if any(e.signature in UNREADABLE or compare(pruned, e) == "before" for e in bad):
            return [derive(catalog, "derived.ckpt.pruned_too_early", pruned)]
    return []


def save_outlasts(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A save that took longer than the time after which the other ranks gave up waiting."""
    for save in _of(events, "ckpt.save_took"):
        seconds = _number(save.attrs.get("seconds"))
        for wait in _of(events, "torch.watchdog_timeout"):
            limit = _number(wait.attrs.get("timeout_ms"))
            if seconds is not None and limit is not None and 0 < limit / 1000 <= seconds:
                attrs = {"seconds": seconds, "limit_s": limit / 1000}
                return [derive(catalog, "derived.ckpt.save_outlasts", save, attrs=attrs, placed=False)]
    return []


def stalled_in_checkpoint(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks that waited until their watchdog while some were in the code of a checkpoint, with no other cause in sight."""
    at_work = _of(events, "ckpt.at_work")
    waits = [e for e in events if e.kind == "collective.timeout"]
    roots = [e for e in events if catalog[e.signature].role == "root" and e.severity in ("error", "fatal")]
    if roots or not any(compare(a, w) in ("before", None) for a in at_work for w in waits[:16]):
        return []
    return [derive(catalog, "derived.ckpt.stalled", at_work[0], placed=False)]


def believed_saved(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A file that is missing because its save failed unnoticed: the failed save is the cause, not the missing file."""
    failed = [e for e in events if e.kind == "checkpoint.failed" or e.kind.startswith("storage.")][:MAX_FACTS]
    steps = {s for e in _of(events, "ckpt.announced") if (s := step_of(e)) is not None}
    for missing in _of(events, *MISSING):
        numbers = {int(n) for n in re.findall(r"\d{1,15}", missing.evidence.text)}
        cause = next((e for e in failed if e.signature not in MISSING and compare(e, missing) == "before"), None)
        if cause is not None and steps & numbers:
            return [derive(catalog, "derived.ckpt.believed_saved", cause, explains=sorted(MISSING), placed=False)]
    return []


def save_recovered(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A save that failed and then succeeded, with nothing else wrong."""
    failed = [e for e in events if e.signature in ("ckpt.save_failed", "storage.save_connection")]
    for first in reversed(failed[:MAX_FACTS]):
        later = [e for e in _of(events, "ckpt.committed") if compare(first, e) == "before"]
        if later and not any(compare(later[-1], f) == "before" for f in failed):
            return [derive(catalog, "derived.ckpt.save_recovered", later[-1])]
    return []


CHECKPOINT_RULES = (
    storage_first,
    torn_by_kill,
    reported_good,
    announced_only,
    value_differs,
    epochs_shrank,
    mixed_steps,
    memory_grows,
    fresh_over_existing,
    state_differs,
    nothing_done,
    finalised_early,
    two_writers,
    pruned_too_early,
    save_outlasts,
    believed_saved,
    save_recovered,
    stalled_in_checkpoint,
)
"""In the order they run."""
