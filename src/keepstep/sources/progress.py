"""Lines that show training going on: steps that are counted up, beside a number that only a running step has.

Wanted is the line that a training loop prints every step. Not wanted are sentences about steps: a checkpoint of one that is saved,
loaded or resumed from, one that failed, a limit.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Evidence, bounded
from keepstep.sources.documents import Document, Line
from keepstep.sources.moments import moments_in

SIGNATURE = "job.progress"
LINE_LIMIT = 2000
"""Characters of a line that are looked at."""

_QUICK = re.compile(r"(?i)step|iter|epoch|it/s|s/it|%\||\|loss|:::mll")
_STEP = re.compile(
    r"(?i)(?<![\w/.-])(?:global[_ ]?step|train(?:ing)?[_ ]step|step|iteration|iter|it|update|batch)s?\b[\"']?\s{0,3}[:=#]?\s{0,8}"
    r"(?P<step>\d{1,12})(?:\s{0,3}(?:/|of)\s{0,8}(?P<of>\d{1,12}))?(?![\w.]*[a-zA-Z%])"
)
_EPOCH = re.compile(r"(?i)(?<![\w/.-])epoch[\"']?\s{0,3}[:=#]?\s{0,3}\[?(?P<epoch>\d{1,7})(?:\.\d+)?\b")
_BAR = re.compile(
    r"%\|[^|]{0,200}\|\s*(?P<step>\d{1,12})/(?P<of>\d{1,12})\s*\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+),\s*"
    r"(?P<rate>[\d.?]+)\s*(?P<unit>s/\w+|\w+/s)"
)
_PIPES = re.compile(r"(?i)(?<![\w.|])(?P<epoch>\d{1,7})\|(?P<step>\d{1,12})\|loss: ?[\d.]")
"""torchtune: "1|2114|Loss: 1.4021"."""
_MLPERF = re.compile(
    r':::MLL(?:OG)? \{.{0,160}"key": ?"'
    r'(?:(?P<made>block_stop|epoch_stop|tracked_stats|throughput|train_loss|train_accuracy|eval_accuracy)")?'
)
"""A record of MLPerf's log; `made`: of something that only a running job has measured (mlcommons/logging, constants.py)."""
_MLPERF_STEP = re.compile(r'"(?:step_num|samples_count|step)\": ?(?P<step>\d{1,12})\b')
_MLPERF_EPOCH = re.compile(r'"epoch_num\": ?(?P<epoch>\d{1,7})')
_BEFORE_NOT = re.compile(
    r"(?i)sav|checkpoint|ckpt|resum|restor|load|restart|fail|error|exception|timeout|timed|stuck|hang|killed|skip|eval|valid|test|"
    r"expected|mismatch|until|before|after|max|total|every|limit|warm|delet|remov|upload|from|last|behind|straggler|detect|reach|nan|seq|"
    r"\bat\b|\bto\b"
)
_BESIDE = re.compile(
    r"(?i)loss|\blr\b|learning.rate|grad|\bms\b|time|tokens|samples|throughput|elapsed|mfu|flops|tgs\b|it/s|s/it|/s\b|sec|"
    r"\b(?:begin|done|finished|completed)\b|reward|perplexity|ppl|acc(?:uracy)?\b|mem(?:ory)?\b|\beta\b"
)
_TRAINING = re.compile(r"(?i)train|epoch|step|iter|progress|\A[\s\W]*\Z")


class Progress(NamedTuple):
    """A step that was made. `of`: how many there will be."""

    step: int | None
    epoch: int | None
    of: int | None = None


def progress_in(text: str) -> Progress | None:
    """What a line says about training going on; None for every other line."""
    head = text[:LINE_LIMIT]
    if _QUICK.search(head) is None:
        return None
    mlperf = _MLPERF.search(head)
    if mlperf is not None:
        if mlperf["made"] is None:
            return None
        step, epoch = _MLPERF_STEP.search(head), _MLPERF_EPOCH.search(head)
        return Progress(None if step is None else int(step["step"]), _int(epoch))
    pipes = _PIPES.search(head)
    if pipes is not None:
        return Progress(int(pipes["step"]), int(pipes["epoch"]))
    percent = head.find("%|")
    bar = _BAR.match(head, percent) if percent >= 0 else None
    if bar is not None:
        what = head[max(percent - 80, 0) : percent].rstrip("0123456789 ")
        moving = bar["rate"].strip("?0.") != ""
        if not moving or _TRAINING.search(what) is None or _BEFORE_NOT.search(what) is not None:
            return None
        return Progress(int(bar["step"]), None, int(bar["of"]))
    epoch = _EPOCH.search(head)
    step = _STEP.search(head)
    if step is not None:
        before = head[: step.start()]
        beside = before + head[step.end() : step.end() + 400]
        told = _BESIDE.search(beside) is not None or (step["of"] is not None and epoch is not None)
        if not told or _BEFORE_NOT.search(_words_before(before)) is not None:
            return None
        return Progress(int(step["step"]), _int(epoch), None if step["of"] is None else int(step["of"]))
    if epoch is not None and "loss" in head and _BEFORE_NOT.search(_words_before(head[: epoch.start()])) is None:
        return Progress(None, _int(epoch))
    return None


def _words_before(text: str) -> str:
    """The last words before a step: a logger's name and file stand further left."""
    return text[-30:]


def _int(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(match["epoch"])


class _Seen:
    __slots__ = ("before_last", "count", "first", "first_step", "last", "last_step")

    def __init__(self, line: Line, made: Progress) -> None:
        self.first = self.last = self.before_last = line
        self.first_step = self.last_step = made
        self.count = 0


MAX_WRITERS = 20_000


def progress_events(document: Document, catalog: Catalog) -> list[Event]:
    """One event a writer (rank, node, pod) of a document: from its first step there to its last."""
    if SIGNATURE not in catalog:
        return []
    seen: dict[tuple[object, ...], _Seen] = {}
    near_ns: int | None = None
    for line in document.lines:
        near_ns = line.time_ns if line.time_ns is not None else near_ns
        whole = None if line.stream == "kernel" else progress_in(line.text)
        if whole is None:
            continue
        for moment in moments_in(line, near_ns):
            made = whole if moment.text is line.text else progress_in(moment.text)
            if made is not None:
                _add(seen, moment.line, made)
    return [_event(document, held) for held in seen.values()]


def _add(seen: dict[tuple[object, ...], _Seen], line: Line, made: Progress) -> None:
    key = (line.rank, line.node, line.pod, line.tag)
    held = seen.get(key)
    if held is None:
        if len(seen) >= MAX_WRITERS:
            return
        held = seen[key] = _Seen(line, made)
    held.before_last, held.last, held.last_step = held.last, line, made
    held.count += 1


def _event(document: Document, held: _Seen) -> Event:
    first, last = held.first_step, held.last_step
    attrs: dict[str, object] = {
        "last_order": held.last.number,
        "before_last_order": held.before_last.number,
        "last_quality": held.last.time_quality,
    }
    for name, value in (
        ("step", last.step),
        ("epoch", last.epoch),
        ("of", last.of),
        ("first_step", first.step),
        ("last_step", last.step),
    ):
        if value is not None:
            attrs[name] = value
    line = held.first
    return Event(
        kind=SIGNATURE,
        signature=SIGNATURE,
        source=document.title or "text",
        order=line.number,
        time_ns=line.time_ns,
        time_quality=line.time_quality,
        node=line.node,
        rank=line.rank,
        attrs=attrs,
        evidence=Evidence(path=document.path, line=line.number, text=bounded(line.raw)),
        count=held.count,
        last_ns=held.last.time_ns,
    )
