"""Ports of network devices: `ibstat`, `ibstatus`, `ibv_devinfo`, `rdma link`, `ibdev2netdev`, `mlxlink`, `ip link`.

Each tool prints a device and then, on the same line or below, state, physical state and rate in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, lines_of, make, mentions, number
from keepstep.sources.snapshots.totals import Total, total_events

WORDS = (
    "CA '", "Infiniband device", "hca_id", "rdma link", "ibdev2netdev", "==>", "link_layer", "Link layer", "Physical state",
    "link ", "mtu ", "mlx5_", "PORT_", "physical_state", "ibstat",
)  # fmt: skip

DEVICE = (
    r"(?:mlx[45]_(?:bond_)?\d+|rocep\w+|ibp\w+|bnxt_re\d+|irdma\d+|efa_\d+|rdmap\w+|hfi1_\d+|roce\w+\d|erdma_\d+|ib\d+)"
)
_DEVICE_LINE = re.compile(
    r"\s*(?:CA '(?P<ca>[\w.-]+)'|Infiniband device '(?P<sys>[\w.-]+)' port (?P<sysport>\d+) status:?|hca_id:\s*(?P<hca>[\w.-]+))"
)
_RDMA = re.compile(
    r"\s*(?:\d+/\d+:\s*)?link (?P<nic>[\w.-]+)/(?P<port>\d+).*?\bstate (?P<state>\w+)"
    r"(?:\s+physical_state (?P<physical>\w+))?"
)
_DEV2NET = re.compile(r"\s*(?P<nic>[\w.-]+) port (?P<port>\d+) ==> (?P<net>[\w.-]+) \((?P<state>\w+)\)")
_IP = re.compile(
    r"\s*(?:\d+:\s*)?(?P<nic>[a-z][\w.@-]*):\s*<(?P<flags>[A-Z_,0-9-]*)>.*?\bmtu (?P<mtu>\d+)(?:.*?\bstate (?P<state>\w+))?"
)
_SHORT = re.compile(
    rf"\b(?P<nic>{DEVICE})(?:[ /:]+(?:port )?\d{{1,2}})?[\s:=,]+(?:state\s*)?(?:\d: ?)?"
    r"(?P<state>Active|ACTIVE|Down|DOWN|Init|INIT|Armed|Polling|Disabled|PORT_\w+)\b"
)
_PORT = re.compile(r"\s*[Pp]ort:?\s+(?P<port>\d{1,2}):?\s*\Z")
_PAIR = re.compile(r"\s*(?P<key>[A-Za-z][A-Za-z _]{1,40}?)\s*:\s*(?P<value>\S.*?)\s*\Z")
_KEYS = {
    "state": "state",
    "physical state": "physical",
    "phys state": "physical",
    "phys_state": "physical",
    "rate": "rate",
    "link layer": "layer",
    "link_layer": "layer",
    "active_mtu": "mtu",
    "active_width": "width",
    "active_speed": "speed",
    "width": "width",
    "speed": "speed",
    "firmware version": "firmware",
    "fw_ver": "firmware",
    "recommendation": "advice",
    "link down counter": "link_downed",
    "link error recovery counter": "link_error_recovery",
    "symbol errors": "symbol_error",
}
_UP = frozenset({"active", "linkup", "link_up", "up", "port_active", "lower_up"})
_DOWN = frozenset(
    {
        "down",
        "init",
        "armed",
        "initializing",
        "polling",
        "disabled",
        "port_down",
        "port_init",
        "sleep",
        "training",
        "no-carrier",
    }
)


class Port(NamedTuple):
    """A port as far as a tool told it. `told`: the values under the names of `_KEYS`, as printed."""

    nic: str
    port: str
    line: Line
    told: dict[str, str]

    @property
    def up(self) -> bool | None:
        """Whether it carries traffic; None when no state was told."""
        state, physical = word(self.told.get("state", "")), word(self.told.get("physical", ""))
        if state in _DOWN or physical in _DOWN:
            return False
        return True if state in _UP else None

    @property
    def rate_gbps(self) -> float | None:
        """The rate in Gb/s, where it was told."""
        return number(self.told.get("rate", ""))


def word(text: str) -> str:
    """The state in "4: ACTIVE", "PORT_ACTIVE (4)", "Active"; lower case."""
    match = re.search(r"[A-Za-z][\w-]*", text)
    return match.group().lower() if match is not None else ""


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of ports; None when no tool's form was found."""
    if not mentions(document, WORDS):
        return None
    ports = list(read(document))
    if not ports:
        return None
    return (port_events(ports, document, catalog) + total_events(_totals(ports), document, catalog))[:EVENTS_LIMIT]


