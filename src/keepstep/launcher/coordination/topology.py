"""Where nodes are in the network: reading it, distances, rank order, and how scattered a set of nodes is.

A node's place is `levels`, a list of names, outermost first (block, spine, leaf, NVLink domain). A list may be empty (nothing
is known) and lists of different nodes may differ in length. Two nodes are in the same group of level i when their first i+1
names agree; nodes whose list is shorter form one group of their own below the last name they have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from keepstep.records.errors import ConfigError
from keepstep.records.hostlist import expand_hosts

_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-,\[\]]*")
_SLURM_KEYS = ("switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes")


# ---- reading


def read_topology(path: Path) -> dict[str, list[str]]:
    """Levels of every node that the file names. Raises ConfigError naming file, line and what is wrong.

    Two formats, told apart by the first line that is no comment:
    - a line a node, `NODE LEVEL0 LEVEL1 ...`, outermost level first; NODE may be a host range such as n[001-004,7];
    - Slurm's topology.conf of topology/tree (SwitchName=...) or topology/block (BlockName=...). A switch or node below several
      switches counts as below the first that names it. BlockSizes and LinkSpeed are ignored.
    `#` begins a comment.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--topology {path}: cannot be read as text: {error}; name a readable file") from error
    lines = [(number, line.split("#", 1)[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ConfigError(f"--topology {path}: names no node; write one line a node: NODE LEVEL0 LEVEL1 ...")
    if re.match(r"(?i)(switchname|blockname|blocksizes)\s*=", lines[0][1]):
        return _read_slurm(path, lines)
    return _read_plain(path, lines)


def _hosts_at(path: Path, number: int, text: str) -> list[str]:
    try:
        return expand_hosts(text)
    except ValueError as error:
        raise ConfigError(f"--topology {path}, line {number}: {error}") from None


def _read_plain(path: Path, lines: list[tuple[int, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    line_of: dict[str, int] = {}
    for number, line in lines:
        node, *levels = line.split()
        if not _NODE.fullmatch(node) or "=" in line:
            raise ConfigError(
                f"--topology {path}, line {number}: {line!r} is not NODE LEVEL0 LEVEL1 ...; "
                "the other format that is read is Slurm's topology.conf, which begins with SwitchName= or BlockName="
            )
        for name in _hosts_at(path, number, node):
            if name in places:
                raise ConfigError(
                    f"--topology {path}, line {number}: node {name!r} is in line {line_of[name]} already; keep one of them"
                )
            places[name], line_of[name] = levels, number
    return places


class _Switch(msgspec.Struct):
    """A line of topology.conf while it is read."""

    line: int
    nodes: list[str]
    switches: list[str]


def _read_slurm(path: Path, lines: list[tuple[int, str]]) -> dict[str, list[str]]:
    switches: dict[str, _Switch] = {}
    for number, line in lines:
        fields = _slurm_fields(path, number, line)
        name = fields.get("switchname") or fields.get("blockname")
        if name is None and "blocksizes" in fields:
            continue
        if name is None or not ("nodes" in fields or "switches" in fields):
            raise ConfigError(
                f"--topology {path}, line {number}: {line!r} needs SwitchName= with Switches= or Nodes=, "
                "or BlockName= with Nodes="
            )
        if name in switches:
            raise ConfigError(
                f"--topology {path}, line {number}: {name!r} is in line {switches[name].line} already; keep one of them"
            )
        nodes = _hosts_at(path, number, fields["nodes"]) if "nodes" in fields else []
        below = _hosts_at(path, number, fields["switches"]) if "switches" in fields else []
        switches[name] = _Switch(number, nodes, below)
    parents: dict[str, str] = {}
    for name, switch in switches.items():
        for child in switch.switches:
            if child not in switches:
                raise ConfigError(f"--topology {path}, line {switch.line}: no line defines switch {child!r}; add it")
            parents.setdefault(child, name)
    places: dict[str, list[str]] = {}
    for name, switch in switches.items():
        levels = _above(path, name, switch.line, parents)
        for node in switch.nodes:
            places.setdefault(node, levels)
    return places


def _slurm_fields(path: Path, number: int, line: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for key, value in re.findall(r"(\S+?)\s*=\s*(\S*)", line):
        if key.lower() not in _SLURM_KEYS or not value:
            raise ConfigError(
                f"--topology {path}, line {number}: {key}={value} is not one of "
                "SwitchName, Switches, Nodes, LinkSpeed, BlockName, BlockSizes with a value"
            )
        fields[key.lower()] = value
    return fields


def _above(path: Path, name: str, line: int, parents: Mapping[str, str]) -> list[str]:
    chain = [name]
    while chain[-1] in parents:
        if parents[chain[-1]] in chain:
            raise ConfigError(f"--topology {path}, line {line}: switch {name!r} is below itself; remove the loop")
        chain.append(parents[chain[-1]])
    return chain[::-1]


def own_levels(env: Mapping[str, str]) -> list[str]:
    """This node's levels from its environment; [] when it says nothing.

    KEEPSTEP_TOPOLOGY="block/spine/leaf" goes first (ConfigError when a part is empty). Else Slurm's SLURM_TOPOLOGY_ADDR, names
    joined by dots from the top switch down to the node; SLURM_TOPOLOGY_ADDR_PATTERN says of each whether it is "switch",
    "block" or "node", and only the node's own name may contain further dots (srun's manual, "output environment variables").
    """
    if own := env.get("KEEPSTEP_TOPOLOGY"):
        levels = [part.strip() for part in own.split("/")]
        if not all(levels):
            raise ConfigError(f"KEEPSTEP_TOPOLOGY={own!r}: a level is empty; write BLOCK/SPINE/LEAF, outermost first")
        return levels
    pattern = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if not env.get("SLURM_TOPOLOGY_ADDR") or pattern == [""]:
        return []
    parts = env["SLURM_TOPOLOGY_ADDR"].split(".", len(pattern) - 1)
    return [part for part, kind in zip(parts, pattern, strict=False) if part and kind != "node"]


# ---- distance and order


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levels below the deepest group that both places are in, counted in the longer list; 0 for the same place."""
    common = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        common += 1
    return max(len(a), len(b)) - common


@lru_cache(maxsize=65536)
def natural_key(name: str) -> tuple[Any, ...]:
    """Sort key with numbers by value: n2 before n10. Names that differ only in leading zeros still have an order."""
    parts = re.split(r"([0-9]+)", name)
    parts[1::2] = [digits.lstrip("0") for digits in parts[1::2]]
    return tuple((len(part), part) if at % 2 else part for at, part in enumerate(parts)), name


def order(places: Mapping[str, Sequence[str]], first: Sequence[str] = ()) -> list[str]:
    """Names of the nodes in topology order: every group of every level is contiguous, natural order of names inside.

    `first`: nodes that come as early as that allows, earliest first; the group of each goes before its sibling groups. Nodes
    that say nothing at a level come after those that do. The result depends on the content of `places`, not on its order.
    """
    late = len(first)
    earliest: dict[tuple[str, ...], int] = {}
    position: dict[str, int] = {}
    for index, name in enumerate(first):
        position.setdefault(name, index)
        levels = tuple(places.get(name, ()))
        for depth in range(len(levels)):
            earliest.setdefault(levels[: depth + 1], index)
    group_keys = {levels: _group_key(levels, earliest, late) for levels in set(map(tuple, places.values()))}
    return sorted(
        places, key=lambda name: (group_keys[tuple(places[name])], position.get(name, late), natural_key(name))
    )


def _group_key(levels: Sequence[str], earliest: Mapping[tuple[str, ...], int], late: int) -> tuple[Any, ...]:
    prefixes = (tuple(levels[: depth + 1]) for depth in range(len(levels)))
    return (*((0, earliest.get(prefix, late), natural_key(prefix[-1])) for prefix in prefixes), (1,))


# ---- scatter


def choose(ordered: Sequence[Sequence[str]], n: int, unit: int = 1) -> list[int]:
    """Which n of these places to take for few groups; indices into `ordered`, ascending.

    The rule, from the outermost level inwards: when one group is large enough, the smallest such group gives all; else the
    largest is taken whole and the rule goes on with what is still missing. Ties go to the group that comes first in `ordered`.
    Sizes count in whole units of `unit` nodes, so that a replica of several nodes lies inside one group while groups have
    room for whole ones. n must be a multiple of `unit` and at most the number of places.
    """
    return sorted(_take(ordered, list(range(len(ordered))), 0, n // unit, unit))


def _take(ordered: Sequence[Sequence[str]], members: list[int], depth: int, units: int, unit: int) -> list[int]:
    if units * unit == len(members):
        return members
    groups: dict[str | None, list[int]] = {}
    for index in members:
        levels = ordered[index]
        groups.setdefault(levels[depth] if depth < len(levels) else None, []).append(index)
    if list(groups) == [None]:
        return members[: units * unit]
    by_size = sorted(groups.values(), key=lambda group: -(len(group) // unit))
    taken: list[int] = []
    missing = units
    for at, group in enumerate(by_size):
        if not missing or len(group) < unit:
            break
        if len(group) // unit >= missing:
            enough = [other for other in by_size[at:] if len(other) // unit >= missing]
            smallest = min(enough, key=lambda other: len(other) // unit)
            taken += _take(ordered, smallest, depth + 1, missing, unit)
            missing = 0
        else:
            taken += _take(ordered, group, depth + 1, len(group) // unit, unit)
            missing -= len(group) // unit
    if missing:
        used = set(taken)
        taken += [index for index in members if index not in used][: missing * unit]
    return taken


def scatter(
    ring: Sequence[Sequence[str]], available: Sequence[Sequence[str]] | None = None, unit: int = 1
) -> dict[str, Any]:
    """How scattered a job is: `ring` is the levels of its nodes in rank order, the last one next to the first.

    {levels: [{level, groups, crossings, best_crossings, best_groups}], warning}, one entry a level, 0 the outermost:
    - groups: different groups that the nodes are in;
    - crossings: neighbours in the ring that are in different groups;
    - best_crossings: the least over all orders of these same nodes (one a group, none when there is one group only);
    - best_groups: groups that `choose` would need among `available` (the job's nodes and the spares, whatever their
      number of ranks), never more than groups.
    warning: None, or a sentence on the levels where crossings or groups are above the best.
    """
    report: list[dict[str, int]] = []
    fresh: list[Sequence[str]] = []
    if available is not None and len(available) >= len(ring):
        places = list(map(tuple, available))
        keys_of = {levels: _group_key(levels, {}, 0) for levels in set(places)}
        everything = sorted(places, key=keys_of.__getitem__)
        chosen = choose(everything, len(ring), unit if len(ring) % unit == 0 else 1)
        fresh = [everything[index] for index in chosen]
    for level in range(max(map(len, ring), default=0)):
        keys = [tuple(levels[: level + 1]) for levels in ring]
        groups = len(set(keys))
        best_groups = len({tuple(levels[: level + 1]) for levels in fresh}) or groups
        report.append(
            {
                "level": level,
                "groups": groups,
                "crossings": sum(key != keys[at - 1] for at, key in enumerate(keys)),
                "best_crossings": groups if groups > 1 else 0,
                "best_groups": min(groups, best_groups),
            }
        )
    worse = [
        f"level {entry['level']}: {entry['groups']} groups (best {entry['best_groups']}), "
        f"{entry['crossings']} crossings (best {entry['best_crossings']})"
        for entry in report
        if entry["crossings"] > entry["best_crossings"] or entry["groups"] > entry["best_groups"]
    ]
    warning = f"the job is more scattered than it need be: {'; '.join(worse)}" if worse else None
    return {"levels": report, "warning": warning}
