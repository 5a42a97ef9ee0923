"""Lines that carry a code: which entry is meant, and what the rest of the line says."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keepstep.catalog.signature import Signature
from keepstep.catalog.xid import NVLINK5_CODES, RECOVERY_ACTIONS

_BDF = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.(?P<function>[0-7]))?\Z"
)
_PROCESS = re.compile(
    r"pid='?(?P<pid>\d+|<unknown>)'?(?:, name=(?P<name>[^,]*(?:, (?!\w+ ?[:=(])[^,]{0,15})?))?(?:, |\Z)"
)
_CAUSE = re.compile(r"caused by previous Xid (?P<cause_xid>\d+)")
_RESET = re.compile(r"RST: (?P<rst>Yes|No), D-RST: (?P<drst>Yes|No)")
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x(?P<was>[0-9a-f]+)(?: \([^)]*\))? to 0x(?P<wanted>[0-9a-f]+)"
)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]*)\s+(?P<fatal>Nonfatal|Fatal)\s+XC(?P<xc>\d)\s+i(?P<injected>\d+)\s+Link\s+(?P<link>-?\d+)"
    r"(?:\s+\((?P<registers>0x[0-9a-fA-F]+(?:\s+0x[0-9a-fA-F]+)*))?"
)
_LINK = re.compile(r"\b[lL]ink (?P<link>\d+)")


def pci_address(text: str) -> str:
    """A PCI address as events carry it: "0000:9c:00.0", lower case, four-digit domain; other text unchanged.

    The kernel prints "0000:9c:00" or without a domain, NVML a domain of eight digits.
    """
    match = _BDF.match(text.lower())
    if match is None:
        return text
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['bus']}:{match['device']}.{match['function'] or 0}"


def resolve(
    signature: Signature, groups: dict[str, str], by_id: Mapping[str, Signature]
) -> tuple[Signature, dict[str, str]]:
    """The entry that is meant, and the groups with what was decoded. Without `by_code` both as given, addresses normalised."""
    if "bdf" in groups:
        groups["bdf"] = pci_address(groups["bdf"])
    if not signature.by_code:
        return signature, groups
    prefix = signature.by_code
    code = str(int(groups[prefix]))
    groups[prefix] = code
    if prefix == "xid":
        groups |= xid_details(int(code), groups.get("detail", ""))
    names = (
        f"{prefix}.{code}.{groups['variant']}" if "variant" in groups else "",
        f"{prefix}.{code}",
        f"{prefix}.unknown",
    )
    return next((by_id[name] for name in names if name in by_id), signature), groups


def xid_details(code: int, detail: str) -> dict[str, str]:
    """What the text after the code says: pid, name, cause_xid, rst, drst, recovery_action, unit, fatal, link, registers, variant."""
    found: dict[str, str] = {}
    for pattern in (_PROCESS, _CAUSE, _RESET, _LINK):
        match = pattern.search(detail)
        if match is not None:
            found |= {k: v for k, v in match.groupdict().items() if v is not None and "<unknown>" not in v}
    if code in NVLINK5_CODES and (match := _NVLINK5.search(detail)):
        found |= {k: v for k, v in match.groupdict().items() if v is not None}
        found["fatal"] = "yes" if match["fatal"] == "Fatal" else "no"
        found["variant"] = "fatal" if match["fatal"] == "Fatal" else "nonfatal"
    elif code == 154 and (match := _RECOVERY.search(detail)):
        wanted = int(match["wanted"], 16)
        if wanted < len(RECOVERY_ACTIONS):
            found["recovery_action"] = found["variant"] = RECOVERY_ACTIONS[wanted]
    elif code == 94 and found.get("rst") == "Yes":
        found["variant"] = "reset"
    return found