def port_events(ports: list[Port], document: Document, catalog: Catalog) -> list[Event]:
    """Every port as context, and an event for each that is down."""
    events = []
    for port in ports:
        attrs = {**port.told, "port": port.port, "up": port.up, "rate_gbps": port.rate_gbps}
        if port.up is False:
            ethernet = port.told.get("layer", "").lower() == "ethernet" or "flags" in port.told
            signature = "nic.port_down_ethernet" if ethernet else "nic.port_down"
            events.append(make(catalog, signature, document, port.line, nic=port.nic, attrs=attrs))
        events.append(make(catalog, "nic.port", document, port.line, nic=port.nic, attrs=attrs))
    return events


def read(document: Document) -> Iterator[Port]:
    """All ports that the document shows."""
    device = port = ""
    current: Port | None = None
    titled = re.search(rf"\b({DEVICE})\b", document.title)
    if "mlxlink" in document.title and titled is not None:
        device = titled.group(1)
    for line in lines_of(document):
        one_line = list(_one_line(line))
        head = _DEVICE_LINE.match(line.text)
        place = _PORT.match(line.text)
        if one_line or head is not None or place is not None:
            if current is not None and current.told.keys() & {"state", "physical"}:
                yield current
            current = None
        yield from one_line
        if head is not None:
            device = head["ca"] or head["sys"] or head["hca"]
            port = head["sysport"] or ""
        if place is not None:
            port = place["port"]
        pair = _PAIR.match(line.text)
        if pair is None or not device or pair["key"].lower() not in _KEYS:
            continue
        key = _KEYS[pair["key"].lower()]
        if current is None or (key in current.told and key == "state"):
            if current is not None:
                yield current
            current = Port(device, port, line, {})
        current.told.setdefault(key, pair["value"])
        if key == "state":
            current = current._replace(line=line)
    if current is not None and current.told.keys() & {"state", "physical"}:
        yield current


def _one_line(line: Line) -> Iterator[Port]:
    """Ports of tools that print one a line, and of short forms that people paste."""
    if match := _RDMA.match(line.text):
        told = {"state": match["state"]} | ({"physical": match["physical"]} if match["physical"] else {})
        yield Port(match["nic"], match["port"], line, told)
    elif match := _DEV2NET.match(line.text):
        yield Port(match["nic"], match["port"], line, {"state": match["state"], "net": match["net"]})
    elif match := _IP.match(line.text):
        name = match["nic"].split("@")[0]
        if name == "lo" or name.startswith(
            ("docker", "veth", "cni", "cali", "flannel", "br-", "virbr", "tun", "dummy")
        ):
            return
        state = (
            "no-carrier"
            if "NO-CARRIER" in match["flags"]
            else match["state"] or ("up" if "LOWER_UP" in match["flags"] else "")
        )
        told = {"state": state, "flags": match["flags"], "mtu": match["mtu"]}
        yield Port(name, "", line, told)
    elif not _DEVICE_LINE.match(line.text):
        for short in _SHORT.finditer(line.text):
            yield Port(short["nic"], "", line, {"state": short["state"]})


def _totals(ports: list[Port]) -> Iterator[Total]:
    """Error counters that mlxlink prints beside the state."""
    for port in ports:
        for key in ("link_downed", "link_error_recovery", "symbol_error"):
            value = number(port.told.get(key, ""))
            if value is not None:
                yield Total(key, value, port.line, nic=port.nic, port=port.port, family="nic")
