"""`keepstep why PATH...`: whose fault it was, with the evidence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.catalog_flags import catalog_option, chosen_catalog
from keepstep.cli.output import emit, note, output_option
from keepstep.cli.reading_flags import jobs_of, jobs_option, live_answers, live_option
from keepstep.cli.runs import moment_ns
from keepstep.cli.why_inputs import Asked, asked, matcher_of
from keepstep.records.errors import KeepstepError
from keepstep.records.exits import EXIT_OK, EXIT_PROBLEM

if TYPE_CHECKING:
    from keepstep.attribution.verdict import Judgement


@click.command(
    epilog="Exit codes: 3 there is a current fault, or nothing says that there is none; 0 there is none; "
    "1 nothing could be read; 6 no such path."
)
@click.argument("paths", nargs=-1)
@click.option("--run", help="The run that an incident (INC-0001) is of; alone: its last failed cycle.")
@click.option(
    "--cycle", type=click.IntRange(min=0), metavar="N", help="Of a run folder: this cycle, not the last failed."
)
@click.option("--since", metavar="TIME", help="Older signs do not count: 30m, 2h, 1d before now, or an RFC 3339 time.")
@click.option("--until", metavar="TIME", help="Later signs are left out.")
@click.option("--now", metavar="TIME", help='What "now" is, for spans of time (RFC 3339).')
@click.option("--explain", is_flag=True, help="Show every term of the sums behind the verdict.")
@click.option("--summarize-with", metavar="URL", help="Chat endpoint (OpenAI's protocol) that words a summary, beside.")
@click.option("--summarize-model", metavar="NAME", default="default", help="Model that the endpoint is asked for.")
@click.option("--summary-file", type=click.Path(path_type=Path), help="Where the summary goes; default: stderr.")
@live_option
@jobs_option
@catalog_option
@output_option
def why(
    paths: tuple[str, ...],
    run: str | None,
    cycle: int | None,
    since: str | None,
    until: str | None,
    now: str | None,
    explain: bool,
    summarize_with: str | None,
    summarize_model: str,
    summary_file: Path | None,
    live: tuple[str, ...],
    jobs: int | None,
    catalog_files: tuple[Path, ...],
    output: str,
) -> None:
    """Say whose fault it was, with evidence, from logs and records in PATH... ("-": standard input).

    PATH may be a run folder, or an incident of a run (INC-0001).
    """
    now_ns = time.time_ns() if now is None else moment_ns(now, 0, "--now")
    window = tuple(None if t is None else moment_ns(t, now_ns, n) for t, n in ((since, "--since"), (until, "--until")))
    question = asked(paths, run, cycle, live=bool(live))
    fields = question.recorded or judged(question, window[0], window[1], explain, catalog_files, live, jobs_of(jobs))
    emit(
        fields,
        output,
        table=lambda console, wide: _show(fields, console, wide),
        name=lambda found: str(found["signature"]),
    )
    if summarize_with is not None:
        from keepstep.cli.summarize import add_summary

        add_summary(fields, summarize_with, summarize_model, summary_file)
    raise SystemExit(EXIT_OK if fields["no_current_fault"] else EXIT_PROBLEM)


def judged(
    question: Asked,
    since_ns: int | None,
    until_ns: int | None,
    explain: bool,
    catalog_files: Sequence[Path] = (),
    live: Sequence[str] = (),
    jobs: int = 1,
) -> dict[str, Any]:
    """The verdict on what is asked about, and on what live sources say, as keepstep.verdict/1 with what it came from.

    Raises KeepstepError.
    """
    from keepstep.launcher.diagnosis import diagnose, diagnosis_fields, earlier_incidents, incident_fields

    catalog = chosen_catalog(catalog_files)
    folder, cycle = question.folder, question.cycle
    past = [] if folder is None or cycle is None else earlier_incidents(folder, cycle.cycle)
    found = diagnose(
        question.paths,
        question.ranks,
        catalog=catalog,
        matcher=matcher_of(catalog),
        since_ns=since_ns,
        until_ns=until_ns,
        past=past,
        answers=live_answers(live, catalog),
        jobs=jobs,
    )
    if not found.reading.used and found.hang is None:
        because = "; ".join(found.reading.unreadable) or "no files in it"
        raise KeepstepError(f"nothing could be read: {because}")
    fields = diagnosis_fields(found, catalog)
    if cycle is not None:
        fields["cycle"] = cycle.cycle  # one cycle is one incident
    elif several := incident_fields(found, catalog, question.ranks):
        fields["incidents"] = several
    return fields | ({"scores": scores_of(found.judgement)} if explain else {})


def scores_of(judgement: Judgement) -> dict[str, Any]:
    """Every term of the sums, in natural log-odds, and the probabilities they make."""
    from keepstep.catalog.priors import shipped_priors
    from keepstep.records.verdict import CLASSES

    scores = judgement.scores
    return {
        "priors": dict(shipped_priors().log_odds),
        "terms": [
            {
                "signature": t.signature,
                "share": round(t.share, 3),
                "note": t.note,
                "adds": {c: round(t.adds(c), 4) for c in CLASSES if t.adds(c)},
            }
            for t in scores.terms
        ],
        "sums": {c: round(scores.sums[c], 4) for c in CLASSES},
        "chances": {c: round(scores.chances[c], 6) for c in CLASSES},
        "action_note": judgement.choice.note,
    }


def _show(fields: dict[str, Any], console: Any, wide: bool) -> None:
    from keepstep.cli.why_table import show, show_terms

    show(fields, console, wide=wide)
    if "scores" in fields:
        show_terms(fields["scores"], console)
    if fields.get("incident"):
        note(f"{fields['incident']} as it was recorded")
