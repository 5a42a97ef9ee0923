"""--rdzv-conf: the keys that torchrun's rendezvous backends take, and what each does here."""

from __future__ import annotations

import difflib
import math
from typing import NamedTuple

from keepstep.cli.output import note
from keepstep.records.errors import ConfigError

HONOURED, NO_EFFECT, REFUSED = "honoured", "no effect", "refused"

KEYS: dict[str, tuple[str, str]] = {
    "join_timeout": (HONOURED, "how long nodes wait for each other, in seconds"),
    "timeout": (HONOURED, "the same for the static rendezvous"),
    "lease": (HONOURED, "keepstep's own: how long a node may be out of touch, in seconds"),
    "keep_alive_interval": (HONOURED, "times keep_alive_max_attempt it is the lease, as in torchrun (5 s times 3)"),
    "keep_alive_max_attempt": (HONOURED, "see keep_alive_interval"),
    "last_call_timeout": (
        HONOURED,
        "how long the first cycle waits for further nodes once there are enough, in seconds",
    ),
    "close_timeout": (NO_EFFECT, "a rendezvous is never closed; leave it out"),
    "heartbeat_timeout": (NO_EFFECT, "a heartbeat never blocks; leave it out"),
    "read_timeout": (NO_EFFECT, "the store of each cycle is on the node that uses it; leave it out"),
    "store_connect_wait_seconds": (NO_EFFECT, "join_timeout covers it"),
    "is_host": (
        HONOURED,
        "true or false: whether this launcher starts the coordinator; default: when the first --rdzv-endpoint is this host",
    ),
    "store_type": (NO_EFFECT, "the coordinator is a server, not a store; leave it out"),
    "use_libuv": (NO_EFFECT, "torch ignores it too; set USE_LIBUV"),
    "rank": (NO_EFFECT, "torchrun overwrites it too; use --node-rank or --node-name"),
}
"""Key -> (what becomes of it, a word on it). `store_type` other than tcp is refused: it needs no server at all."""


class RdzvConf(NamedTuple):
    """What --rdzv-conf came to, in seconds."""

    join_timeout_s: float = 600.0
    lease_s: float = 5.0
    last_call_s: float = 30.0
    is_host: bool | None = None


def parse_rdzv_conf(text: str) -> RdzvConf:
    """Read KEY=VALUE,... and say on stderr which keys have no effect.

    Raises ConfigError for an unknown key (naming the nearest), and for a value that is not a number above 0 where it counts.
    """
    numbers: dict[str, float] = {}
    is_host: bool | None = None
    for pair in text.split(",") if text.strip() else []:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf {pair!r}: give KEY=VALUE,...")
        kind, meaning = KEYS.get(key, (REFUSED, _unknown(key)))
        if key == "is_host":
            is_host = _truth(pair, value)
        elif kind == HONOURED:
            numbers[key] = _number(pair, value)
        elif kind == NO_EFFECT and not (key == "store_type" and value.lower() != "tcp"):
            note(f"--rdzv-conf {pair} has no effect here; {meaning}")
        else:
            raise ConfigError(f"--rdzv-conf {pair!r}: {meaning}")
    join = numbers.get("join_timeout", numbers.get("timeout", RdzvConf().join_timeout_s))
    lease = numbers.get("lease", RdzvConf().lease_s)
    if "lease" not in numbers and numbers.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
        lease = numbers.get("keep_alive_interval", 5.0) * numbers.get("keep_alive_max_attempt", 3.0)
    return RdzvConf(join, lease, numbers.get("last_call_timeout", RdzvConf().last_call_s), is_host)


def _number(pair: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"--rdzv-conf {pair!r}: not a number of seconds above 0")
    return number


def _truth(pair: str, value: str) -> bool:
    """torchrun's words for yes and no."""
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise ConfigError(f"--rdzv-conf {pair!r}: give true or false")


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, n=1)
    return f"no such key; {f'nearest: {near[0]}' if near else 'one of ' + ', '.join(KEYS)}"
