"""Host lists as Slurm writes them: `n[001-003,7],login`."""

from __future__ import annotations

import itertools
import math
import re

MAX_EXPANDED = 100_000
"""Names that one host range may stand for; more is a typing error."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand_hosts(text: str) -> list[str]:
    """Names that a Slurm host list stands for: `n[001-003,7],login` -> n001 n002 n003 n7 login.

    Several brackets in one name multiply. Leading zeros of a range's lower end give its width. Raises ValueError saying
    what is wrong. Format: "hostlist expressions" in the Slurm documentation.
    """
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not item or "".join(part.group(0) for part in _PART.finditer(item)) != item:
            raise ValueError(f"{item or text!r} is no host name or host range such as n[001-004,7]")
        parts = [[plain] if plain else _numbers(inside) for inside, plain in _PART.findall(item)]
        size = len(names) + math.prod(len(choices) for choices in parts)
        if size > MAX_EXPANDED:
            raise ValueError(f"{item!r} makes the list longer than {MAX_EXPANDED} names")
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


def _numbers(inside: str) -> list[str]:
    found: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"[{inside}]: {item!r} is no number or range such as 001-004")
        low, high = match.group(1), match.group(2) or match.group(1)
        if len(high) > 9 or int(high) < int(low) or int(high) - int(low) >= MAX_EXPANDED:
            raise ValueError(f"[{inside}]: {item!r} is no range from a lower to a higher number")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found
