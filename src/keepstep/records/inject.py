"""Grammar of `--inject`: KIND@KEY=VALUE[,KEY=VALUE...].

Parsed by the launcher (to refuse mistakes early) and by the trainer library in the rank that carries the injection out.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import msgspec

from keepstep.records.errors import ConfigError

InjectKind = Literal[
    "kill",
    "stop",
    "hang",
    "raise",
    "exit",
    "slow",
    "nan",
    "oom",
    "corrupt-checkpoint",
    "coordinator-kill",
    "preempt",
    "node-loss",
    "partition",
    "storage-error",
    "storage-stall",
    "xid",
]
KINDS: tuple[str, ...] = get_args(InjectKind)
_KEYS: dict[str, type] = {
    "step": int,
    "rank": int,
    "cycle": int,
    "node": str,
    "code": int,
    "factor": float,
    "steps": int,
    "seconds": float,
    "after": float,
    "at_byte": int,
    "pci": str,
}
_EXTRA: dict[str, set[str]] = {
    "exit": {"code"},
    "slow": {"factor", "steps", "seconds"},
    "partition": {"after", "seconds"},
    "storage-error": {"at_byte"},
    "storage-stall": {"seconds"},
    "xid": {"code", "pci"},
}
# Without a step (a script that reports none) only what can be done from outside the rank is possible, some time after the start.
OUTSIDE_KINDS = ("kill", "stop", "coordinator-kill", "preempt", "node-loss", "partition", "xid")
NODE_KINDS = ("node-loss", "partition", "xid")
"""What hits a whole node: the one named, else the one that has `rank`. At a step, the rank that comes to it tells its launcher."""


class Injection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault to cause. `step`: before this step begins.

    `seconds`: after the ranks of the cycle were started; of a `slow`, how long each step is delayed; of a `partition`, how long the
    node is cut off (10 s when absent), whose begin without a step is `after`; of a `storage-stall`, how long the storage
    does not answer (10 s when absent).

    `oom`: the rank really allocates until the kernel kills it (see keepstep.trainer.inject). `node-loss`: the launcher
    kills itself with every process it has, as a power cut would end them. `partition`: the launcher closes its
    connections to the coordinator and opens none for that time. No packet filter is involved: the host's other traffic,
    the ranks' collectives too, goes on. `storage-error`, `storage-stall`: the rank's next save meets the fault where its
    image is written; the first fails with EIO at byte `at_byte` of the file. `xid`: the launcher writes the line with which
    NVIDIA's driver reports Xid `code` of the GPU at `pci` into the kernel's log; nothing else happens.
    """

    kind: InjectKind
    step: int | None = None
    seconds: float | None = None
    rank: int = 0
    cycle: int = 0
    node: str | None = None
    code: int = 1
    factor: float = 2.0
    steps: int = 1
    after: float | None = None
    at_byte: int = 0
    pci: str | None = None

    @property
    def timed_s(self) -> float | None:
        """Seconds after the start of the cycle's ranks at which it is due; None when it waits for a step."""
        if self.step is not None:
            return None
        return self.after if self.kind == "partition" else self.seconds


def parse_injection(spec: str) -> Injection:
    """Parse one specification. Raises ConfigError naming the part that is wrong and what is valid there."""
    kind, at, rest = spec.partition("@")
    if kind not in KINDS:
        raise ConfigError(f"--inject {spec!r}: unknown kind {kind!r}; valid kinds: {', '.join(KINDS)}")
    fields: dict[str, int | float | str] = {}
    allowed = {"step", "rank", "cycle", "node", *_EXTRA.get(kind, set())}
    begin = "after" if kind == "partition" else "seconds"
    if kind in OUTSIDE_KINDS:
        allowed.add(begin)
    for pair in rest.split(",") if at else []:
        key, equals, value = pair.partition("=")
        if not equals or key not in allowed:
            raise ConfigError(f"--inject {spec!r}: {pair!r} is not one of {', '.join(sorted(allowed))} as KEY=VALUE")
        if key in fields:
            raise ConfigError(f"--inject {spec!r}: {key} is given twice")
        try:
            fields[key] = _KEYS[key](value)
        except ValueError:
            raise ConfigError(f"--inject {spec!r}: {key}={value!r} is not a {_KEYS[key].__name__}") from None
    if "step" not in fields and not (kind in OUTSIDE_KINDS and begin in fields):
        hint = f"step=N or {begin}=S" if kind in OUTSIDE_KINDS else "step=N"
        raise ConfigError(f"--inject {spec!r}: needs {hint}")
    if kind == "xid" and "code" not in fields:
        raise ConfigError(f"--inject {spec!r}: needs code=N, the number of the Xid")
    injection = msgspec.convert({"kind": cast(InjectKind, kind), **fields}, Injection)
    if injection.at_byte < 0:
        raise ConfigError(f"--inject {spec!r}: at_byte={injection.at_byte} is below 0")
    if kind == "storage-stall" and not 0 <= (injection.seconds or 0.0) < float("inf"):
        raise ConfigError(f"--inject {spec!r}: seconds={injection.seconds} is no time to stand still")
    return injection
