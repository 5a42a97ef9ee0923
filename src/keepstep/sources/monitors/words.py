"""Which part of a machine the words of a monitor are about."""

from __future__ import annotations

import re
from typing import Literal

Part = Literal["own", "remap", "gpu", "fabric", "storage", "platform", "other"]
"""own: the monitor itself or its way to the device. remap: memory rows of a GPU that wait to be replaced."""

_PARTS: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("remap", re.compile(r"remap|(?:page|row)[ _-]?retire", re.IGNORECASE)),
    (
        "own",
        re.compile(
            r"host ?engine|dcgm(?:connect|init|error|unreach)|DCGM_CONNECTIVITY|(?:connect|connection|connectivity)\b"
            r"|unreachable|timed? ?out|plugin|probe|monitor(?:down|failed|not)",
            re.IGNORECASE,
        ),
    ),
    (
        "fabric",
        re.compile(
            r"infini?band|\bib\b|\brdma\b|\broce\b|mlx5|\bnic\b|\bnet(?:work|dev)|ethernet|\bports?\b|port(?:\(s\)|down|drop|flap|err|inactive)",
            re.IGNORECASE,
        ),
    ),
    (
        "gpu",
        re.compile(
            r"gpu|xid|ecc|nvlink|nvswitch|accelerat|nvidia|thermal|temperature|pcie|memory error", re.IGNORECASE
        ),
    ),
    ("storage", re.compile(r"disk|file ?system|read-?only|mount|xfs|nvme|storage", re.IGNORECASE)),
    ("platform", re.compile(r"kubelet|containerd|docker|runtime|pressure|ntp|clock|deadlock|task hung", re.IGNORECASE)),
)


def part_of(*texts: str) -> Part:
    """The part that the first of the texts which names any is about: a reason says more than the name of a condition."""
    for text in texts:
        for part, pattern in _PARTS:
            if pattern.search(text):
                return part
    return "other"
