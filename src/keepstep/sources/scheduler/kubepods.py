"""Pods: why they were taken away, how their containers ended, why they do not start.

Formats: core/v1 Pod (kubectl get -o yaml|json) of Kubernetes 1.26 and later; condition DisruptionTarget from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.scheduler.making import Maker, note
from keepstep.sources.scheduler.objects import Found, get, line_of, list_at, number_at, text_at

PHASES = frozenset({"Pending", "Running", "Succeeded", "Failed", "Unknown"})

DISRUPTIONS = {
    "PreemptionByScheduler": "k8s.preempted",
    "PreemptionByKubeScheduler": "k8s.preempted",
    "EvictionByEvictionAPI": "k8s.evicted",
    "DeletionByTaintManager": "k8s.taint_eviction",
    "DeletionByPodGC": "k8s.node_gone",
    "TerminationByKubelet": "k8s.node_shutdown",
    "WorkloadEvictedDueToPreempted": "kueue.preempted",
    "Preempted": "kueue.preempted",
}
"""Reasons of the conditions DisruptionTarget (core) and TerminationTarget (Kueue)."""

WAITING = {
    "ErrImagePull": "k8s.image_pull",
    "ImagePullBackOff": "k8s.image_pull",
    "InvalidImageName": "k8s.image_missing",
    "ErrImageNeverPull": "k8s.image_missing",
    "CrashLoopBackOff": "k8s.crash_loop",
    "CreateContainerConfigError": "k8s.config_missing",
    "CreateContainerError": "k8s.runtime_failed",
    "RunContainerError": "k8s.runtime_failed",
}
"""Reasons of state.waiting."""

STATUS_REASONS = {
    "NodeLost": "k8s.node_gone",
    "NodeShutdown": "k8s.node_shutdown",
    "Terminated": "k8s.node_shutdown",
    "Shutdown": "k8s.node_shutdown",
    "Preempting": "k8s.preempted",
    "UnexpectedAdmissionError": "k8s.admission_devices",
    "DeadlineExceeded": "k8s.job_deadline",
}
"""status.reason of a pod that failed without its containers' doing. Evicted: its message tells why."""

_STATUSES = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


def is_pod(value: Mapping[str, Any]) -> bool:
    """Whether an object, or an excerpt of one, is a Pod."""
    kind = text_at(value, "kind")
    if kind:
        return kind == "Pod"
    status = value.get("status") if isinstance(value.get("status"), dict) else value
    return text_at(status, "phase") in PHASES or any(isinstance(get(status, s), list) for s in _STATUSES)


def pod_events(found: Found, document: Document, catalog: Catalog) -> Iterator[Event]:
    """Everything that a pod tells."""
    value = found.value
    status = value["status"] if isinstance(value.get("status"), dict) else value
    node = text_at(value, "spec", "nodeName") or None
    name = text_at(value, "metadata", "name")
    job = text_at(value, "metadata", "labels", "jobset.sigs.k8s.io/jobset-name") or None
    phase = text_at(status, "phase")
    gone = text_at(value, "metadata", "deletionTimestamp")
    shared = {"pod": name, "namespace": text_at(value, "metadata", "namespace")}

    def made(signature: str, *words: str, at: object = None, **attrs: Any) -> Event:
        line = line_of(found, *words)
        return note(catalog, signature, document, line, at=at, node=node, job=job, attrs=shared | attrs)

    if phase or gone:
        yield made(
            "k8s.pod_state", "phase:" if phase else "", phase=phase, deleting=bool(gone) or None, at=gone or None
        )
    reason, message = text_at(status, "reason"), text_at(status, "message")
    signature = status_signature(reason, message)
    if signature is not None:
        yield made(signature, reason, reason=reason, message=message)
    for condition in list_at(status, "conditions"):
        yield from _condition(condition, made)
    for kind in _STATUSES:
        for container in list_at(status, kind):
            yield from _container(container, made)


def status_signature(reason: str, message: str) -> str | None:
    """The entry for a pod's own reason and message."""
    by_message = pressure(message)
    if by_message is not None:
        return by_message
    if reason.startswith("OutOf") and "/" in reason:
        return "k8s.admission_devices"
    return STATUS_REASONS.get(reason) or ("k8s.evicted" if reason == "Evicted" else None)


def pressure(message: str) -> str | None:
    """What the kubelet's eviction message says: the node's resource, or the pod's own limit."""
    text = message.lower()
    if "exceeds the total limit" in text or "local ephemeral storage limit" in text or "exceeds the limit" in text:
        return "k8s.own_disk_limit"
    if "low on resource: memory" in text or "[memorypressure]" in text:
        return "k8s.node_pressure_memory"
    if "low on resource" in text or "[diskpressure]" in text:
        return "k8s.node_pressure_disk"
    return "k8s.node_shutdown" if "node shutdown" in text else None


def _condition(condition: Mapping[str, Any], made: Maker) -> Iterator[Event]:
    kind, reason = text_at(condition, "type"), text_at(condition, "reason")
    message = text_at(condition, "message")
    if text_at(condition, "status") != "True" or kind not in ("DisruptionTarget", "TerminationTarget"):
        return
    at = text_at(condition, "lastTransitionTime")
    signature = (pressure(message) if reason == "TerminationByKubelet" else None) or DISRUPTIONS.get(reason)
    if signature is None:
        signature = "kueue.evicted" if kind == "TerminationTarget" or "Workload" in reason else "k8s.evicted"
    yield made(signature, reason, at=at, condition=kind, reason=reason, message=message)


def _container(container: Mapping[str, Any], made: Maker) -> Iterator[Event]:
    name = text_at(container, "name")
    restarts = number_at(container, "restartCount")
    waiting = text_at(container, "state", "waiting", "reason")
    if waiting in WAITING:
        message = text_at(container, "state", "waiting", "message")
        yield made(WAITING[waiting], waiting, container=name, message=message, restarts=restarts)
    for which in ("lastState", "state"):
        ended = get(container, which, "terminated")
        if isinstance(ended, dict):
            yield from terminated(ended, name, restarts, which == "lastState", made)


def terminated(
    ended: Mapping[str, Any], name: str, restarts: int | None, earlier: bool, made: Maker
) -> Iterator[Event]:
    """How a container ended. Exit code 137 alone is a kill by whomever; only OOMKilled names memory."""
    reason, code, signal = text_at(ended, "reason"), number_at(ended, "exitCode"), number_at(ended, "signal")
    if signal is None and code is not None and 128 < code <= 192:
        signal = code - 128
    attrs = {"container": name, "restarts": restarts, "reason": reason, "code": code, "signal": signal}
    attrs |= {"message": text_at(ended, "message"), "earlier": earlier or None}
    at = text_at(ended, "finishedAt")
    if reason == "OOMKilled":
        yield made("k8s.oom_killed", "OOMKilled", at=at, **attrs)
    elif reason == "ContainerStatusUnknown":
        yield made("k8s.container_unknown", reason, at=at, **attrs)
    elif signal in (10, 12):
        yield made("slurm.user_signal", str(code), at=at, **attrs)
    elif code not in (None, 0):
        yield made("k8s.container_exit", "exitCode", at=at, **attrs)
