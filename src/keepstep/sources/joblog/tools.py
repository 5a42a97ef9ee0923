"""Whether a command is one of a person who looks at a job: what such a program raises says nothing of the job.

Told by the name of the program, of the script or of the module, not by options: `train.py --profile` is the job. A program that
shows a log prints the tracebacks in it too: what is its own has frames in its own files.
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
    r"(?:nvidia|rocm|amd)-smi|dcgmi?\b|"
    r"analy[sz]|inspect|plot|visuali[sz]|dashboard|exporter|monitor|summari[sz]e|triage|diagnos|parse|report"
)
_JOB = re.compile(r"(?i)train|tune|launch|pipeline|main\b|serve")
"""In the name of a script: it does the work itself, whatever else it is called."""
_RUNS = frozenset({"agent", "launch", "run", "exec", "record", "profile", "job", "attach"})
"""First words after a tool's name with which it starts a program of its own."""
_READ = re.compile(r"[\w./@%+-]{1,300}\.(?:log|out|err|trace|pkl|pickle)(?:\.\d+|\.gz)?$")
"""A script that is given a log or a dump reads it."""
_SERVICE = re.compile(
    r"\b(?:journalctl\b.{0,60}?(?:-u|--unit)[ =]?|systemctl status |(?:docker|podman|kubectl|oc|crictl) logs (?:-\S+ )*)"
    r"(?P<name>[\w./@:-]+)"
)
"""A command that shows the log of a service, with its name."""
_INSIDE = {
    "kubectl": "exec",
    "oc": "exec",
    "docker": "exec",
    "podman": "exec",
    "crictl": "exec",
    "srun": "--overlap",
    "ssh": "",
}
"""Programs that run another one where a job is, and the word with which they do."""


def raised_by_tool(title: str, paths: Sequence[str]) -> bool:
    """Whether a traceback under a command is that of the command itself: it began in a file of it. `paths`: files of its frames."""
    if not paths:
        return False
    if (service := _SERVICE.search(title[:LONGEST])) is not None:
        return _of_monitor(service["name"]) and _TOOL.search(paths[0]) is not None
    if not looks_on(title):
        return False
    stem, first = _stem(title), paths[0]
    own = first.rpartition("/")[2].removesuffix(".py") == stem or f"/{stem}/" in first
    return own or _TOOL.search(first) is not None


def _of_monitor(name: str) -> bool:
    return _TOOL.search(name) is not None and _JOB.search(name) is None


def looks_on(title: str) -> bool:
    """Whether the title of a document is a command that only looks."""
    if (service := _SERVICE.search(title[:LONGEST])) is not None:
        return _of_monitor(service["name"])
    words = _command(title)
    if not words:
        return False
    name = words[0].rpartition("/")[2] if "flight_recorder" not in words[0] else words[0]
    if _JOB.search(name.rpartition("/")[2]) is not None or (len(words) > 1 and words[1] in _RUNS):
        return False
    return _TOOL.search(name) is not None or (name.endswith(".py") and _reads(words[1:]))


def _command(title: str) -> list[str]:
    return _program(_inner(title[:LONGEST].split(), 0))


def _stem(title: str) -> str:
    """The name of the program as its files have it."""
    return _command(title)[0].rpartition("/")[2].removesuffix(".py")


def _reads(arguments: Sequence[str]) -> bool:
    """Whether a log is among the arguments, other than one to be written."""
    for index, word in enumerate(arguments):
        if word in ("|", ">", ">>", "2>", "&>", "tee") or word.startswith((">", "2>", "&>")):
            return False
        before = arguments[index - 1] if index else ""
        if _READ.match(word) is not None and not before.startswith("-"):
            return True
    return False


def _inner(words: Sequence[str], depth: int) -> list[str]:
    """The command that another one runs elsewhere; the words themselves where none does."""
    left = _program(words)
    if not left or depth > 2:
        return list(words)
    opener = _INSIDE.get(left[0].rpartition("/")[2])
    if opener is None or (opener and opener not in left):
        return list(words)
    rest = left[left.index("--") + 1 :] if "--" in left else _without_options(left[1:], left[0] != "srun", opener)
    return _inner([w.strip("'\"") for w in rest], depth + 1)


def _without_options(words: Sequence[str], placed: bool, opener: str) -> list[str]:
    """What follows options and, where `placed`, the name of a machine or a container."""
    left = [w for w in words if w != opener]
    while left and left[0].startswith("-"):
        takes = left[0] in ("-n", "-N", "-w", "-p", "-i", "-c", "-u", "-e", "--jobid", "--nodelist")
        left = left[2:] if takes else left[1:]
    return left[1:] if placed else left


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
