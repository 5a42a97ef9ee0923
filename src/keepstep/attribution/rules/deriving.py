"""How a rule makes an event: at the time and place in the text of one that it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu


def derive(
    catalog: Catalog,
    signature: str,
    cause: Event,
    *,
    attrs: Mapping[str, Any] | None = None,
    explains: Sequence[str] = (),
    node: str | None = None,
    gpu: Gpu | None = None,
    nic: str | None = None,
    rank: int | None = None,
    placed: bool = True,
) -> Event:
    """An event of an entry, resting on `cause`. `explains`: ids of signs that it makes no news of. `rank`: the one that it is
    about; where another told, the node is not known unless it is given. `placed` False: it is about no machine, whatever `cause`
    names."""
    entry = catalog[signature]
    told_by_itself = rank is None or rank == cause.rank
    return Event(
        kind=entry.kind,
        signature=signature,
        severity=entry.severity,
        source=cause.source,
        time_ns=cause.time_ns,
        time_quality=cause.time_quality,
        boot_ns=cause.boot_ns,
        boot_id=cause.boot_id,
        order=cause.order,
        node=(node or (cause.node if told_by_itself else None)) if placed else None,
        gpu=(gpu or cause.gpu) if placed else None,
        nic=(nic or cause.nic) if placed else None,
        rank=(cause.rank if rank is None else rank) if placed else None,
        cycle=cause.cycle,
        attrs={"explains": list(explains), **(attrs or {})},
        evidence=cause.evidence,
    )
