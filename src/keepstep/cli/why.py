"""`keepstep why PATH...`: whose fault it was, with the evidence."""

from __future__ import annotations

import click

from keepstep.cli.output import emit, output_option
from keepstep.records.exits import EXIT_PROBLEM
from keepstep.records.verdict import Verdict, verdict_fields


@click.command()
@click.argument("paths", nargs=-1, required=True)
@output_option
def why(paths: tuple[str, ...], output: str) -> None:
    """Say whose fault it was, with evidence, from logs and records in PATH..."""
    from keepstep.attribution.verdict import attribute
    from keepstep.catalog.load import shipped
    from keepstep.sources.reading import read_paths

    catalog = shipped()
    reading = read_paths(paths, catalog)
    verdict = attribute(reading.events, catalog)
    emit(
        verdict_fields(verdict),
        output,
        table=lambda console, _wide: console.print(_lines(verdict)),
        name=lambda fields: str(fields["signature"]),
    )
    raise SystemExit(0 if verdict.no_current_fault else EXIT_PROBLEM)


def _lines(verdict: Verdict) -> str:
    return f"{verdict.fault_class} ({verdict.tier}, {verdict.confidence:.2f}): {verdict.summary}\n{verdict.action}"
