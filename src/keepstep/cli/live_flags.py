"""The flag with which `scan` and `why` ask running sources beside files."""

from __future__ import annotations

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


def live_answers(sources: Sequence[str], catalog: Catalog) -> list[Answered]:
    """What the sources say. Raises ConfigError for a source that is none."""
    if not sources:
        return []
    from keepstep.sources.live.asking import ask_all

    return ask_all(sources, catalog)
