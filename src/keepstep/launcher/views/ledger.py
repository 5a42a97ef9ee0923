"""A run folder as the fleet's account needs it: sizes, faults with what people verified of them, GPU models. Read only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.goodput.facts import ATTRIBUTED_TIERS, CycleKey
from keepstep.goodput.fleet import RunRecord
from keepstep.goodput.history import FAILURE_RULES
from keepstep.goodput.losses import Size, size_of
from keepstep.goodput.pace import pace_of
from keepstep.goodput.partition import History, partition_history, read_history
from keepstep.goodput.rates import sku_of
from keepstep.goodput.verified import Acted, FaultRecord
from keepstep.launcher.coordination.incidents import incident_id, is_incident
from keepstep.launcher.coordination.journal import Record, epoch_path, epochs, parse_line, read_records
from keepstep.launcher.coordination.topology import read_topology
from keepstep.launcher.views.view import is_led, read_object, run_id_of
from keepstep.records.codec import from_json
from keepstep.records.cycle import Cycle
from keepstep.records.errors import ConfigError, KeepstepError, StorageError
from keepstep.records.label import read_label
from keepstep.records.timeline import Mark

UNKNOWN = "unknown"


class Layouts(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal's own records, beside its marks, say about nodes."""

    sizes: dict[CycleKey, Size]
    evicted: frozenset[CycleKey]
    """Cycles during which a node of theirs was taken out."""
    ended: frozenset[str]
    """Incidents whose verdict ended the job."""
    racks: dict[str, str]


def read_ledger(run_dir: Path, now_ns: int, *, sku: str = UNKNOWN) -> tuple[RunRecord, list[str]]:
    """A run, all attempts, and what in its folder could not be used. `sku`: GPU model of nodes whose evidence names none.

    A run that is led counts up to `now_ns`; one whose launchers are gone without a verdict ends at its last mark. Raises
    KeepstepError naming the folder when there is nothing to account, or when parts of the journal are damaged or its size is
    nowhere: its sums would be wrong.
    """
    try:
        known = epochs(run_dir)
        if not known:
            raise StorageError(f"{run_dir} has no journal")
        for epoch in known:
            _check_epoch(epoch_path(run_dir, epoch))
        records = read_records(run_dir)
        marks = marks_of(records)
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot read the journal: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise StorageError(f"{run_dir}: the journal has a mark of unknown form: {error}") from error
    if not marks:
        raise StorageError(f"{run_dir}: the journal has no marks yet")
    problems: list[str] = []
    layouts = layouts_of(records)
    racks = {**layouts.racks, **_racks_of_file(run_dir, problems)}
    layouts = msgspec.structs.replace(layouts, racks=racks)
    sizes = {**layouts.sizes, **_recorded_sizes(run_dir, layouts.sizes, problems)}
    if not sizes:
        raise StorageError(f"{run_dir}: neither journal nor cycle records say how many ranks the run has")
    history = read_history(marks)
    led = is_led(run_dir)
    faults, more = faults_of(run_dir, history, marks, layouts)
    record = RunRecord(
        run_id=run_id_of(run_dir),
        folder=str(run_dir.absolute()),
        part=partition_history(history, now_ns=now_ns if led else None, whole_history=True),
        sizes=sizes,
        faults=tuple(faults),
        vanished_ns=_vanished(marks, led),
        pace=pace_of(history.cycles, {key: size.gpus for key, size in sizes.items()}),
        skus=_skus(run_dir),
        sku=sku,
    )
    return record, problems + more


def marks_of(records: Iterable[Record]) -> list[Mark]:
    """The marks among a journal's records. Raises msgspec.ValidationError."""
    return [msgspec.convert(record["mark"], Mark) for record in records if record.get("type") == "mark"]


def _check_epoch(path: Path) -> None:
    """A crash can only have cut the end. Raises StorageError when whole lines stand behind a damaged one."""
    bad: int | None = None
    with path.open("rb") as file:
        for index, line in enumerate(file):
            whole = parse_line(line, index) is not None
            if whole and bad is not None:
                raise StorageError(f"{path}: line {bad + 1} is damaged, and there are records behind it")
            bad = index if not whole and bad is None else bad


