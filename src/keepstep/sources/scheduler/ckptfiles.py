"""Checkpoint folders as somebody looked at them: tracker files, listings, and the exit status after a run.

Tracker files: `latest_checkpointed_iteration.txt` of Megatron-LM holds an iteration (or "release"), `latest` of DeepSpeed the name
of a folder ("global_step1000").
"""

from __future__ import annotations

import re

from keepstep.catalog.ckptnames import is_staging
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.scheduler.making import note

MAX_LISTED = 1000
"""Checkpoints of one listing that get an event each."""

_TRACKER = re.compile(r"(?:^|[/\s])(?:latest_checkpointed_iteration\.txt|latest_iteration\.txt|latest)\s*$")
_LIST = re.compile(r"^(?:[\w.-]{1,63}: )?(?:ls|ll|find|tree|du|aws s3 ls|gsutil ls|gcloud storage ls)\b")
_STEP = re.compile(r"(?:global_step|step|iter|checkpoint|ckpt|epoch|iteration)[-_=]?(\d{1,12})")
_NAME = re.compile(r"(?:^|/)(?:global_step|step|iter|checkpoint|ckpt|epoch|iteration)[-_=]?(\d{1,12})(?:\.\w+)?/?$")
_BARE = re.compile(r"\d{1,12}/?")
_PLAIN = re.compile(r"\d{1,12}/?|\S*[._/-]\S*|latest\w*")
"""What a name in a plain listing looks like; a line of other words is no part of the listing."""


def folder_events(document: Document, catalog: Catalog) -> list[Event]:
    """What a listing, a tracker file or `echo $?` says; by the title of the document, since their content says little."""
    title = document.title.strip()
    if title in ("echo $?", "echo rc=$?", "echo $status"):
        return _status(document, catalog)
    tracked = _tracker(document, catalog) if _TRACKER.search(title) else []
    # `ls DIR; cat TRACKER`: a number alone is what the tracker holds.
    return [*tracked, *(_listing(document, catalog, bare=not tracked) if _LIST.match(title) else [])]


def _status(document: Document, catalog: Catalog) -> list[Event]:
    for line in document.lines:
        match = re.fullmatch(r"(?:rc=)?(\d{1,3})", line.raw.strip())
        if match is not None:
            return [note(catalog, "ckpt.exit_status", document, line, attrs={"code": int(match[1])})]
    return []


def _tracker(document: Document, catalog: Catalog) -> list[Event]:
    for line in reversed(list(document.lines)):
        match = re.fullmatch(r"(?:global_step_?|iter_)?(\d{1,12})", line.raw.strip())
        if match is not None:
            return [note(catalog, "ckpt.tracker", document, line, attrs={"step": match[1]})]
    return []


def _listing(document: Document, catalog: Catalog, *, bare: bool = True) -> list[Event]:
    found: list[Event] = []
    for line in document.lines:
        words = line.raw.split()
        # `ls -l` ends with the name; plain `ls` has names only, which of bare numbers are steps of orbax.
        names = words[-1:] if len(words) > 5 and re.match(r"[-dl][rwxsStT-]{9}", words[0]) else words
        plain = len(words) == len(names) and all(_PLAIN.fullmatch(w) for w in words)
        for name in names:
            match = _NAME.search(name)
            step = match[1] if match else name.rstrip("/") if bare and plain and _BARE.fullmatch(name) else None
            signature = "ckpt.listed"
            if is_staging(name):
                within = _STEP.search(name)
                step, signature = (within[1] if within else None), "ckpt.listed_staging"
            if step is not None and len(found) < MAX_LISTED:
                found.append(note(catalog, signature, document, line, attrs={"step": step, "name": name}))
    return found
