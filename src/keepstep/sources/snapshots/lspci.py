"""`lspci -vvv`: links below what they can do, ACS on bridges, devices that do not answer, error status that stayed set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.coded import pci_address
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, gpu_named, lines_of, make, mentions

WORDS = ("LnkSta", "ACSCtl", "(rev ff)", "Unknown header type", "UESta", "LnkCap")

_DEVICE = re.compile(
    r"(?P<bdf>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<kind>[^:]{2,60}): (?P<name>.+)", re.IGNORECASE
)
_CAP = re.compile(r"LnkCap:.*?Speed (?P<speed>[\d.]+) ?GT/s[^,]*, Width x(?P<width>\d+)")
_STA = re.compile(
    r"LnkSta:\s*Speed (?P<speed>[\d.]+) ?GT/s(?: \((?P<slow>[^)]*)\))?[^,]*, Width x(?P<width>\d+)(?: \((?P<narrow>[^)]*)\))?"
)
_ACS = re.compile(r"ACSCtl:\s*(?P<flags>[A-Za-z+\- ]+)")
_FATAL = re.compile(r"UESta:\s*(?P<flags>[A-Za-z+\- ]+)")
_SERIOUS = ("DLP+", "SDES+", "TLP+", "FCP+", "CmpltTO+", "RxOF+", "MalfTLP+", "ECRC+")


class Device(NamedTuple):
    """A device and its lines. `kind`: as lspci names its class."""

    bdf: str
    kind: str
    name: str
    line: Line | None
    lines: list[Line]

    @property
    def what(self) -> str:
        """gpu, nic, bridge or other."""
        text = f"{self.kind} {self.name}".lower()
        if "bridge" in text or "pcieport" in text:
            return "bridge"
        if "nvidia" in text and ("3d controller" in text or "vga" in text or "controller" in self.kind.lower()):
            return "gpu"
        if any(
            word in text for word in ("mellanox", "connectx", "infiniband", "ethernet controller", "network controller")
        ):
            return "nic"
        return "other"


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of devices; None when the document has no line of `lspci -vvv`."""
    if not mentions(document, WORDS):
        return None
    events = [event for device in read(document) for event in _events(device, document, catalog)]
    return events[:EVENTS_LIMIT] or None


def read(document: Document) -> Iterator[Device]:
    """Devices with the lines that belong to them; lines before the first device belong to one without a name."""
    current = Device("", "", document.title, None, [])
    for line in lines_of(document):
        match = _DEVICE.match(line.text.strip())
        if match is not None:
            if current.lines:
                yield current
            current = Device(pci_address(match["bdf"]), match["kind"], match["name"], line, [line])
        else:
            current.lines.append(line)
    if current.lines:
        yield current


def _events(device: Device, document: Document, catalog: Catalog) -> Iterator[Event]:
    gpu = gpu_named(pci=device.bdf) if device.what == "gpu" else None
    nic = device.bdf if device.what == "nic" else None
    head = f"{device.kind} {device.name}".strip()[:120]
    capable: re.Match[str] | None = None
    for line in device.lines:
        if (line is device.line and "(rev ff)" in line.text) or "Unknown header type" in line.text:
            signature = "gpu.lost" if device.what == "gpu" else "pcie.device_lost"
            yield make(catalog, signature, document, line, gpu=gpu, nic=nic, attrs={"bdf": device.bdf, "device": head})
        if match := _CAP.search(line.text):
            capable = match
        if (match := _STA.search(line.text)) and (slow := _link(match, capable, device)):
            attrs = {
                "bdf": device.bdf, "device": head, "speed_gts": float(match["speed"].rstrip(".")), "width": int(match["width"][:4]),
                "loaded": None,
            }  # fmt: skip
            yield make(catalog, slow, document, line, gpu=gpu, nic=nic, attrs=attrs)
        if (match := _ACS.search(line.text)) and _acs_redirects(match["flags"]):
            yield make(catalog, "pcie.acs_on", document, line, attrs={"bdf": device.bdf, "device": head})
        if (match := _FATAL.search(line.text)) and any(flag in match["flags"] for flag in _SERIOUS):
            attrs = {"bdf": device.bdf, "device": head, "flags": [f for f in _SERIOUS if f in match["flags"]]}
            yield make(catalog, "pcie.errors_latched", document, line, gpu=gpu, nic=nic, attrs=attrs)


def _link(match: re.Match[str], capable: re.Match[str] | None, device: Device) -> str | None:
    """The entry for a link below what the device can do; None when it is not, or cannot be told."""
    slow = match["slow"] == "downgraded" or (
        match["slow"] is None and capable is not None and _number(match["speed"]) < _number(capable["speed"])
    )
    narrow = match["narrow"] == "downgraded" or (
        match["narrow"] is None and capable is not None and int(match["width"]) < int(capable["width"])
    )
    if not (slow or narrow) or device.what == "bridge" or int(match["width"]) == 0:
        return None
    if device.what == "nic":
        return "pcie.nic_degraded"
    # The speed of an idle GPU says nothing; its width seldom changes.
    return "gpu.pcie_unclear" if device.what == "gpu" else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _acs_redirects(flags: str) -> bool:
    """Whether requests between two devices below the bridge are sent up to the root complex."""
    return any(flag in flags for flag in ("ReqRedir+", "CmpltRedir+", "UpstreamFwd+")) or "SrcValid+" in flags