# ---- nodes


def layouts_of(records: Iterable[Record]) -> Layouts:
    """Fold over a journal's records; what it does not know it leaves alone."""
    sizes: dict[CycleKey, Size] = {}
    evicted: set[CycleKey] = set()
    ended: set[str] = set()
    racks: dict[str, str] = {}
    ranks: dict[str, int] = {}
    attempt, key = 0, None
    for record in records:
        kind, node = record.get("type"), record.get("node")
        if kind == "open":
            attempt = record.get("attempt", attempt)
        elif kind == "node" and isinstance(node, str):
            count = record.get("nproc")
            ranks[node] = count if isinstance(count, int) else 0
            if rack := rack_of(node, record.get("levels")):
                racks[node] = rack
            if key is None or key[0] != attempt:
                # An attempt that never gets to a cycle holds the nodes that have come.
                sizes[(attempt, -1)] = Size(gpus=sum(ranks.values()))
        elif kind == "cycle":
            key = (attempt, record.get("cycle", 0))
            sizes.pop((attempt, -1), None)
            layout = _layout(record)
            each = max((count for _, count in layout), default=0)
            spares = tuple(map(str, record.get("spares") or ()))
            sizes[key] = Size(
                gpus=sum(count for _, count in layout),
                spare_gpus=sum(ranks.get(name) or each for name in spares),
                nodes=tuple(name for name, _ in layout),
                spares=spares,
            )
        elif kind == "excluded" and key is not None and node in sizes[key].nodes:
            evicted.add(key)
        elif kind == "attribution_stop":
            ended.add(str(record.get("incident")))
    return Layouts(
        sizes={k: size for k, size in sizes.items() if size.gpus},
        evicted=frozenset(evicted),
        ended=frozenset(ended),
        racks=racks,
    )


def _layout(record: Record) -> list[tuple[str, int]]:
    """Nodes of a cycle and their numbers of ranks; entries of an unknown form are none."""
    found: list[tuple[str, int]] = []
    for entry in record.get("layout") or []:
        match entry:
            case [str(name), _, int(count)]:
                found.append((name, count))
    return found


def rack_of(node: str, levels: object) -> str | None:
    """The innermost group of the network that a node shares with others, with those around it: its rack. None: not known."""
    # A level that only holds this node says nothing about its neighbours.
    names = [str(name) for name in levels if name != node] if isinstance(levels, list) else []
    return "/".join(names) or None


def _racks_of_file(run_dir: Path, problems: list[str]) -> dict[str, str]:
    """Racks by the run's --topology file, which goes before what nodes said of themselves, as it did for the run."""
    path = read_object(run_dir / "run.json").get("topology")
    if not isinstance(path, str) or not path:
        return {}
    try:
        places = read_topology(Path(path))
    except ConfigError as error:
        problems.append(f"{run_dir}: racks are what nodes said of themselves: {error}")
        return {}
    found = {node: rack_of(node, levels) for node, levels in places.items()}
    return {node: rack for node, rack in found.items() if rack}


def _recorded_sizes(run_dir: Path, told: Mapping[CycleKey, Size], problems: list[str]) -> dict[CycleKey, Size]:
    """Sizes by the cycle records, which know GPUs; a record that cannot be read is named, and the journal's word counts."""
    sizes: dict[CycleKey, Size] = {}
    for path in sorted((run_dir / "cycles").glob("cycle-*.json")):
        try:
            cycle = from_json(path.read_bytes(), Cycle)
        except (OSError, ValueError) as error:
            problems.append(f"{path} is not a cycle record and is left out: {error}")
            continue
        size, key = size_of(cycle), (cycle.attempt, cycle.cycle)
        if size is not None:
            # The journal knows the ranks of spares; where ranks and GPUs are as many, that is exact.
            known = told.get(key)
            same = known is not None and known.gpus == size.gpus
            sizes[key] = msgspec.structs.replace(size, spare_gpus=known.spare_gpus) if known and same else size
    return sizes


