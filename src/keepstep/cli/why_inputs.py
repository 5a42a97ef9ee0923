"""What `why` and `bundle` are asked about: files and folders, a cycle of a run folder, or an incident that it recorded."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep.attribution.places import UNMAPPED, RankMap, map_of_cycle
from keepstep.cli.goodput import find_run, read_cycles
from keepstep.cli.output import NotFoundError
from keepstep.cli.runs import resolve_run
from keepstep.records.cycle import Cycle
from keepstep.records.errors import ConfigError, KeepstepError

if TYPE_CHECKING:
    from keepstep.catalog.load import Catalog
    from keepstep.catalog.matcher import Matcher

INCIDENT = re.compile(r"INC-\d+")
WELL_ENDED = frozenset({"succeeded", "success", "finished", None})
"""End reasons of cycles that did not fail; None: it has not ended."""


class Asked(NamedTuple):
    """`paths`: what is to be read; "-" is standard input. `folder`: of the run whose `cycle` it is. `recorded`: a whole verdict
    that is in the ledger already."""

    paths: tuple[str, ...]
    ranks: RankMap = UNMAPPED
    cycle: Cycle | None = None
    folder: Path | None = None
    recorded: dict[str, Any] | None = None


def asked(paths: Sequence[str], run: str | None, cycle: int | None, live: bool = False) -> Asked:
    """What is meant. `live`: running sources are asked too, so that paths need not be given.

    Raises NotFoundError, and ConfigError where flags do not go together.
    """
    named = [p for p in paths if INCIDENT.fullmatch(p) and not Path(p).exists()]
    if named:
        if len(paths) > 1:
            raise ConfigError(f"{named[0]}: an incident is asked about alone, without other paths")
        if live:
            raise ConfigError(f"{named[0]}: an incident is shown as it was recorded; --live goes with paths or a run")
        return _of_incident(resolve_run(run), named[0])
    if run is not None:
        if paths:
            raise ConfigError("--run goes with an incident (INC-0001), or alone for the run's last failed cycle")
        return _of_run(find_run(run), cycle)
    if len(paths) == 1 and is_run_folder(Path(paths[0])):
        return _of_run(Path(paths[0]), cycle)
    if cycle is not None:
        raise ConfigError("--cycle needs a run folder (one with a run.json), as PATH or with --run")
    if not paths and not live:
        raise ConfigError("give PATH..., an incident (INC-0001), --run RUN or --live SOURCE")
    missing = [p for p in paths if p != "-" and not Path(p).exists()]
    if missing:
        raise NotFoundError(f"no such file or folder: {', '.join(missing)}")
    return Asked(tuple(paths))


@functools.lru_cache(maxsize=2)
def matcher_of(catalog: Catalog) -> Matcher:
    """The patterns of a catalog, compiled once a process: that takes longer than reading most logs."""
    from keepstep.catalog.matcher import Matcher

    return Matcher(catalog)


def is_run_folder(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return path.is_dir() and ((path / "run.json").is_file() or (path / "journal").is_dir())


def _of_run(folder: Path, number: int | None) -> Asked:
    from keepstep.launcher.diagnosis import cycle_paths

    cycles = read_cycles(folder)
    if number is None:
        failed = [c for c in cycles if c.end_reason not in WELL_ENDED or c.fault is not None]
        chosen = (failed or cycles)[-1] if cycles else None
    else:
        chosen = next((c for c in cycles if c.cycle == number), None)
        if chosen is None:
            known = ", ".join(str(c.cycle) for c in cycles) or "none"
            raise NotFoundError(f"{folder} has no cycle {number}; it has {known}")
    if chosen is None:
        return Asked((str(folder),))
    return Asked(tuple(cycle_paths(folder, chosen.cycle)), map_of_cycle(chosen), chosen, folder)


def _of_incident(folder: Path, name: str) -> Asked:
    path = folder / "incidents" / f"{name}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        known = sorted(p.stem for p in (folder / "incidents").glob("INC-*.json"))
        raise NotFoundError(f"{folder} has no {name}; it has {', '.join(known) or 'no incidents'}") from error
    except (OSError, ValueError) as error:
        raise KeepstepError(f"cannot read {path}: {error}") from error
    verdict = record.get("verdict")
    if isinstance(verdict, dict) and verdict.get("schema") == "keepstep.verdict/1":
        return Asked((), recorded=verdict | {"incident": name})
    number = record.get("cycle")
    found = _of_run(folder, number if isinstance(number, int) else None)
    return found._replace(paths=(str(path), *found.paths))
