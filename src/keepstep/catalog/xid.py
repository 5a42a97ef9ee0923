"""What is known of NVIDIA's Xid codes, and the catalog entries made from it.

Facts: `data/xid.csv`, one row a code, with what other tools do about it. Judgement: `data/xid_policy.toml`, by family of codes,
by code, by variant of a code. Together they make the entries `xid.<code>` and `xid.<code>.<variant>`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from keepstep.catalog.signature import Signature
from keepstep.catalog.tables import data_text, rows

NVLINK5_CODES = range(144, 151)
"""Codes whose meaning is in the registers printed with them (Blackwell and later)."""
RECOVERY_ACTIONS = ("none", "reset", "reboot", "drain_p2p", "drain_and_reset")
"""What Xid 154 asks for, by its number (NVML's nvmlDeviceGpuRecoveryAction_t)."""
UNKNOWN = "xid.unknown"


class XidFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of xid.csv. `immediate` and `investigatory`: NVIDIA's buckets; `severity` follows the immediate one."""

    xid: int
    name: str
    family: str
    immediate: str
    severity: str
    meaning: str
    investigatory: str
    gpud_event: str
    gpud_repair: str
    gcm_causes: str
    gcm_critical: str
    k8s_device_plugin_default_ignores: str
    eks_agent_condition: str
    azure_nhc_fails: str
    nvsentinel_sticky: str
    version: str
    source: str


@functools.cache
def xid_facts() -> Mapping[int, XidFacts]:
    """All codes of the table."""
    found = msgspec.convert(rows("xid.csv"), list[XidFacts], strict=False)
    return {fact.xid: fact for fact in found}


@functools.cache
def policy() -> Mapping[str, Any]:
    """The judgement on families, codes and variants."""
    return tomllib.loads(data_text("xid_policy.toml"))


def fields_of(code: int | None, variant: str = "") -> dict[str, Any]:
    """Fields of an entry, from family, code and variant; a later one overrides. `None`: a code that is in no table."""
    judged = policy()
    fact = None if code is None else xid_facts().get(code)
    fields: dict[str, Any] = dict(judged["family"]["unknown" if fact is None else fact.family])
    if code is not None:
        fields |= judged["code"].get(str(code), {})
    if variant:
        group = "nvlink" if code in NVLINK5_CODES else str(code)
        fields |= judged["variant"][f"{group}.{variant}"]
    return fields


def variants(code: int) -> list[str]:
    """Variants that entries of a code have."""
    group = "nvlink" if code in NVLINK5_CODES else str(code)
    return [name.partition(".")[2] for name in policy()["variant"] if name.partition(".")[0] == group]


def entries() -> Iterator[Signature]:
    """Entries of all codes and variants, and the one for codes that are in no table."""
    for fact in xid_facts().values():
        what = fact.meaning or fact.name.removeprefix("RC_").replace("_", " ").lower()
        source = f"{fact.source}, {fact.version}"
        for variant in ("", *variants(fact.xid)):
            yield msgspec.convert(
                {
                    "id": f"xid.{fact.xid}.{variant}" if variant else f"xid.{fact.xid}",
                    "kind": "gpu.xid",
                    "title": f"Xid {fact.xid}: {what}" + (f" ({variant.replace('_', ' ')})" if variant else ""),
                    "source": source,
                    "stream": "any",
                    **fields_of(fact.xid, variant),
                },
                Signature,
            )
    yield msgspec.convert(
        {"id": UNKNOWN, "kind": "gpu.xid", "title": "Xid that is in no table", "source": "keepstep", **fields_of(None)},
        Signature,
    )
