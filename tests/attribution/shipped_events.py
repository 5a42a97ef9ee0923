"""Short ways to make events of the shipped catalog, as the readers make them."""

from __future__ import annotations

from typing import Any

from keepstep.catalog.coded import resolve
from keepstep.catalog.load import shipped
from keepstep.records.event import Event, Evidence, Gpu, Stale

S = 1_000_000_000
T0 = 1_900_000_000 * S
A, B, C, D = (f"0000:{bus}:00.0" for bus in ("18", "2a", "3a", "5d"))


def made(signature: str, at_s: float | None = 0.0, *, gpu: Gpu | None = None, **fields: Any) -> Event:
    """An event of an entry; `at_s` seconds after T0, None without a time."""
    entry = shipped()[signature]
    return Event(
        kind=entry.kind,
        signature=signature,
        severity=entry.severity,
        time_ns=None if at_s is None else T0 + round(at_s * S),
        time_quality="none" if at_s is None else "exact",
        gpu=gpu,
        **fields,
    )


def xid(
    code: int, pci: str = A, at_s: float | None = 0.0, detail: str = "", node: str = "n1", stale: Stale | None = None
) -> Event:
    """An Xid line as the reader of the kernel log makes it."""
    by_id = {e.id: e for e in shipped()}
    entry, found = resolve(by_id["xid"], {"bdf": pci, "xid": str(code), "detail": detail}, by_id)
    text = f"NVRM: Xid (PCI:{pci[:-2]}): {code}, {detail}"
    return made(
        entry.id,
        at_s,
        gpu=Gpu(pci=pci),
        node=node,
        order=round((at_s or 0) * 1000),
        attrs=dict(found),
        evidence=Evidence(path="kern.log", line=1, text=text),
        stale=stale,
    )


def wants(action: int, was: int = 0, pci: str = A, at_s: float | None = 0.0) -> Event:
    """Xid 154."""
    return xid(154, pci, at_s, f"GPU recovery action changed from 0x{was} (x) to 0x{action} (y)")


def link(code: int, severity: str, pci: str, at_s: float = 0.0) -> Event:
    """An NVLink 5 error."""
    return xid(code, pci, at_s, f"RLW_REMAP {severity} XC0 i0 Link 03 (0x00000082 0x00000040)")


def sample(
    index: int,
    levels: dict[str, Any],
    *,
    number: int = 0,
    loaded: bool | None = True,
    node: str = "n1",
    at_s: float | None = None,
) -> Event:
    """A sample of a GPU."""
    return made(
        "gpu.sample",
        at_s,
        gpu=Gpu(index=index),
        node=node,
        order=100 * number + index,
        attrs={"levels": levels, "sample": number, "loaded": loaded},
    )


def series(
    values: dict[str, list[float]], kind: str = "compute", by: str = "rank", nodes: dict[str, str] | None = None
) -> Event:
    """A series of measurements."""
    attrs = {"metric": f"{kind}_ms", "kind": kind, "unit": "ms", "by": by, "values": values, "nodes": nodes or {}}
    return made("straggler.series", None, attrs=attrs)


def total(
    counter: str,
    value: float,
    *,
    number: int = 0,
    elapsed_s: float | None = None,
    nic: str | None = None,
    gpu: int | None = None,
    port: str = "1",
    node: str = "n1",
    rate: bool = False,
) -> Event:
    """A reading of an error counter."""
    attrs = {"counter": counter, "value": value, "port": port, "sample": number, "elapsed_s": elapsed_s, "rate": rate}
    where = None if gpu is None else Gpu(index=gpu)
    return made("counter.total", None, nic=nic, gpu=where, node=node, order=number, attrs=attrs)


def named(events: list[Event]) -> list[str]:
    """Signatures, in order."""
    return [e.signature for e in events]
