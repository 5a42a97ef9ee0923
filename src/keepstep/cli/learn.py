"""`keepstep learn [RUN...]`: weights of a site, from incidents whose cause was verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.goodput import find_run, runs_root
from keepstep.cli.output import emit, note, output_option
from keepstep.cli.runs import Column, print_table
from keepstep.launcher.files import keepstep_home, write_durable
from keepstep.launcher.views.view import read_object, run_dirs
from keepstep.records.errors import ConfigError
from keepstep.records.label import read_label

if TYPE_CHECKING:
    from keepstep.attribution.learn import Outcome
    from keepstep.catalog.load import Catalog

COLUMNS = (
    Column("SIGNATURE", lambda r: r["id"]),
    Column("WEIGHTS", lambda r: _shown(r["weights"])),
    Column("BEFORE", lambda r: _shown(r["before"])),
    Column("REASON", lambda r: r["reason"]),
)


@click.command(epilog="Label incidents with `keepstep label`.")
@click.argument("runs", nargs=-1)
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write the weights to this file (TOML).")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@output_option
def learn(runs: tuple[str, ...], write: Path | None, force: bool, output: str) -> None:
    """Weigh signs anew by the labelled incidents of RUN...; without RUN of all runs under $KEEPSTEP_HOME/runs.

    Weights move from those of the catalog as far as the incidents carry them (attribution/learn.py); a sign in fewer than five
    labelled incidents keeps its own. Verdicts use them once the file lies in $KEEPSTEP_HOME/catalog.d, or with --catalog FILE.
    """
    from keepstep.attribution.learn import LEAST_OUTCOMES, as_toml, relearned
    from keepstep.catalog.load import load, site_files
    from keepstep.catalog.priors import shipped_priors

    if write is not None and write.exists() and not force:
        raise ConfigError(f"{write} is there already; --force replaces it")
    if write is not None and not write.absolute().parent.is_dir():
        raise ConfigError(f"--write {write}: there is no folder {write.parent}; make it first")
    # What was learned before is no argument for itself: the file that is written anew is not read.
    files = [f for f in site_files(keepstep_home()) if write is None or f.resolve() != write.resolve()]
    catalog = load(files)
    folders = [find_run(run) for run in runs] if runs else run_dirs([runs_root()])
    incidents, outcomes, right = _outcomes(folders, catalog)
    changes = relearned(outcomes, catalog, shipped_priors())
    record: dict[str, Any] = {
        "schema": "keepstep.learned/1",
        "runs": len(folders),
        "incidents": incidents,
        "labelled": len(outcomes),
        "class_right": right,
        "changes": [
            {"id": c.id, "weights": c.weights, "before": dict(catalog[c.id].weights), "reason": c.reason}
            for c in changes
        ],
    }
    emit(
        record,
        output,
        table=lambda console, wide: print_table(console, COLUMNS, record["changes"], wide=wide),
        name=lambda r: "\n".join(str(c["id"]) for c in r["changes"]),
    )
    note(
        f"{len(outcomes)} of {incidents} incidents in {len(folders)} runs are labelled; the verdict had the class of {right}"
    )
    if not changes:
        most = max(Counter(s for o in outcomes for s in o.signs).values(), default=0)
        note(f"no weight changes: signs need {LEAST_OUTCOMES} labelled incidents, the most of any has {most}")
    elif write is not None:
        write_durable(write, as_toml(changes).encode(), mode=0o644)
        note(f"{write} written; `keepstep why --catalog {write} ...` uses it")


def _outcomes(folders: Sequence[Path], catalog: Catalog) -> tuple[int, list[Outcome], int]:
    """Number of incidents, the outcomes of those with a label, and how many of these had the verified class."""
    from keepstep.attribution.learn import outcome_of

    count, right = 0, 0
    outcomes = []
    for folder in folders:
        for path in sorted((folder / "incidents").glob("*.json")):
            count += 1
            label = read_label(folder, path.stem)
            verdict = read_object(path).get("verdict")
            if label is None or not isinstance(verdict, dict):
                continue
            right += verdict.get("class") == label.fault_class
            outcomes.append(outcome_of(verdict, label.fault_class, catalog))
    return count, outcomes, right


def _shown(weights: dict[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
