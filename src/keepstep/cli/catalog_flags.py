"""`--catalog FILE`: what a site changed in the catalog, for the verbs that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keepstep.launcher.files import keepstep_home

if TYPE_CHECKING:
    from keepstep.catalog.load import Catalog

F = TypeVar("F", bound=Callable[..., Any])


def catalog_option(function: F) -> F:
    """Add `--catalog`, which may be given several times; the function receives `catalog_files`."""
    option = click.option(
        "--catalog",
        "catalog_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Changes to the catalog (TOML), after those in $KEEPSTEP_HOME/catalog.d.",
    )
    return option(function)


def chosen_catalog(files: Sequence[Path]) -> Catalog:
    """The shipped catalog with the site's files and those given. Raises ConfigError naming file, entry and key."""
    from keepstep.catalog.load import load, site_files

    return load([*site_files(keepstep_home()), *files])
