"""A nested state out of flat keys and the paths that torch's distributed checkpoints record for them.

What such a path does not tell is whether a key of a dict was a number or its text. The state of an optimizer tells (its groups
list the numbers); elsewhere it has to be said.
"""

from __future__ import annotations

from typing import Any, Literal

from keepstep.checkpoint.format.values import join
from keepstep.records.errors import ConfigError

Keys = tuple[str | int, ...]
"""Keys that lead to an item of the nested state: text for a dict's, numbers for places in a list."""
DigitKeys = Literal["int", "str"]


def name_of(path: Keys) -> str:
    """Name of the item at `path`, as encode() would give it; distinct paths never share one."""
    name = join("", path[0])[1:]
    for part in path[1:]:
        name = join(name, part)
    return name


class _Branch(dict[Any, Any]):
    """A dict or list of the nested state that is being put together; its keys are those of DCP's paths."""


def nest(
    leaves: dict[str, Any], paths: dict[str, Keys], digit_keys: DigitKeys | None, notes: list[str]
) -> dict[str, Any]:
    """The nested state whose items are `leaves`, placed by `paths` (a key without one lies at the top).

    What had to be decided is added to `notes`. Raises ConfigError when two items claim one place, a list has holes, or
    keys look like numbers and neither the state nor `digit_keys` says whether they were.
    """
    root = _Branch()
    for key, value in leaves.items():
        path = paths.get(key, (key,))
        at: Any = root
        for part in path[:-1]:
            at = at.setdefault(part, _Branch()) if type(at) is _Branch else None
        if type(at) is not _Branch or path[-1] in at:
            raise ConfigError(f"{key!r}: its place {path!r} in the state is taken by another item")
        at[path[-1]] = value
    unclear: list[str] = []
    nested = _grown(root, "", {}, unclear, digit_keys, notes)
    if unclear:
        raise ConfigError(
            f"keys under {', '.join(sorted(unclear)[:5])} look like numbers, and DCP does not record whether they were; "
            "say --digit-keys int or --digit-keys str"
        )
    if type(nested) is not dict:
        raise ConfigError("the saved state is no dict with names")
    return nested


def _grown(
    branch: Any, path: str, known: dict[str, Any], unclear: list[str], digit_keys: DigitKeys | None, notes: list[str]
) -> Any:
    """The list or dict that `branch`, at `path`, stands for. `known`: what texts of its keys were."""
    if type(branch) is not _Branch:
        return branch
    if all(type(key) is int for key in branch):
        if sorted(branch) != list(range(len(branch))):
            raise ConfigError(f"list {path!r} has holes: DCP keeps no empty dict, so items of it are lost")
        return [_grown(branch[at], join(path, at), {}, unclear, digit_keys, notes) for at in range(len(branch))]
    result: dict[Any, Any] = {}
    numbers: dict[str, Any] = {}
    if "param_groups" in branch:
        groups = _grown(branch["param_groups"], join(path, "param_groups"), {}, unclear, digit_keys, notes)
        numbers = _parameters(groups)
        if numbers and "state" not in branch:
            branch = _Branch({"state": _Branch({}), **branch})
            notes.append(f"{path or 'the state'}: an optimizer without state (DCP keeps no empty dict)")
    if any(_is_number(key) and key not in known for key in branch) and digit_keys is None:
        unclear.append(path or "the top")
    for key, value in branch.items():
        name = known.get(key, int(key) if digit_keys == "int" and _is_number(key) else key)
        inner = numbers if key == "state" else {}
        place = join(path, key) if path else str(key)
        # An optimizer's state may be empty, which no other branch can be: nothing leads to an empty one.
        result[name] = {} if value == {} else _grown(value, place, inner, unclear, digit_keys, notes)
    return result


def _parameters(groups: Any) -> dict[str, Any]:
    """Keys of an optimizer's state by their text, from the groups that list them; empty when these are no such groups."""
    if type(groups) is not list or not all(
        type(group) is dict and type(group.get("params")) is list for group in groups
    ):
        return {}
    return {str(key): key for group in groups for key in group["params"] if type(key) in (int, str)}


def _is_number(key: Any) -> bool:
    """True for a text that an int key would have become."""
    return type(key) is str and len(key) < 100 and key.lstrip("-").isdecimal() and str(int(key)) == key
