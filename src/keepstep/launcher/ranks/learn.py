"""Which modules of a script may be preloaded for its next cycle."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
from pathlib import Path

from keepstep.launcher.config import RunConfig


def library_folders() -> list[str]:
    """Folders of installed packages and of the standard library."""
    paths = sysconfig.get_paths()
    return sorted({os.path.realpath(paths[k]) for k in ("purelib", "platlib", "stdlib", "platstdlib")})


def worth_learning(names: list[str], config: RunConfig) -> list[str]:
    """Of the modules a rank imported, those that belong to installed packages or to Python.

    The user's own modules are left out, so that a corrected file is really read again; so is anything an editable install
    puts on the path. Nothing is imported to find out: only the top-level name is looked up.
    """
    folders = library_folders()
    script_dir = str(Path(config.script).resolve().parent) if config.mode == "script" else str(Path.cwd())
    # The script's folder comes first on its path: a module found there is the user's, whatever its name.
    search = [script_dir, *(p for p in sys.path if p)]
    answer: dict[str, bool] = {}
    for name in names:
        top = name.partition(".")[0]
        if top not in answer:
            answer[top] = _from_library(top, search, folders, script_dir)
    return [n for n in names if answer[n.partition(".")[0]]]


def _from_library(top: str, search: list[str], folders: list[str], script_dir: str) -> bool:
    if top in sys.builtin_module_names:
        return True
    spec = importlib.machinery.PathFinder.find_spec(top, search)
    origin = spec.origin if spec is not None else None
    if origin is None or origin in ("built-in", "frozen"):
        return origin is not None
    real = os.path.realpath(origin)
    if real.startswith(os.path.realpath(script_dir) + os.sep) and not real.startswith(
        tuple(f + os.sep for f in folders)
    ):
        return False
    return real.startswith(tuple(f + os.sep for f in folders))
