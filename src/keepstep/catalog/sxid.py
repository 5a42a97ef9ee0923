"""Entries of SXid codes, which the driver of NVSwitch prints: `sxid.<code>` and, where the line says otherwise, a variant.

Facts are in `data/sxid.csv`, judgement in the sxid tables of `data/xid_policy.toml`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from keepstep.catalog.signature import Signature
from keepstep.catalog.tables import rows
from keepstep.catalog.xid import policy


class SxidFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of sxid.csv. The fabric manager guide calls some codes always fatal, others fatal to the jobs on a port."""

    sxid: int
    name: str
    potential_fatal: bool
    always_fatal: bool
    gpud_event: str
    gpud_repair: str
    version: str
    source: str

    @property
    def usually(self) -> str:
        """The judgement that holds unless the line says otherwise."""
        return "always_fatal" if self.always_fatal else "fatal" if self.potential_fatal else "nonfatal"


@functools.cache
def sxid_facts() -> Mapping[int, SxidFacts]:
    """All codes of the table."""
    found = msgspec.convert(rows("sxid.csv"), list[SxidFacts], strict=False)
    return {fact.sxid: fact for fact in found}


def entries() -> Iterator[Signature]:
    """Entries of all codes, each with the variant that its line may say, and those of codes in no table."""
    for fact in sxid_facts().values():
        own = policy()["sxid_code"].get(str(fact.sxid), {})
        title, source = f"SXid {fact.sxid}: {fact.name}", f"{fact.source}, {fact.version}"
        yield _entry(f"sxid.{fact.sxid}", title, source, policy()["sxid"][fact.usually] | own)
        if not own:
            other = "fatal" if fact.usually == "nonfatal" else "nonfatal"
            yield _entry(f"sxid.{fact.sxid}.{other}", f"{title} ({other})", source, policy()["sxid"][other])
    for variant in ("fatal", "nonfatal"):
        judged = policy()["sxid"][variant]
        yield _entry(f"sxid.unknown.{variant}", f"SXid that is in no table ({variant})", "keepstep", judged)
    yield _entry("sxid.unknown", "SXid that is in no table", "keepstep", policy()["sxid"]["unknown"])


def _entry(signature_id: str, title: str, source: str, judged: dict[str, Any]) -> Signature:
    fields = {"id": signature_id, "kind": "nvswitch.sxid", "title": title, "source": source, **judged}
    return msgspec.convert(fields, Signature)
