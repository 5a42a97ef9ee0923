"""Whether a command is one of a person who looks at a job: what such a program raises says nothing of the job.

Told by the name of the program, of the script or of the module, never by arguments: `train.py --profile` is the job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 1000
"""Characters of a command that are looked at."""

_WRAPPERS = frozenset(
    {"sudo", "time", "timeout", "watch", "nice", "env", "uv", "poetry", "pipx", "uvx", "run", "stdbuf"}
)
_PYTHON = re.compile(r"(?:pypy|python)[\d.]*$")
_SETTING = re.compile(r"[A-Za-z_]\w*=\S*$|\d+(?:\.\d+)?[smh]?$|-")
_TOOL = re.compile(
    r"(?i)(?:torch)?fr_?trace|flight_?recorder|nvitop|nvtop|gpustat|tensorboard|wandb|mlflow|collect_env|py-?spy|"
    r"(?:nvidia|rocm|amd)-smi|dcgmi?\b|kubectl|squeue|sacct|sinfo|"
    r"analy[sz]|inspect|plot|visuali[sz]|dashboard|exporter|monitor|summari[sz]e|triage|diagnos"
)
_JOB = re.compile(r"(?i)train|tune|launch|pipeline|main\b|serve")
"""In the name of a script: it does the work itself, whatever else it is called."""
_RUNS = frozenset({"agent", "launch", "run", "exec", "record", "profile", "job", "attach"})
"""First words after a tool's name with which it starts a program of its own."""


def looks_on(title: str) -> bool:
    """Whether the title of a document is a command that only looks."""
    words = _program(title[:LONGEST].split())
    if not words:
        return False
    name = words[0].rpartition("/")[2] if "flight_recorder" not in words[0] else words[0]
    if _TOOL.search(name) is None or _JOB.search(name.rpartition("/")[2]) is not None:
        return False
    return not (len(words) > 1 and words[1] in _RUNS)


def _program(words: Sequence[str]) -> list[str]:
    """The words from the name of the program on: of Python that of its script or module."""
    left = list(words)
    while left and (left[0] in _WRAPPERS or _SETTING.match(left[0])):
        left = left[1:]
    if left and _PYTHON.match(left[0].rpartition("/")[2]):
        left = left[1:]
        while left and left[0].startswith("-"):
            module = left[0] == "-m"
            left = left[1:]
            if module and left:
                return [left[0].replace(".", "/"), *left[1:]]
    return left
