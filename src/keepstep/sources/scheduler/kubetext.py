"""What kubectl prints for people: tables of pods and nodes, and describe. Event lists are matched line by line by the catalog.

Formats: kubectl 1.20 to 1.34, `get pods|nodes [-A] [-o wide]`, `describe pod|node`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.kubejobs import NODE_TAINTS, node_condition
from keepstep.sources.scheduler.kubepods import WAITING, terminated
from keepstep.sources.scheduler.making import Maker, note
from keepstep.sources.scheduler.tables import Row, rows

_STATUS = {
    "OOMKilled": "k8s.oom_killed",
    "Error": "k8s.container_exit",
    "Evicted": "k8s.evicted",
    "UnexpectedAdmissionError": "k8s.admission_devices",
    "ContainerStatusUnknown": "k8s.container_unknown",
    "NodeShutdown": "k8s.node_shutdown",
    "Terminated": "k8s.node_shutdown",
    "NodeLost": "k8s.node_gone",
    "DeadlineExceeded": "k8s.job_deadline",
    "ContainerCannotRun": "k8s.config_missing",
    **WAITING,
}
"""STATUS column of kubectl get pods, where it is a reason."""

_POD_ROW = re.compile(
    r"(?:[\w-]+\s+)?(?P<name>[a-z0-9][\w.-]*)\s+\d+/\d+\s+(?P<status>[A-Z]\w+)\s+(?P<restarts>\d+)(?: \([^)]*\))?\s+\d+[smhd]\w*"
    r"(?:\s+(?:\d[\d.]*|<none>))?(?:\s+(?P<node>\S+))?(?:\s+<none>)*"
)
_FIELD = re.compile(r"^(?P<indent> *)(?P<key>[A-Z][A-Za-z0-9 /().-]*?):(?:\s+(?P<value>.*?))?\s*$")
_DATE = r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [+-]\d{4}"
_CONDITION = re.compile(
    rf"^\s+(?P<type>[A-Z]\w+)\s+(?P<status>True|False|Unknown)\s+(?P<heartbeat>{_DATE})\s+(?P<transition>{_DATE})"
    r"\s+(?P<reason>\w+)\s*(?P<message>.*)$"
)
_BARE = re.compile(r"^(?P<indent> +)(?P<key>[\w./-]+):\s+(?P<value>\S+)\s*$")


def table_events(document: Document, catalog: Catalog) -> list[Event]:
    """Tables of pods and nodes."""
    found: list[Event] = []
    for row in rows(document):
        cells = row.cells
        if {"ready", "status", "restarts"} <= cells.keys():
            found += _pod_row(row, document, catalog)
        elif {"status", "roles"} <= cells.keys() or {"status", "version", "age"} <= cells.keys():
            found += _node_row(row, document, catalog)
    return found


def headless_pod_events(document: Document, catalog: Catalog) -> list[Event]:
    """Rows of a table of pods whose header was not pasted, of pods that are not well."""
    found: list[Event] = []
    inside = {row.line.number for row in rows(document)}
    for line in document.lines:
        match = _POD_ROW.fullmatch(line.raw.strip()) if line.number not in inside else None
        if match is None or match["status"] not in _STATUS:
            continue
        node = match["node"] or ""
        where = node if re.fullmatch(r"[A-Za-z][\w.-]*", node) else None
        attrs = {"pod": match["name"], "reason": match["status"], "restarts": int(match["restarts"][:6])}
        found.append(note(catalog, _STATUS[match["status"]], document, line, node=where, attrs=attrs))
    return found


def _pod_row(row: Row, document: Document, catalog: Catalog) -> Iterator[Event]:
    cells = row.cells
    status = cells["status"]
    node = cells.get("node", "")
    where = node if re.fullmatch(r"[\w.-]+", node) else None
    restarts = re.match(r"\d+", cells["restarts"])
    attrs: dict[str, Any] = {
        "pod": cells.get("name"), "namespace": cells.get("namespace"), "phase": status, "ready": cells["ready"],
        "restarts": int(restarts[0]) if restarts else None, "age": cells.get("age"),
    }  # fmt: skip
    yield note(catalog, "k8s.pod_state", document, row.line, node=where, attrs=attrs)
    reason = status.removeprefix("Init:")
    if reason in _STATUS:
        yield note(catalog, _STATUS[reason], document, row.line, node=where, attrs=attrs | {"reason": reason})
    elif reason.startswith("OutOf") and "/" in reason:
        yield note(catalog, "k8s.admission_devices", document, row.line, node=where, attrs=attrs | {"reason": reason})


def _node_row(row: Row, document: Document, catalog: Catalog) -> Iterator[Event]:
    name, status = row.cells.get("name", ""), row.cells["status"].split(",")
    if not re.fullmatch(r"[\w.-]+", name):
        return
    attrs = {"status": row.cells["status"]}
    if "NotReady" in status or "Unknown" in status:
        yield note(catalog, "k8s.node_not_ready", document, row.line, node=name, attrs=attrs)
    if "SchedulingDisabled" in status:
        yield note(catalog, "k8s.node_cordoned", document, row.line, node=name, attrs=attrs)


class Field(NamedTuple):
    """A line "Key: value" of a description."""

    key: str
    value: str
    indent: int
    line: Line


def fields(document: Document) -> list[Field]:
    """All lines "Key: value" of a document."""
    found = []
    for line in document.lines:
        match = _FIELD.match(line.raw) or _BARE.match(line.raw)
        if match is not None:
            found.append(Field(match["key"], match["value"] or "", len(match["indent"]), line))
    return found


def describe_events(document: Document, catalog: Catalog) -> list[Event]:
    """`kubectl describe pod` and `describe node`, whole or in part; several objects in one text are parted by their Name."""
    found: list[Event] = []
    part: list[Field] = []
    for field in fields(document):
        if field.key == "Name" and field.indent == 0:
            found += _described(part, document, catalog)
            part = []
        part.append(field)
    return [*found, *_described(part, document, catalog)]


def _described(part: Sequence[Field], document: Document, catalog: Catalog) -> Iterator[Event]:
    top = {f.key: f.value for f in part if f.indent == 0}
    if "Capacity" in {f.key for f in part} and "Allocatable" in {f.key for f in part}:
        yield from _node_described(part, top.get("Name") or None, document, catalog)
        return
    keys = {f.key for f in part}
    if not ({"Exit Code", "Restart Count", "Last State"} & keys or ("Node" in top and "Status" in top)):
        return
    node = top.get("Node", "").partition("/")[0]
    where = node if re.fullmatch(r"[\w.-]+", node) else None
    attrs = {"pod": top.get("Name"), "namespace": top.get("Namespace")}
    for field in part:
        if field.indent == 0 and field.key == "Status" and field.value:
            state = attrs | {"phase": field.value, "deleting": "Terminating" in field.value or None}
            yield note(catalog, "k8s.pod_state", document, field.line, node=where, attrs=state)
        elif field.indent == 0 and field.key == "Reason" and field.value in _STATUS:
            more = attrs | {"reason": field.value, "message": top.get("Message")}
            yield note(catalog, _STATUS[field.value], document, field.line, node=where, attrs=more)
    yield from _states(part, where, attrs, document, catalog)


def _states(
    part: Sequence[Field], node: str | None, attrs: dict[str, Any], document: Document, catalog: Catalog
) -> Iterator[Event]:
    """State and Last State of containers: blocks of deeper fields below them."""
    for index, head in enumerate(part):
        if head.key not in ("State", "Last State") or head.value not in ("Terminated", "Waiting"):
            continue
        inner: dict[str, Field] = {}
        for field in part[index + 1 :]:
            if field.indent <= head.indent:
                break
            inner.setdefault(field.key, field)
        restarts = next((f.value for f in part[index + 1 :] if f.key == "Restart Count"), "")
        times = int(restarts) if restarts.isdigit() and len(restarts) < 9 else None
        reason = inner["Reason"].value if "Reason" in inner else ""

        made = _maker(inner.get("Reason", head).line, node, attrs, document, catalog)
        if head.value == "Waiting":
            if reason in WAITING:
                yield made(WAITING[reason], reason=reason, restarts=times)
            continue
        ended = {
            "reason": reason,
            "exitCode": inner["Exit Code"].value if "Exit Code" in inner else "",
            "signal": inner["Signal"].value if "Signal" in inner else "",
            "message": inner["Message"].value if "Message" in inner else "",
            "finishedAt": inner["Finished"].value if "Finished" in inner else "",
        }
        yield from terminated(ended, "", times, head.key == "Last State", made)


def _maker(line: Line, node: str | None, attrs: Mapping[str, Any], document: Document, catalog: Catalog) -> Maker:
    """Makes events of one container, at its line."""

    def made(signature: str, *_words: str, at: object = None, **more: Any) -> Event:
        return note(catalog, signature, document, line, at=at, node=node, attrs={**attrs, **more})

    return made


def _node_described(part: Sequence[Field], node: str | None, document: Document, catalog: Catalog) -> Iterator[Event]:
    """Devices that are not allocatable, and taints."""
    amounts: dict[str, dict[str, Field]] = {"Capacity": {}, "Allocatable": {}}
    section = ""
    for field in part:
        if field.key in amounts:
            section = field.key
            inline = re.match(r"([\w./-]+):\s+(\d+)$", field.value)
            if inline is not None:
                amounts[section][inline[1]] = field._replace(value=inline[2])
        elif section and field.indent > 0:
            amounts[section].setdefault(field.key, field)
        else:
            section = ""
    for device, want in amounts["Capacity"].items():
        have = amounts["Allocatable"].get(device)
        if "/" in device and have is not None and want.value.isdigit() and have.value.isdigit():
            numbers = {"allocatable": int(have.value[:9]), "capacity": int(want.value[:9])}
            if numbers["allocatable"] < numbers["capacity"]:
                attrs = {"device": device, **numbers}
                yield note(catalog, "k8s.node_gpus_missing", document, have.line, node=node, attrs=attrs)
    for field in part:
        if field.key == "Taints":
            for key, signature in NODE_TAINTS.items():
                if key in field.value:
                    yield note(catalog, signature, document, field.line, node=node, attrs={"taint": key})


def node_condition_events(document: Document, catalog: Catalog) -> list[Event]:
    """The table of conditions in a description of a node: Type Status LastHeartbeatTime LastTransitionTime Reason Message."""
    node = next((f.value for f in fields(document) if f.key == "Name" and f.indent == 0), None)
    found: list[Event] = []
    for line in document.lines:
        match = _CONDITION.match(line.raw)
        if match is None:
            continue

        def made(signature: str, *_words: str, at: object = None, _line: Line = line, **attrs: Any) -> Event:
            return note(catalog, signature, document, _line, at=at, node=node or None, attrs=attrs)

        condition = {
            "type": match["type"], "status": match["status"], "lastHeartbeatTime": match["heartbeat"],
            "lastTransitionTime": match["transition"], "reason": match["reason"], "message": match["message"],
        }  # fmt: skip
        found += node_condition(condition, made)
    return found


def condition_events(document: Document, catalog: Catalog) -> list[Event]:
    """The table of conditions inside a description of a pod: DisruptionTarget True, without its reason."""
    return [
        note(catalog, "k8s.evicted", document, line, attrs={"condition": "DisruptionTarget"})
        for line in document.lines
        if line.raw[:1] == " " and line.raw.split() == ["DisruptionTarget", "True"]
    ]
