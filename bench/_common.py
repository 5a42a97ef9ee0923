"""What every benchmark shares: its flags, the `keepstep.bench/1` object and the table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SENSES = {">=": lambda value, target: value >= target, "<=": lambda value, target: value <= target}
SENSES["=="] = lambda value, target: value == target


@dataclass
class Target:
    """A figure the project promises. `value` is None when it could not be measured; `note` then says why."""

    name: str
    value: float | None
    unit: str
    sense: str
    target: float
    note: str | None = None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else bool(SENSES[self.sense](self.value, self.target))

    def as_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("name", "value", "unit", "sense", "target", "met")}
        return fields | ({"note": self.note} if self.note else {})


@dataclass
class Result:
    """One measured row: what was measured on which system, and all its values."""

    name: str
    system: str
    unit: str
    values: Sequence[float] = ()
    note: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name,
            "system": self.system,
            "unit": self.unit,
            "count": len(self.values),
        }
        if self.values:
            fields |= {"median": self.median, "min": min(self.values), "max": max(self.values)}
            fields["values"] = list(self.values)
        return fields | ({"note": self.note} if self.note else {})


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The flags of CONTRACT section 8."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the raw material in this folder")
    parser.add_argument(
        "--full", action="store_true", help="more repeats, for figures that count (at most ten minutes)"
    )
    return parser


def say(message: str) -> None:
    """Progress goes to stderr; stdout carries the result only."""
    print(message, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory_bytes / 1e9, 1)}


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of Python, the kernel and the packages that matter here; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "linux": platform.release()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def launch(command: list[str], folder: Path, env: dict[str, str], *, limit_s: float = 120.0) -> int:
    """Run a job to its end with its output in the folder; returns its exit code, -1 when it had to be stopped."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
    clean["OMP_NUM_THREADS"] = "1"
    with (folder / "output.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=clean | env, start_new_session=True)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(40)
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            return -1


@contextlib.contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """The folder for all jobs: kept, or gone at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
            yield Path(name)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, of all its threads (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def emit(
    bench: str,
    results: Sequence[Result],
    targets: Sequence[Target],
    *,
    output: str,
    packages: Sequence[str],
) -> None:
    """Print the table or the `keepstep.bench/1` object on stdout."""
    report = {
        "schema": "keepstep.bench/1",
        "bench": bench,
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "machine": machine(),
        "versions": versions(packages),
        "results": [result.as_dict() for result in results],
        "targets": [target.as_dict() for target in targets],
    }
    if output == "json":
        print(json.dumps(report, indent=2))
        return
    box = machine()
    print(f"{bench}: {box['cpu']}, {box['cores']} cores, {box['memory_gb']} GB; {_join(versions(packages))}\n")
    rows: list[tuple[str, ...]] = [("measured", "system", "n", "median", "min", "max", "unit", "note")]
    for result in results:
        figures = [_figure(v) for v in (result.median, *_ends(result.values))]
        rows.append((result.name, result.system, str(len(result.values)), *figures, result.unit, result.note or ""))
    _print_rows(rows)
    print()
    goals = [("target", "value", "goal", "unit", "met", "note")]
    for target in targets:
        met = {None: "-", True: "yes", False: "MISSED"}[target.met]
        goal = f"{target.sense} {target.target:g}"
        goals.append((target.name, _figure(target.value), goal, target.unit, met, target.note or ""))
    _print_rows(goals)


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (min(values), max(values)) if values else (None, None)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _join(found: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
