"""The file form of a RulesPolicy, TOML or JSON, until a package `policy` takes its place.

default = "ask_human"                 # where no rule holds; ask_human if not given

[[rule]]                              # the first one whose conditions all hold
class = ["hardware", "fabric"]        # one or several
tier = "certain"                      # one or several
signature = "xid."                    # begin of it
min_confidence = 0.9                  # of the class, 0 to 1
min_incidents = 2                     # of the node within a day, this one counted
action = "cordon_node"
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from typing import Any, get_args

from keepstep.planner.policies import Rule, RulesPolicy
from keepstep.records.errors import ConfigError
from keepstep.records.verdict import CLASSES, Action, Tier

ACTIONS: tuple[str, ...] = get_args(Action)
TIERS: tuple[str, ...] = get_args(Tier)
_TOP = ("default", "rule")
_KEYS = ("class", "tier", "signature", "min_confidence", "min_incidents", "action")


def parse_policy(text: str, path: str) -> RulesPolicy:
    """The policy that a file says; it is called as the file. Raises ConfigError naming file, rule, key, value and near names."""
    found = _parsed(text, path)
    for key in found:
        if key not in _TOP:
            raise ConfigError(
                f"policy {path}: {key}: no such key; it may hold default and [[rule]] tables{_near(key, _TOP)}"
            )
    tables = found.get("rule", [])
    if not isinstance(tables, list):
        raise ConfigError(f"policy {path}: rule {tables!r}: write each rule as a [[rule]] table")
    default = _one_of(found.get("default", "ask_human"), ACTIONS, f"policy {path}: default")
    rules = [_rule(fields, f"policy {path}: rule {number}") for number, fields in enumerate(tables, 1)]
    return RulesPolicy(path, tuple(rules), default)


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one
        raise ConfigError(f"policy {path}: neither TOML nor JSON: {error}") from error
    assert isinstance(found, dict)
    return found


def _rule(fields: Any, where: str) -> Rule:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: {fields!r}: not a table")
    for key in fields:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key}: no such key; a rule has {', '.join(_KEYS)}{_near(key, _KEYS)}")
    if "action" not in fields:
        raise ConfigError(f"{where}: action is missing; one of {', '.join(ACTIONS)}")
    signature = fields.get("signature", "")
    if not isinstance(signature, str):
        raise ConfigError(f"{where}: signature {signature!r}: the begin of a signature, such as 'xid.'")
    confidence = fields.get("min_confidence", 0.0)
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0.0 <= confidence <= 1.0:
        raise ConfigError(f"{where}: min_confidence {confidence!r}: a number from 0 to 1")
    least = fields.get("min_incidents", 1)
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise ConfigError(f"{where}: min_incidents {least!r}: a whole number from 1")
    return Rule(
        action=_one_of(fields["action"], ACTIONS, f"{where}: action"),
        classes=_several(fields.get("class"), CLASSES, f"{where}: class"),
        tiers=_several(fields.get("tier"), TIERS, f"{where}: tier"),
        signature=signature,
        min_confidence=float(confidence),
        min_incidents=least,
    )


def _several(value: Any, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{where} []: name at least one of {', '.join(names)}, or leave the key out")
    return tuple(_one_of(one, names, where) for one in values)


def _one_of(value: Any, names: tuple[str, ...], where: str) -> Any:
    if value not in names:
        raise ConfigError(f"{where} {value!r}: one of {', '.join(names)}{_near(value, names)}")
    return value


def _near(word: Any, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(names), n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
