"""What runs pods on Kubernetes: nodes, Jobs, JobSets, TrainJobs, Kueue Workloads, and Events as objects.

Formats: core/v1 Node and Event, events.k8s.io/v1 Event, batch/v1 Job, jobset.x-k8s.io/v1alpha2, kueue.x-k8s.io/v1beta1 and v1beta2,
trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.scheduler.making import Maker, note
from keepstep.sources.scheduler.objects import Found, get, line_of, list_at, number_at, text_at

NODE_TAINTS = {
    "node.kubernetes.io/unreachable": "k8s.node_not_ready",
    "node.kubernetes.io/not-ready": "k8s.node_not_ready",
    "node.kubernetes.io/unschedulable": "k8s.node_cordoned",
}
_JOB_KINDS = frozenset({"Job", "JobSet", "TrainJob", "PyTorchJob", "MPIJob", "RayJob", "TFJob", "XGBoostJob"})
_DEVICES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "habana.ai/gaudi", "google.com/tpu", "rdma/ib")


def object_events(found: Found, document: Document, catalog: Catalog) -> Iterator[Event]:
    """Events of an object that is no pod; none for kinds that tell nothing here."""
    kind = text_at(found.value, "kind")
    if kind == "Node" or (not kind and _is_node(found.value)):
        yield from node_object_events(found, document, catalog)
    elif kind == "Workload" or (not kind and _condition_types(found.value) & {"QuotaReserved", "Evicted", "PodsReady"}):
        yield from _workload(found, document, catalog)
    elif kind in _JOB_KINDS:
        yield from _job(found, document, catalog)


def _condition_types(value: Mapping[str, Any]) -> frozenset[str]:
    status = value.get("status") if isinstance(value.get("status"), dict) else value
    return frozenset(text_at(c, "type") for c in list_at(status, "conditions"))


def _is_node(value: Mapping[str, Any]) -> bool:
    status = get(value, "status")
    return isinstance(status, dict) and ("nodeInfo" in status or isinstance(status.get("allocatable"), dict))


def node_object_events(found: Found, document: Document, catalog: Catalog) -> Iterator[Event]:
    """A node: every condition as it stands, taints, and fewer devices than there are."""
    value = found.value
    node = text_at(value, "metadata", "name") or None

    def made(signature: str, *words: str, at: object = None, **attrs: Any) -> Event:
        return note(catalog, signature, document, line_of(found, *words), at=at, node=node, attrs=attrs)

    for condition in list_at(value, "status", "conditions"):
        yield from node_condition(condition, made)
    if text_at(value, "spec", "unschedulable").lower() == "true":
        yield made("k8s.node_cordoned", "unschedulable")
    for taint in list_at(value, "spec", "taints"):
        key = text_at(taint, "key")
        if key in NODE_TAINTS:
            yield made(
                NODE_TAINTS[key], key, at=text_at(taint, "timeAdded"), taint=key, effect=text_at(taint, "effect")
            )
    for device in _DEVICES:
        have, want = number_at(value, "status", "allocatable", device), number_at(value, "status", "capacity", device)
        if have is not None and want is not None and have < want:
            yield made("k8s.node_gpus_missing", device, device=device, allocatable=have, capacity=want)


def node_condition(condition: Mapping[str, Any], made: Maker) -> Iterator[Event]:
    """A condition of a node, and what it says where it is one that the kubelet sets."""
    kind, state, reason = text_at(condition, "type"), text_at(condition, "status"), text_at(condition, "reason")
    if not kind or state not in ("True", "False", "Unknown"):
        return
    at = text_at(condition, "lastTransitionTime")
    attrs = {
        "condition": kind, "status": state, "reason": reason, "message": text_at(condition, "message"),
        "transition": at, "heartbeat": text_at(condition, "lastHeartbeatTime"),
    }  # fmt: skip
    if kind == "Ready":
        if state != "True":
            yield made("k8s.node_not_ready", reason or "Ready", at=at, **attrs)
        return
    if state == "True" and kind in ("MemoryPressure", "DiskPressure", "PIDPressure"):
        yield made("k8s.node_pressure", kind, at=at, **attrs)
    yield made("k8s.node_condition", kind, at=at, **attrs)


def _workload(found: Found, document: Document, catalog: Catalog) -> Iterator[Event]:
    """A Workload of Kueue: conditions that are True now. What a condition tells that is False is past."""
    value = found.value
    status = value["status"] if isinstance(value.get("status"), dict) else value
    job = text_at(value, "metadata", "name") or None
    for condition in list_at(status, "conditions"):
        kind, reason = text_at(condition, "type"), text_at(condition, "reason")
        if text_at(condition, "status") != "True" or kind not in ("Evicted", "Preempted"):
            continue
        signature = "kueue.preempted" if kind == "Preempted" or reason == "Preempted" else "kueue.evicted"
        attrs = {"condition": kind, "reason": reason, "message": text_at(condition, "message")}
        attrs["requeues"] = text_at(status, "requeueState", "count")
        at = text_at(condition, "lastTransitionTime")
        yield note(catalog, signature, document, line_of(found, reason), at=at, job=job, attrs=attrs)
    for unhealthy in list_at(status, "unhealthyNodes"):
        node = text_at(unhealthy, "name")
        attrs = {"by": "kueue unhealthyNodes"}
        yield note(
            catalog, "k8s.node_not_ready", document, line_of(found, node), node=node or None, job=job, attrs=attrs
        )


def _job(found: Found, document: Document, catalog: Catalog) -> Iterator[Event]:
    """A Job, JobSet, TrainJob or one of the older training kinds."""
    value = found.value
    name = text_at(value, "metadata", "name") or None
    for path in (("status", "restarts"), ("status", "restartsCountTowardsMax")):
        count = number_at(value, *path)
        if count:
            most = number_at(value, "spec", "failurePolicy", "maxRestarts")
            attrs = {"restarts": count, "most": most, "field": path[-1]}
            yield note(catalog, "jobset.restarts", document, line_of(found, path[-1]), job=name, attrs=attrs)
            break
    for condition in list_at(value, "status", "conditions"):
        kind, reason = text_at(condition, "type"), text_at(condition, "reason")
        message = text_at(condition, "message")
        if text_at(condition, "status") != "True" or kind not in ("Failed", "FailureTarget"):
            continue
        signature = "k8s.job_deadline" if reason == "DeadlineExceeded" else "k8s.job_failed"
        if "DisruptionTarget" in message:
            signature = "k8s.policy_disruption"
        at = text_at(condition, "lastTransitionTime")
        attrs = {"condition": kind, "reason": reason, "message": message}
        yield note(catalog, signature, document, line_of(found, reason), at=at, job=name, attrs=attrs)
