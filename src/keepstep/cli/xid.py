"""`keepstep xid CODE`: what an Xid or SXid means, what tools do about it, and what keepstep makes of it. Works offline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.catalog_flags import catalog_option, chosen_catalog
from keepstep.cli.output import NotFoundError, emit, output_option
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from keepstep.catalog.load import Catalog
    from keepstep.catalog.signature import Signature
    from keepstep.catalog.sxid import SxidFacts
    from keepstep.catalog.xid import XidFacts

Record = dict[str, Any]
_LINE = re.compile(r"(?P<kind>S?Xid) ?\([^)]*\): (?P<code>\d{1,6})(?:, (?P<detail>.*))?")
_CODE = re.compile(r"(?:(?P<kind>s?xid)[ .:=#-]*)?(?P<code>\d{1,6})", re.IGNORECASE)


@click.command(epilog='CODE is 94, "xid 94", or a line of the kernel log in quotes. Exit codes: 6 no such code.')
@click.argument("codes", metavar="CODE...", nargs=-1, required=True)
@click.option("--sxid", "switch", is_flag=True, help="CODE is an SXid, of an NVSwitch.")
@click.option("--registers", metavar="HEX", help="Registers of the line, to decode: Xid 74 and 144 to 150.")
@click.option("--unit", metavar="NAME", help="Unit that the line names, e.g. RLW_REMAP; with --registers.")
@click.option("--driver", metavar="VERSION", help="Driver, e.g. 570 or 570.158.01: registers changed with 575.")
@catalog_option
@output_option
def xid(
    codes: tuple[str, ...],
    switch: bool,
    registers: str | None,
    unit: str | None,
    driver: str | None,
    catalog_files: tuple[Path, ...],
    output: str,
) -> None:
    """Look up an NVIDIA Xid (or SXid): meaning, class, action, and which tools see it otherwise.

    JSON is `keepstep.xid/1`, one object, or an array for several codes.
    """
    catalog = chosen_catalog(catalog_files)
    asked = [one for text in codes if (one := _asked(text, switch)) is not None]
    if not asked:
        raise ConfigError(f"{' '.join(codes)}: no code in it; write `keepstep xid 94`")
    records = [
        sxid_record(code, detail, catalog) if kind == "sxid" else xid_record(code, detail, catalog)
        for kind, code, detail in asked
    ]
    for record, (_, _, detail) in zip(records, asked, strict=True):
        decoded = decode(record, registers, unit, driver, detail)
        if decoded is not None:
            record["decoded"] = decoded
    emit(
        records[0] if len(records) == 1 else records,
        output,
        table=lambda console, wide: _show(records, console, wide=wide),
        name=lambda record: str(record["entry"]["id"]),
    )


def _asked(text: str, switch: bool) -> tuple[str, int, str] | None:
    """Kind, code and rest of the line; None for the word "xid" alone. Raises ConfigError for anything else."""
    match = _LINE.search(text) or _CODE.fullmatch(text.strip())
    if match is None:
        if text.lower() in ("xid", "sxid"):
            return None
        raise ConfigError(f"{text!r} is no code: write a number (94), or a line of the kernel log in quotes")
    groups = match.groupdict()
    kind = "sxid" if switch or (groups["kind"] or "").lower() == "sxid" else "xid"
    return kind, int(groups["code"]), groups.get("detail") or ""


def xid_record(code: int, detail: str, catalog: Catalog) -> Record:
    """All that is known of an Xid. Raises NotFoundError for a code that is in no table."""
    from keepstep.catalog.coded import xid_details
    from keepstep.catalog.xid import xid_facts

    fact = xid_facts().get(code)
    if fact is None:
        raise NotFoundError(f"no Xid {code} in the tables (1 to {max(xid_facts())}); an SXid? then add --sxid")
    said = xid_details(str(code), detail) if detail else {}
    entry = _entry(f"xid.{code}", said.get("variant", ""), catalog)
    tools = tools_on(fact)
    return {
        "schema": "keepstep.xid/1",
        "kind": "xid",
        "code": code,
        "mnemonic": fact.name,
        "meaning": fact.meaning,
        "family": fact.family,
        "nvidia": {"immediate": fact.immediate, "investigatory": fact.investigatory, "severity": fact.severity},
        "tools": tools,
        "disagreement": disagreement(tools),
        "entry": entry_fields(entry),
        "variants": [entry_fields(catalog[one]) for one in _variants(f"xid.{code}", catalog)],
        "line": said,
        "version": fact.version,
        "source": fact.source,
        "catalog": catalog.describe(),
    }


def sxid_record(code: int, detail: str, catalog: Catalog) -> Record:
    """All that is known of an SXid. Raises NotFoundError for a code that is in no table."""
    from keepstep.catalog.coded import sxid_details
    from keepstep.catalog.sxid import sxid_facts

    fact = sxid_facts().get(code)
    if fact is None:
        raise NotFoundError(
            f"no SXid {code} in the tables, which have {len(sxid_facts())} codes; an Xid? then without --sxid"
        )
    said = sxid_details(str(code), detail) if detail else {}
    entry = _entry(f"sxid.{code}", said.get("variant", ""), catalog)
    return {
        "schema": "keepstep.xid/1",
        "kind": "sxid",
        "code": code,
        "mnemonic": fact.name,
        "meaning": fact.name,
        "family": fact.usually,
        "nvidia": {"always_fatal": fact.always_fatal, "potentially_fatal": fact.potential_fatal},
        "tools": [_gpud(fact)],
        "disagreement": "",
        "entry": entry_fields(entry),
        "variants": [entry_fields(catalog[one]) for one in _variants(f"sxid.{code}", catalog)],
        "line": said,
        "version": fact.version,
        "source": fact.source,
        "catalog": catalog.describe(),
    }


def _entry(base: str, variant: str, catalog: Catalog) -> Signature:
    named = f"{base}.{variant}"
    return catalog[named] if variant and named in catalog else catalog[base]


def _variants(base: str, catalog: Catalog) -> list[str]:
    return [entry.id for entry in catalog if entry.id.startswith(f"{base}.")]


def entry_fields(entry: Signature) -> Record:
    """What keepstep makes of it."""
    return {
        "id": entry.id,
        "role": entry.role,
        "severity": entry.severity,
        "scope": entry.scope,
        "depth": entry.depth,
        "weights": dict(entry.weights),
        "class": entry.fault_class,
        "action": entry.action,
        "never": list(entry.never),
        "clears": list(entry.clears),
        "applies": dict(entry.applies),
        "why": entry.why,
    }


def _gpud(fact: XidFacts | SxidFacts) -> Record:
    repair = fact.gpud_repair.replace("+", ", ")
    says = f"{fact.gpud_event}{f', wants {repair}' if repair else ''}" if fact.gpud_event else ""
    return {
        "tool": "gpud",
        "says": says,
        "unhealthy": {"": None, "Fatal": True, "Critical": True}.get(fact.gpud_event, False),
    }


def tools_on(fact: XidFacts) -> list[Record]:
    """What each shipped tool makes of the code by default; `unhealthy` null where it says nothing."""
    severity = {"FATAL": True, "NONFATAL": False}.get(fact.severity)
    gcm, plugin, eks, azure, sticky = (
        fact.gcm_critical == "yes",
        fact.k8s_device_plugin_default_ignores != "yes",
        fact.eks_agent_condition == "yes",
        fact.azure_nhc_fails == "yes",
        fact.nvsentinel_sticky == "yes",
    )
    causes = fact.gcm_causes.replace("|", ", ")
    return [
        {"tool": "NVIDIA catalog", "says": fact.immediate or "no bucket", "unhealthy": severity},
        _gpud(fact),
        {
            "tool": "Meta gcm",
            "says": f"{'critical' if gcm else 'warning'}{f'; causes: {causes}' if causes else ''}",
            "unhealthy": gcm,
        },
        {
            "tool": "k8s-device-plugin",
            "says": "marks the device unhealthy" if plugin else "ignores it",
            "unhealthy": plugin,
        },
        {"tool": "EKS node agent", "says": "sets the node condition" if eks else "nothing", "unhealthy": eks},
        {"tool": "Azure NHC", "says": "fails the node" if azure else "nothing", "unhealthy": azure},
        {
            "tool": "NVSentinel",
            "says": "counts bursts over 3 hours" if sticky else "by NVIDIA's bucket",
            "unhealthy": None,
        },
    ]


def disagreement(tools: Sequence[Record]) -> str:
    """Who calls it unhealthy and who does not; "" when all that say something agree."""
    sick = [str(one["tool"]) for one in tools if one["unhealthy"] is True]
    well = [str(one["tool"]) for one in tools if one["unhealthy"] is False]
    return f"unhealthy: {', '.join(sick)}; not: {', '.join(well)}" if sick and well else ""


def decode(record: Record, registers: str | None, unit: str | None, driver: str | None, detail: str) -> Record | None:
    """What registers say. Raises ConfigError where they do not belong to the code or are no numbers."""
    from keepstep.catalog.coded import registers_of
    from keepstep.catalog.nvlink import decode_74, decode_nvlink5, variant_74
    from keepstep.catalog.xid import NVLINK5_CODES

    code = record["code"] if record["kind"] == "xid" else 0
    branch = _branch(driver)
    if registers is None and "registers" not in record["line"]:
        return None
    if code != 74 and code not in NVLINK5_CODES:
        raise ConfigError(
            f"--registers: Xid 74 and 144 to 150 have registers that are decoded, {record['kind']} {code} has none"
        )
    values = registers_of(registers if registers is not None else record["line"]["registers"])
    if not values:
        raise ConfigError(
            f'--registers {registers!r}: no numbers in it; write them as in the line: "0x00000082 0x00000040"'
        )
    if code == 74:
        return {"bits": decode_74(values), "variant": variant_74(values) or None}
    found = decode_nvlink5(code, values, unit=unit or record["line"].get("unit", ""), driver=branch)
    return {
        "bucket": found.action or None,
        "investigatory": found.investigatory or None,
        "severity": found.severity or None,
        "subcode": found.subcode,
        "units": sorted({rule.unit for rule in found.rules}),
        "driver_branch": branch,
        "note": _decode_note(found.rules, found.action, branch),
    }


def _branch(driver: str | None) -> int | None:
    if driver is None:
        return None
    match = re.match(r"[Rr]?(\d{3})\b", driver)
    if match is None:
        raise ConfigError(f"--driver {driver!r}: write the branch or version, e.g. 570 or 570.158.01")
    return int(match[1])


def _decode_note(rules: Sequence[object], action: str, branch: int | None) -> str:
    if not rules:
        return "no row of the table fits these registers"
    if not action:
        return "rows disagree; give --driver" if branch is None else "rows disagree"
    return "rows for drivers before and after R575 agree" if branch is None and len(rules) > 1 else ""


def _show(records: Sequence[Record], console: Console, *, wide: bool) -> None:
    for number, record in enumerate(records):
        if number:
            console.print()
        for line in _lines(record, wide):
            console.print(line, markup=False, soft_wrap=True)


def _lines(record: Record, wide: bool) -> list[str]:
    entry, nvidia = record["entry"], record["nvidia"]
    name = "SXid" if record["kind"] == "sxid" else "Xid"
    weights = ", ".join(f"{k} {v:g}" for k, v in sorted(entry["weights"].items(), key=lambda w: -w[1])) or "none"
    found = [
        f"{name} {record['code']}  {record['mnemonic']}",
        f"  meaning    {record['meaning'] or '-'}",
        f"  NVIDIA     {', '.join(f'{key} {value}' for key, value in nvidia.items() if value not in ('', None))}",
        f"  keepstep   {entry['id']}: {entry['action'] or 'no action of its own'}; {entry['role']}, weights: {weights}",
        f"             {entry['why']}",
    ]
    found += [f"  never      {', '.join(entry['never'])}"] if entry["never"] else []
    found += [f"  takes back {', '.join(entry['clears'])}"] if entry["clears"] else []
    found += [f"  {key:<10} {value}" for key, value in entry["applies"].items()]
    found += [f"  variant    {v['id']}: {v['action'] or '-'}; {v['why']}" for v in record["variants"]]
    found += [f"  {one['tool']:<18} {one['says']}" for one in record["tools"] if wide or one["says"]]
    found += [f"  they disagree: {record['disagreement']}"] if record["disagreement"] else []
    found += [
        f"  registers  {key}: {value}"
        for key, value in record.get("decoded", {}).items()
        if value not in ("", None, [])
    ]
    found += [
        f"  changed    {c['reason']} ({c['file']})" for c in record["catalog"]["changes"] if c["id"] == entry["id"]
    ]
    catalog = record["catalog"]
    found.append(
        f"  source     {record['source']}, {record['version']}; catalog {catalog['version']} {catalog['digest'][:12]}"
    )
    return found
