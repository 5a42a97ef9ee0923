"""What Kubernetes knows about a job: its pods, its controllers, Kueue's workloads, events, and the pods' nodes, by kubectl.

Only `get`. Kinds that a cluster does not have are passed over with a note.
"""

from __future__ import annotations

import re

from keepstep.records.errors import ConfigError
from keepstep.sources.live.commands import Runner, Transcript, run, transcript

KINDS = ("jobs.batch", "jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org", "workloads.kueue.x-k8s.io")
MAX_NODES = 64
"""Nodes of a job that are asked about in one call."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SELECTOR = re.compile(r"[\w./!=,() -]{1,500}")
_NODE = re.compile(r'"nodeName"\s*:\s*"([a-z0-9][a-z0-9.-]{0,252})"')


def kubernetes_transcript(namespace: str, selector: str, runner: Runner = run) -> Transcript:
    """Everything about pods that a label selector picks, as a transcript for `reading.read_text`.

    Raises ConfigError when namespace or selector cannot be one.
    """
    if not _NAME.fullmatch(namespace):
        raise ConfigError(f"{namespace!r} is no namespace; kubectl get namespaces lists them")
    if not _SELECTOR.fullmatch(selector) or selector.startswith("-"):
        raise ConfigError(f"{selector!r} is no label selector; write one such as jobset.sigs.k8s.io/jobset-name=NAME")
    base = ["kubectl", "-n", namespace, "get"]
    pods = transcript([[*base, "pods", "-l", selector, "-o", "json"]], runner)
    if not pods.text:
        return pods
    rest = transcript([[*base, kind, "-o", "json"] for kind in KINDS], runner)
    rest_events = transcript([[*base, "events", "--sort-by=.lastTimestamp"]], runner)
    names = sorted(set(_NODE.findall(pods.text)))[:MAX_NODES]
    nodes = transcript([["kubectl", "get", "nodes", *names, "-o", "json"]] if names else [], runner)
    parts = (pods, rest, rest_events, nodes)
    return Transcript("".join(p.text for p in parts), [n for p in parts for n in p.notes])
