"""The parser of scheduler records: every reader of this package looks at the document, since excerpts come mixed."""

from __future__ import annotations

import re
from collections.abc import Callable

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

Reader = Callable[[Document, Catalog], list[Event]]

_SLURM_TABLE = re.compile(r"(?i)jobid|nodelist|hostnames")
_COMMAND = re.compile(r"(?:\S*/)?(?:squeue|sinfo|sacct)\b")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of everything in a document that a scheduler, kubectl, a cgroup or a checkpoint folder printed; None for none."""
    if len(document.lines) > MAX_LINES:
        return None
    text = "\n".join(line.raw for line in document.lines)
    found: list[Event] = []
    for reader in _readers(text, document.title.strip()):
        found += reader(document, catalog)
    return found or None


def _readers(text: str, title: str) -> list[Reader]:
    """The readers that can find something in a text: a log is looked at by none of them more than once."""

    def has(*words: str) -> bool:
        return any(word in text for word in words)

    wanted: list[tuple[bool, Reader]] = [
        (_COMMAND.match(title) is not None or _SLURM_TABLE.search(text) is not None, slurm.table_events),
        (has("JobId=", "NodeName="), slurm.scontrol_events),
        (has("SLURM_JOB"), slurm.environment_events),
        (has("STATUS") and has("READY", "ROLES", "VERSION"), kubetext.table_events),
        (has("Error", "OOMKilled", "BackOff", "Evicted"), kubetext.headless_pod_events),
        (has("Exit Code:", "Restart Count:", "Last State:", "Allocatable:", "Node:"), kubetext.describe_events),
        (has("DisruptionTarget"), kubetext.condition_events),
        (has("LastTransitionTime"), kubetext.node_condition_events),
        (has("kind", "phase", "onditions", "containerStatuses", '"jobs"', '"nodes"'), _all_objects),
        (has("memory.") or "memory." in title, memory_events),
        (True, folder_events),
    ]
    return [reader for able, reader in wanted if able]


def _all_objects(document: Document, catalog: Catalog) -> list[Event]:
    return [e for item in objects(document) for e in _object(item, document, catalog)]


def _object(item: Found, document: Document, catalog: Catalog) -> list[Event]:
    if is_pod(item.value):
        return list(pod_events(item, document, catalog))
    if isinstance(item.value.get("meta"), dict) and ("jobs" in item.value or "nodes" in item.value):
        return slurm.json_events(item.value, item.line, document, catalog)
    return list(object_events(item, document, catalog))
