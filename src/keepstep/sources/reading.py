"""Paths -> events: finds what is there, has each file read as what it is (onefile.py), and says what could not be read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.catalog.matcher import Matcher
from keepstep.catalog.words import lean_of
from keepstep.records.event import Event, Evidence
from keepstep.sources import runfolder, staleness
from keepstep.sources.documents import Document, Origin, split
from keepstep.sources.facts import Facts
from keepstep.sources.folders import Found, Skipped, find
from keepstep.sources.names import Hints, of_path
from keepstep.sources.onefile import (
    WORDS_LIMIT,
    Gathered,
    Told,
    Used,
    below_top,
    completed,
    read_documents,
    read_file,
    read_stream,
)
from keepstep.sources.runfolder import RunFolder
from keepstep.sources.sharing import shared_out
from keepstep.sources.skew import Skew, add_skew, estimate
from keepstep.sources.storms import dedupe, drop_copies

STDIN = "-"
TEXT_WORDS = "text.words"
POOL_FROM_FILES = 256
POOL_FROM_BYTES = 64 << 20
"""From either on several processes read: each needs a second before it has compiled all patterns."""
PART_FILES = 32


class Answered(NamedTuple):
    """What a live source said (sources/live): text that is read as a file of this `name` would be, or events.

    `node`: whose it is, None for a cluster's. `notes`: what it could not say, and why.
    """

    name: str
    text: str = ""
    events: Sequence[Event] = ()
    node: str | None = None
    notes: Sequence[str] = ()


class Reading(NamedTuple):
    """Events in the order they were found; what they came from; what could not be read, and what was left out, and why.

    `dumps`: flight-recorder dumps that were seen; they are not read here. `skew`: by how much the clocks of nodes seem to differ.
    """

    events: list[Event]
    used: list[Used]
    unreadable: list[str]
    skipped: Sequence[Skipped] = ()
    dumps: Sequence[str] = ()
    skew: Sequence[Skew] = ()
    facts: Facts = Facts()
    size_bytes: int = 0

    def span_ns(self) -> tuple[int, int] | None:
        """The first and the last time of the events, None without any."""
        times = [t for e in self.events for t in (e.time_ns, e.last_ns) if t is not None]
        return (min(times), max(times)) if times else None


def read_text(path: str, text: str, catalog: Catalog, matcher: Matcher, origin: Origin | None = None) -> Reading:
    """Everything that one text tells."""
    whole = Gathered(catalog, matcher, deep=True)
    read_documents(whole, split(path, text, origin or Origin()))
    return _finished(whole)


class _Task(NamedTuple):
    """Files to read, with the run folder that each is in."""

    files: Sequence[tuple[Found, Path | None]]
    catalog: Catalog
    deep: bool


def read_paths(
    paths: Sequence[str],
    catalog: Catalog,
    *,
    matcher: Matcher | None = None,
    deep: bool = True,
    answers: Sequence[Answered] = (),
    jobs: int = 1,
) -> Reading:
    """Everything that files and folders tell; "-" is standard input. A file that cannot be read is named; the others are read.

    `answers`: what live sources said, read with them. `deep`: cut pieces out of large logs for the parsers of
    documents; without it, only lines that match are taken from those. `jobs`: processes that many files are shared out over.
    """
    whole = Gathered(catalog, matcher or Matcher(catalog), deep)
    runs: dict[Path, RunFolder] = {}
    waiting: list[tuple[Found, Path | None]] = []
    for name in paths:
        if name == STDIN:
            _read_files(whole, waiting, runs, jobs)
            waiting = []
            # What is piped in is read as a file that was written now: times without a day are of today or yesterday.
            read_stream(whole, sys.stdin.buffer, STDIN, Origin(of_path(""), time.time_ns()))
            continue
        top = runfolder.folder_of(Path(name))
        if top is not None and top not in runs:
            runs[top] = runfolder.read_run_folder(top)
        for one in find(name):
            if isinstance(one, Skipped):
                whole.skipped.append(one)
            else:
                waiting.append((one, top))
    _read_files(whole, waiting, runs, jobs)
    for answer in answers:
        _take_answer(whole, answer)
    return _finished(whole)


def _read_files(
    whole: Gathered, files: Sequence[tuple[Found, Path | None]], runs: Mapping[Path, RunFolder], jobs: int
) -> None:
    """Add what the files tell, in their order, with the places of ranks where they are of a run folder."""
    for (found, top), told in zip(files, _told(whole, files, jobs), strict=True):
        if top is not None:
            below = below_top(found, top)
            told = told._replace(events=[runfolder.place(e, runs[top], below) for e in told.events])  # noqa: PLW2901
        whole.take(told)


def _told(whole: Gathered, files: Sequence[tuple[Found, Path | None]], jobs: int) -> Iterator[Told]:
    if jobs < 2 or not _are_many([found.path for found, _ in files]):
        for found, top in files:
            yield read_file(found, top, whole.catalog, whole.matcher, whole.deep).told()
        return
    tasks = [_Task(files[at : at + PART_FILES], whole.catalog, whole.deep) for at in range(0, len(files), PART_FILES)]
    _matchers[whole.catalog.digest] = whole.matcher
    done = dict(shared_out(_read_task, tasks, jobs))
    for number in range(len(tasks)):
        yield from done.pop(number)


def _are_many(paths: Sequence[Path]) -> bool:
    if len(paths) >= POOL_FROM_FILES:
        return True
    return len(paths) > PART_FILES and sum(map(_size, paths)) >= POOL_FROM_BYTES


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_task(task: _Task) -> list[Told]:
    """What each file of a task tells. Runs in any process."""
    matcher = _matcher_of(task.catalog)
    return [read_file(found, top, task.catalog, matcher, task.deep).told() for found, top in task.files]


_matchers: dict[str, Matcher] = {}


def _matcher_of(catalog: Catalog) -> Matcher:
    """The patterns of a catalog, compiled once a process: each task brings its own copy of it."""
    known = _matchers.get(catalog.digest)
    if known is None:
        known = _matchers[catalog.digest] = Matcher(catalog)
    return known


def _take_answer(whole: Gathered, answer: Answered) -> None:
    whole.unreadable += [f"{answer.name}: {note}" for note in answer.notes]
    if answer.text:
        whole.size_bytes += len(answer.text)
        read_documents(whole, split(answer.name, answer.text, Origin(Hints(node=answer.node))), chosen=False)
    elif answer.events or not answer.notes:
        document = Document(answer.name, "", (), answer.node)
        whole.events += completed(answer.events, document)
        whole.used.append(Used(answer.name, "", "live", len(answer.events)))


def _finished(whole: Gathered) -> Reading:
    facts = Facts(
        tuple(b for f in whole.facts for b in f.boots),
        tuple(r for f in whole.facts for r in f.repairs),
        tuple(s for f in whole.facts for s in f.last_seq),
    )
    events = drop_copies(dedupe(whole.events))
    events = staleness.replayed(events, dict(facts.last_seq))
    events = staleness.before_repairs(events, facts.repairs)
    events = staleness.from_previous_boots(events, facts.boots)
    skew = estimate(events)
    return Reading(
        events=[*add_skew(events, skew), *_lean_event(whole)],
        used=whole.used,
        unreadable=whole.unreadable,
        skipped=whole.skipped,
        dumps=whole.dumps,
        skew=skew,
        facts=facts,
        size_bytes=whole.size_bytes,
    )


def _lean_event(whole: Gathered) -> list[Event]:
    """What the words lean to, as an event; none of a long text, where they lean to nothing, or where only lines are asked for."""
    lean = lean_of(whole.words) if whole.deep and 0 < whole.characters <= WORDS_LIMIT else None
    if lean is None or TEXT_WORDS not in whole.catalog:
        return []
    entry = whole.catalog[TEXT_WORDS]
    attrs = {"lean": lean.fault_class, "margin": lean.margin, "words": list(lean.words)}
    path = whole.used[0].path if whole.used else ""
    return [
        Event(
            id=f"{TEXT_WORDS}/{path}",
            kind=entry.kind,
            signature=entry.id,
            severity=entry.severity,
            source="text",
            attrs=attrs,
            evidence=Evidence(path=path),
        )
    ]
