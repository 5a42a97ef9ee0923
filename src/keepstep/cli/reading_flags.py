"""Flags of verbs that read logs: running sources that are asked beside files, and how many processes read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from keepstep.catalog.load import Catalog
    from keepstep.sources.reading import Answered

F = TypeVar("F", bound=Callable[..., object])


def live_option(function: F) -> F:
    """Add `--live`, which may be given several times; the function receives `live`."""
    option = click.option(
        "--live",
        multiple=True,
        metavar="SOURCE",
        help="Ask now: kernel, gpu, tools, dcgm[=URL], ib[=SECONDS], slurm[=JOB], kubernetes=NAMESPACE/SELECTOR; repeatable.",
    )
    return option(function)


def jobs_option(function: F) -> F:
    """Add `--jobs`; the function receives `jobs`, None without it."""
    option = click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N", help="Processes that read many files [default: one a core]."
    )
    return option(function)


def jobs_of(jobs: int | None) -> int:
    """Processes that read: those asked for, else one for each core that this process may use."""
    return jobs or len(os.sched_getaffinity(0))


def live_answers(sources: Sequence[str], catalog: Catalog) -> list[Answered]:
    """What the sources say. Raises ConfigError for a source that is none."""
    if not sources:
        return []
    from keepstep.sources.live.asking import ask_all

    return ask_all(sources, catalog)