def _skus(run_dir: Path) -> dict[str, str]:
    """GPU model by node, from what was read of GPUs after failed cycles; the newest reading counts."""
    found: dict[str, str] = {}
    for path in sorted((run_dir / "evidence").glob("cycle-*/*/gpus.json")):
        gpus = read_object(path).get("gpus")
        names = [g.get("name") for g in gpus if isinstance(g, dict)] if isinstance(gpus, list) else []
        name = next((n for n in names if isinstance(n, str) and n), None)
        if name is not None:
            known = sku_of(name)
            found[path.parent.name] = name if known == UNKNOWN else known
    return found


# ---- faults


def faults_of(
    run_dir: Path, history: History, marks: Iterable[Mark], layouts: Layouts
) -> tuple[list[FaultRecord], list[str]]:
    """Failed cycles, one each, and labels that could not be read. `marks` in the order of the journal: it gives the names."""
    marks = list(marks)
    verdicts = {str(m.attrs.get("incident")): m.attrs for m in marks if m.kind == "attributed"}
    rules = {(m.attempt, m.cycle): m.attrs.get("rule") for m in marks if m.kind == "decided"}
    facts = {cycle.key: cycle for cycle in history.cycles}
    found: dict[CycleKey, FaultRecord] = {}
    problems: list[str] = []
    for number, mark in enumerate((m for m in marks if is_incident(m)), 1):
        key, name = (mark.attempt, mark.cycle), incident_id(number)
        cycle = facts.get(key)
        if mark.kind != "fault" or key in found or cycle is None or cycle.fault is None:
            continue
        verdict = verdicts.get(name, {})
        sure = verdict.get("tier") in ATTRIBUTED_TIERS
        node = _entity(verdict, "node") if sure else None
        node = node or _text(mark.attrs.get("node"))
        rule = _text(mark.attrs.get("rule")) or _text(rules.get(key))
        acted: Acted = "ended" if name in layouts.ended else "evicted" if key in layouts.evicted else ""
        try:
            label = read_label(run_dir, name)
        except KeepstepError as error:
            label = None
            problems.append(str(error))
        found[key] = FaultRecord(
            key=key,
            incident=name,
            time_ns=cycle.fault.detected_ns,
            fault_class=cycle.fault.cause,
            cause=(_signature(verdict) if sure else None) or _text(mark.attrs.get("kind")) or UNKNOWN,
            said=_text(verdict.get("class")) or _text(mark.attrs.get("cause")) or UNKNOWN,
            node=node,
            rack=layouts.racks.get(node or ""),
            interrupts=rule is None or rule in FAILURE_RULES,
            acted=acted,
            verified=None if label is None else label.fault_class,
        )
    return list(found.values()), problems


def _vanished(marks: list[Mark], led: bool) -> tuple[int, ...]:
    """When attempts were last heard of whose launchers vanished in the middle of a cycle: that lost its work too."""
    result = []
    attempts = sorted({mark.attempt for mark in marks})
    for attempt in attempts:
        own = [mark for mark in marks if mark.attempt == attempt]
        over = any(m.kind == "run_ended" for m in own) or (led and attempt == attempts[-1])
        last = max((m.cycle for m in own if m.kind == "cycle_started"), default=None)
        closed = any(m.kind in ("fault", "cycle_ended") and m.cycle == last for m in own)
        if not over and last is not None and not closed:
            result.append(max(m.t_ns for m in own))
    return tuple(result)


def _signature(verdict: Mapping[str, Any]) -> str | None:
    found = _text(verdict.get("signature"))
    return None if found == UNKNOWN else found


def _entity(verdict: Mapping[str, Any], name: str) -> str | None:
    entity = verdict.get("entity")
    return _text(entity.get(name)) if isinstance(entity, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
