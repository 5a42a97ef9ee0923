"""The parser of scheduler records: every reader of this package looks at the document, since excerpts come mixed."""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.scheduler import kubetext, slurm
from keepstep.sources.scheduler.cgroup import memory_events
from keepstep.sources.scheduler.ckptfiles import folder_events
from keepstep.sources.scheduler.kubejobs import object_events
from keepstep.sources.scheduler.kubepods import is_pod, pod_events
from keepstep.sources.scheduler.objects import Found, objects

MAX_LINES = 400_000
"""Lines of a document that is looked at as a whole; no record of a scheduler is longer, and logs are read line by line."""

_HINT = re.compile(
    r"(?i)jobid|jobstate|nodename=|nodelist|slurm|apiversion|kind:|\"kind\"|status|conditions|restart|exit code|capacity|memory\.|"
    r"hostnames|latest|global_step|iter_|checkpoint|step"
)


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of everything in a document that a scheduler, kubectl, a cgroup or a checkpoint folder printed; None for none."""
    if len(document.lines) > MAX_LINES:
        return None
    named = document.title.strip()
    if not (named or any(_HINT.search(line.raw) for line in document.lines[:2000])):
        return None
    found = slurm.table_events(document, catalog)
    found += slurm.scontrol_events(document, catalog)
    found += slurm.environment_events(document, catalog)
    found += kubetext.table_events(document, catalog)
    found += kubetext.describe_events(document, catalog)
    found += kubetext.condition_rows(document, catalog)
    found += kubetext.node_condition_events(document, catalog)
    for item in objects(document):
        found += _object(item, document, catalog)
    found += memory_events(document, catalog)
    found += folder_events(document, catalog)
    return found or None


def _object(item: Found, document: Document, catalog: Catalog) -> list[Event]:
    if is_pod(item.value):
        return list(pod_events(item, document, catalog))
    slurm_like = isinstance(item.value.get("meta"), dict) and ("jobs" in item.value or "nodes" in item.value)
    if slurm_like:
        return slurm.json_events(item.value, item.line, document, catalog)
    return list(object_events(item, document, catalog))
