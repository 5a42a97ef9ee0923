"""Lines that carry a code: which entry is meant, and what the rest of the line says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from keepstep.catalog.nvlink import decode_nvlink5, variant_74, variant_nvlink5
from keepstep.catalog.signature import Signature
from keepstep.catalog.xid import NVLINK5_CODES, RECOVERY_ACTIONS

_BDF = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.(?P<function>[0-7]))?\Z"
)
_PID = re.compile(r"\bpid='?(?P<pid>\d+)")
_NAME = re.compile(r"\bname=(?P<name>.{1,16}?), (?=Ch\b|[A-Z][A-Za-z]+[ :_]|[A-Z_]{3,}|[0-9a-f]{4} |\Z)")
_FIRST_NAME = re.compile(r"\bname=(?P<name>[^,]{1,100})")
_CAUSE = re.compile(r"caused by previous Xid (?P<cause_xid>\d+)")
_RESET = re.compile(r"\bRST: (?P<rst>Yes|No), D-RST: (?P<drst>Yes|No)")
_RECOVERY = re.compile(
    r"GPU recovery action changed from (?P<from>0x[0-9a-f]+)(?: \([^)]*\))? to (?P<wanted>0x[0-9a-f]+)(?: \((?P<word>[^)]*)\))?",
    re.IGNORECASE,
)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]*)\s+(?P<fatal>Nonfatal|Non-fatal|Fatal)\s+XC(?P<xc>\d)\s+i(?P<injected>\d+)\s+Link\s+(?P<link>-?\d+)"
    r"(?:\s+\((?P<registers>0x[0-9a-fA-F]+(?:\s+0x[0-9a-fA-F]+)*))?"
)
_NVLINK_74 = re.compile(r"\b[lL]ink (?P<link>\d+) ?\((?P<registers>0x[0-9a-fA-F]+(?:, ?0x[0-9a-fA-F]+)*)")
_LINK = re.compile(r"\b[lL]ink (?P<link>\d+)")
_SM = re.compile(r"\(GPC (?P<gpc>\d+), TPC (?P<tpc>\d+)(?:, SM (?P<sm>\d+))?\)")
_FUNCTION = re.compile(r"from GPU(?P<rm_gpu>\d+) GSP! Expected function (?P<function>\d+) \((?P<function_name>\w+)\)")
_SXID_WORD = re.compile(r"\b(?P<fatal>Fatal|Non-fatal|Nonfatal)\b")


ADDRESSES = ("bdf", "pci", "nic", "device")
"""Groups that hold a PCI address: `bdf` of a GPU, the others of other devices or the name of one."""
DECODED = frozenset({*ADDRESSES, "pod_uid"})
"""Groups whose text `resolve` may change."""
_CACHED_CHARACTERS = 512
"""Longest rest of a line that is remembered with what it says."""


def pci_address(text: str) -> str:
    """A PCI address as events carry it: "0000:9c:00.0", lower case, four-digit domain; other text unchanged.

    The kernel prints "0000:9c:00" or without a domain, NVML a domain of eight digits.
    """
    match = _BDF.match(text.strip().lower())
    if match is None:
        return text
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['bus']}:{match['device']}.{match['function'] or 0}"


def registers_of(text: str) -> list[int]:
    """Numbers like 0x0409a0c2 in a text, separated by anything."""
    return [int(word, 16) for word in re.findall(r"0x[0-9a-fA-F]{1,16}\b", text)]


def resolve(
    signature: Signature, groups: dict[str, str], by_id: Mapping[str, Signature]
) -> tuple[Signature, dict[str, str]]:
    """The entry that is meant, and the groups with what was decoded. Without `by_code` the entry as given.

    PCI addresses and UIDs of pods are normalised either way.
    """
    groups = groups | {name: pci_address(groups[name]) for name in ADDRESSES if name in groups}
    if "pod_uid" in groups:  # a cgroup of systemd has "_" for "-"
        groups["pod_uid"] = groups["pod_uid"].replace("_", "-")
    prefix = signature.by_code
    if not prefix or prefix not in groups:
        return signature, groups
    code = groups[prefix].lstrip("0") or "0"
    groups = groups | {prefix: code}
    detail = groups.get("detail", "")
    if prefix in DETAILS and detail:
        decode = _remembered if len(detail) <= _CACHED_CHARACTERS else _details
        groups |= decode(prefix, code, detail)
    names = (f"{prefix}.{code}.{groups.get('variant', '')}", f"{prefix}.{code}", *_unknown(prefix, groups))
    return next((by_id[name] for name in names if name in by_id), signature), groups


def _details(prefix: str, code: str, detail: str) -> Mapping[str, str]:
    return DETAILS[prefix](code, detail)


@functools.lru_cache(maxsize=1024)
def _remembered(prefix: str, code: str, detail: str) -> Mapping[str, str]:
    """In a storm the same rest of a line comes hundreds of thousands of times, with a few dozen variations."""
    return MappingProxyType(_details(prefix, code, detail))


def _unknown(prefix: str, groups: Mapping[str, str]) -> tuple[str, str]:
    return f"{prefix}.unknown.{groups.get('variant', '')}", f"{prefix}.unknown"


def xid_details(code: str, detail: str) -> dict[str, str]:
    """What the text after the code says, as far as it is there.

    pid, name; cause_xid (an Xid 45 that another one caused); rst, drst ("Yes", "No"); link, registers; unit, fatal ("yes", "no"),
    bucket (NVIDIA's, by the registers) of 144 to 150; gpc, tpc, sm of 13;
    rm_gpu (the driver's own number of the GPU), function of 119; recovery_action of 154; variant of the entry.
    """
    found: dict[str, str] = {}
    for pattern in (_PID, _CAUSE, _RESET, _LINK, _SM, _FUNCTION):
        found |= _groups(pattern, detail)
    if name := (_NAME.search(detail) or _FIRST_NAME.search(detail)):
        found |= {"name": name["name"]} if name["name"] != "<unknown>" else {}
    decode = _BY_CODE.get(code)
    return found if decode is None else found | decode(detail)


def _groups(pattern: re.Pattern[str], text: str) -> dict[str, str]:
    match = pattern.search(text)
    return {} if match is None else {k: v for k, v in match.groupdict().items() if v is not None}


def _nvlink5(code: str, detail: str) -> dict[str, str]:
    found = _groups(_NVLINK5, detail)
    if not found:
        return {}
    fatal = found["fatal"] == "Fatal"
    decoded = decode_nvlink5(int(code), registers_of(found.get("registers", "")), unit=found["unit"])
    said = {"bucket": decoded.action, "investigatory": decoded.investigatory, "subcode": str(decoded.subcode or "")}
    variant = variant_nvlink5(fatal, decoded)
    return found | {k: v for k, v in said.items() if v} | {"fatal": "yes" if fatal else "no", "variant": variant}


def _xid_74(detail: str) -> dict[str, str]:
    found = _groups(_NVLINK_74, detail)
    variant = variant_74(registers_of(found.get("registers", "")))
    return found | ({"variant": variant} if variant else {})


def _xid_94(detail: str) -> dict[str, str]:
    return {"variant": "reset"} if _groups(_RESET, detail).get("rst") == "Yes" else {}


def _xid_154(detail: str) -> dict[str, str]:
    found = _groups(_RECOVERY, detail)
    if not found:
        return {}
    number = int(found["wanted"], 16)
    # Newer drivers know more than the five actions that were seen; their words say what kind it is.
    words = found.get("word", "").lower()
    wanted = RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else ""
    wanted = wanted or ("reboot" if "reboot" in words else "reset" if "reset" in words else "")
    return {"recovery_action": wanted, "variant": wanted} if wanted else {"recovery_action": words or str(number)}


def sxid_details(_code: str, detail: str) -> dict[str, str]:
    """What the text after an SXid's code says: link, fatal ("yes", "no"), variant of the entry."""
    found = _groups(_LINK, detail)
    word = _groups(_SXID_WORD, detail).get("fatal")
    if word is None:
        return found
    fatal = word == "Fatal"
    return found | {"fatal": "yes" if fatal else "no", "variant": "fatal" if fatal else "nonfatal"}


def _for_nvlink5(code: int) -> Callable[[str], dict[str, str]]:
    return lambda detail: _nvlink5(str(code), detail)


_BY_CODE: dict[str, Callable[[str], dict[str, str]]] = {
    "74": _xid_74,
    "94": _xid_94,
    "154": _xid_154,
    **{str(code): _for_nvlink5(code) for code in NVLINK5_CODES},
}
DETAILS: Mapping[str, Callable[[str, str], dict[str, str]]] = MappingProxyType(
    {"xid": xid_details, "sxid": sxid_details}
)
"""Per prefix of ids: the function that reads the rest of a line."""
