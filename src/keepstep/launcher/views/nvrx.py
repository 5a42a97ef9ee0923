"""Cycle records in the form of NVIDIA Resiliency Extension's cycle info, for tools that read that.

The form is protobuf-JSON of its message `NVRxCycleInfo` with the field names of its .proto file, as its launcher writes it
(shared_utils/proto/nvrx_interface.proto, fault_tolerance/cycle_info_writer.py, version 0.7): one file
`cycle_info.<job>.<attempt>.<cycle>` a cycle, and a link `cycle_info.<job>.current` to the newest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.launcher.files import write_durable
from keepstep.records.codec import to_pretty_json
from keepstep.records.cycle import Cycle
from keepstep.records.errors import StorageError

_HOST = re.compile(r"(.*?)(\d+)\Z", re.DOTALL)


class CycleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`NVRxCycleInfo`. Times are RFC 3339 in UTC with microseconds, "" while the cycle runs; `generation` counts rewrites."""

    job_id: str
    attempt_index: int
    cycle_number: int
    cycle_start_time: str
    cycle_end_time: str
    cycle_log_file: str
    active_nodes: str
    standby_nodes: str
    active_ranks: str
    """Position in the job of each active node, in the order of `active_nodes`."""
    generation: int


def nodelist(hosts: Sequence[str]) -> str:
    """Host names in Slurm's range form, as that writer has it: ["n2", "n1", "n4"] -> "n[1-2,4]".

    Domains are cut off; when any name does not end in a number, all are listed, sorted, with commas.
    """
    names = [host.partition(".")[0] for host in hosts if host]
    parts = [_HOST.fullmatch(name) for name in names]
    if any(part is None for part in parts):
        return ",".join(sorted(set(names)))
    groups: dict[str, dict[int, str]] = {}
    for part in parts:
        assert part is not None
        groups.setdefault(part[1], {})[int(part[2])] = part[2]
    written = []
    for prefix, numbers in sorted(groups.items()):
        width = max(map(len, numbers.values()))
        written.append(f"{prefix}[{_ranges(sorted(numbers), width)}]")
    return ",".join(written)


def _ranges(numbers: Sequence[int], width: int = 0) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in spans)


def cycle_info(cycle: Cycle, run_dir: Path, hosts: dict[str, str] | None = None) -> CycleInfo:
    """One cycle in that form. `hosts`: host of each node by name, for nodes that had no rank (spares)."""
    known = {**(hosts or {}), **{place.node: place.host for place in cycle.ranks}}
    active = [known.get(node, node) for node in cycle.active_nodes]
    order = sorted(range(len(active)), key=lambda i: _sort_key(active[i]))
    return CycleInfo(
        job_id=cycle.run_id,
        attempt_index=cycle.attempt,
        cycle_number=cycle.cycle,
        cycle_start_time=_microseconds(cycle.started_at),
        cycle_end_time=_microseconds(cycle.ended_at or ""),
        cycle_log_file=str(run_dir.absolute() / "logs" / f"cycle-{cycle.cycle:04d}.log"),
        active_nodes=nodelist(active),
        standby_nodes=nodelist([known.get(node, node) for node in cycle.spare_nodes]),
        active_ranks=_ranges(order),
        generation=int(cycle.ended_at is not None),
    )


def _sort_key(host: str) -> tuple[str, int]:
    match = _HOST.fullmatch(host.partition(".")[0])
    return (match[1], int(match[2])) if match else (host, 0)


def _microseconds(time: str) -> str:
    """That side reads times with Python's fromisoformat, which before 3.11 took six digits at most."""
    return re.sub(r"(\.\d{6})\d+Z", r"\1Z", time)


def write_cycle_infos(
    cycles: Sequence[Cycle], run_dir: Path, out: Path, hosts: dict[str, str] | None = None
) -> list[Path]:
    """Write a file a cycle to `out` and the link to the newest. Returns the files. Raises StorageError."""
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for cycle in sorted(cycles, key=lambda c: (c.attempt, c.cycle)):
            info = cycle_info(cycle, run_dir, hosts)
            path = out / f"cycle_info.{info.job_id}.{info.attempt_index}.{info.cycle_number}"
            write_durable(path, to_pretty_json(info), mode=0o644)
            written.append(path)
        if written:
            link = out / f"cycle_info.{cycles[-1].run_id}.current"
            fresh = link.with_name(f".{link.name}.new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(written[-1].name)
            fresh.replace(link)
    except OSError as error:
        raise StorageError(f"{error.filename or out}: cannot write: {error.strerror}") from error
    return written
