"""What names of files, folders and sections tell: whose lines they hold."""

from __future__ import annotations

import re
from typing import NamedTuple

from keepstep.sources.timestamps import Stamp, stamp_in

_RANK = re.compile(r"(?:^|[^a-z])rank[-_. ]?0*(?P<rank>\d{1,7})(?![\d])", re.IGNORECASE)
_ATTEMPT = re.compile(r"(?:^|/)attempt_\d+/(?P<local>\d{1,4})/(?:stdout|stderr|error)\b")
"""torchrun --log-dir: <run>/attempt_N/<local rank>/stdout.log."""
_HOST = r"[A-Za-z][A-Za-z0-9]*(?:[-.][A-Za-z0-9]+)*"
_WORD_HOST = re.compile(rf"(?:\b(?:on|node|host|from)[ =:]+|@)(?P<node>{_HOST})")
_BEFORE_PATH = re.compile(rf"^(?P<node>{_HOST}):(?:/|[\w.-]+\.log|dmesg|journal|kern)")
_LOG_WORDS = r"dmesg|kern(?:el)?|messages|syslog|journal(?:ctl)?|nvidia-smi|ibstat|nvidia-bug-report|slurmd|kubelet"
_BESIDE_WORD = re.compile(
    rf"^(?P<a>{_HOST}?)[-_. ](?:{_LOG_WORDS})\b|(?:^|/)(?:{_LOG_WORDS})[-_. ]\(?(?P<b>{_HOST})\)?", re.IGNORECASE
)
_KERNEL = re.compile(r"\b(?:dmesg|kmsg|kern(?:el)?)\b|journalctl.* -k\b|journalctl.* --dmesg\b", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.(?:log|txt|out|err|std(?:out|err)|gz|zst|json|jsonl|\d+))+$")
_PROMPT = re.compile(rf"\[?(?P<user>[\w.-]+)@(?P<node>{_HOST})[ :]")
_POD = re.compile(
    r"(?:[\w.-]+-)?(?:worker|trainer|master|launcher|replica|chief|pod|ps|learner|node)(?:-\d+){1,3}(?:-[a-z0-9]{5})?"
)
"""Names that operators and JobSet give to pods."""
_COUNTED_WORDS = """
rank attempt cycle step iter epoch run job slurm part xid gpu exp experiment test trial v version ckpt checkpoint
output out log logs tmp temp pytest seed phase stage day date model layer try task array case input file global_step
train eval mlx rocep ibp eth ens enp eno bond
"""
_COUNTED = frozenset(_COUNTED_WORDS.split())
"""Words before a number that is not part of a machine's name."""
_NAME_SHAPE = re.compile(r"[A-Za-z]+(?:[-.][A-Za-z]+)*[-.]?\d[A-Za-z0-9]*(?:[-.][A-Za-z0-9]+)*")


class Hints(NamedTuple):
    """What a name tells about all lines of its text. `stamp`: a time that the name carries."""

    node: str | None = None
    pod: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    kernel: bool = False
    stamp: Stamp | None = None

    def over(self, outer: Hints) -> Hints:
        """These hints, and where they say nothing those of what is around."""
        return Hints(
            node=self.node or outer.node,
            pod=self.pod or outer.pod,
            rank=outer.rank if self.rank is None else self.rank,
            local_rank=outer.local_rank if self.local_rank is None else self.local_rank,
            kernel=self.kernel or outer.kernel,
            stamp=self.stamp or outer.stamp,
        )


def is_node(name: str | None) -> bool:
    """Whether a word looks like the name of one machine: letters, then a number, and not something else that is counted."""
    if not name or len(name) > 253 or _NAME_SHAPE.fullmatch(name) is None:
        return False
    word = re.split(r"[-.]?\d", name, maxsplit=1)[0].lower()
    return word not in _COUNTED or (word == "gpu" and name[3] == "-")


def of_title(title: str) -> Hints:
    """Hints of a section's title or of a command: `rank9.log`, `h3:/var/log/messages`, `kernel on h-12, 1755086100`."""
    if not title:
        return Hints()
    rank = _RANK.search(title)
    node = None
    for pattern in (_BEFORE_PATH, _WORD_HOST, _BESIDE_WORD):
        match = pattern.search(title)
        if match is not None:
            named = next((n for n in match.groups() if n), None)
            if is_node(named):
                node = named
                break
    bare = _SUFFIXES.sub("", title)
    pod = bare if _POD.fullmatch(bare) is not None else None
    if node is None and pod is None and is_node(bare):
        node = bare
    return Hints(
        node=node,
        pod=pod,
        rank=int(rank["rank"]) if rank is not None else None,
        kernel=bool(_KERNEL.search(title)),
        stamp=stamp_in(title),
    )


def of_path(path: str) -> Hints:
    """Hints of a path below the folder that was given: the file's own name, then the folders above it, nearest first.

    Folders above the one that was given are not asked: they are named after days, users and runs.
    """
    *folders, own = path.split("/")[-6:]
    hints = of_title(_SUFFIXES.sub("", own))
    local = _ATTEMPT.search(path)
    if local is not None:
        hints = hints._replace(local_rank=int(local["local"]))
    for folder in reversed(folders):
        rank = _RANK.search(folder)
        if hints.rank is None and rank is not None:
            hints = hints._replace(rank=int(rank["rank"]))
        if hints.node is None and _POD.fullmatch(folder) is None and is_node(folder):
            hints = hints._replace(node=folder)
    return hints


def of_prompt(prompt: str) -> str | None:
    """The machine in a shell's prompt: `[root@h3 ~]`, `ubuntu@gpu-17:~`."""
    match = _PROMPT.match(prompt)
    return match["node"] if match is not None else None
