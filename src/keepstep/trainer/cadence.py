"""When to save: the interval that the measured cost of a save and the failure rate recommend, computed anew while the job runs.

Every rank keeps its own `Cadence`, but a save is begun through the shared decision only (`Run.decision_at`): the rank that comes
first proposes, the others do as it says. So ranks whose measurements differ still save at the same steps. A rank's own blocking
time is what it is computed from: training waits for the slowest rank, whose time reaches the others as a longer wait in the next
collective and not as blocking time, which makes the interval a little short where staging is uneven.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.goodput.advice import MAX_INTERVAL_S, MIN_INTERVAL_S, IntervalAdvice, advise
from keepstep.goodput.rates import (
    DAY_S,
    TYPICAL_DISPERSION,
    Prior,
    RateEstimate,
    estimate_rate,
    parse_prior,
    published_prior,
    sku_of,
)
from keepstep.records import frames
from keepstep.records.cycle import FailureHistory
from keepstep.records.errors import ConfigError

FIRST_SAVE_S = 60.0
"""Training before the first save of a process, which is early because it is the one that measures."""
KEPT_SAVES = 20
HYSTERESIS = 1.2
"""The interval in use changes when the one computed differs by more than this factor: the optimum is too flat for less."""


class _CycleInfo(msgspec.Struct, frozen=True):
    """What is needed of the record that KEEPSTEP_CYCLE_INFO names."""

    history: FailureHistory | None = None


class Cadence:
    """Decides when a save is due. Times are seconds of one monotonic clock that the caller reads."""

    def __init__(
        self,
        now_s: float,
        *,
        nodes: int,
        prior: Prior,
        history: FailureHistory | None = None,
        restart_s: float = 0.0,
        min_s: float = MIN_INTERVAL_S,
        max_s: float = MAX_INTERVAL_S,
        first_save_s: float = FIRST_SAVE_S,
        dispersion: float = TYPICAL_DISPERSION,
    ) -> None:
        """`history`: of this run before this process. `min_s`, `max_s`: bounds of the interval (see `goodput.advice.advise`).

        Raises ConfigError unless 0 < min_s <= max_s.
        """
        if not 0.0 < min_s <= max_s:
            raise ConfigError(
                f"checkpoint interval from {min_s:g} s to {max_s:g} s: the bounds must be above 0 and in order"
            )
        self._nodes = nodes
        self._prior = prior
        self._history = history
        self._restart_s = restart_s
        self._min_s, self._max_s = min_s, max_s
        self._first_save_s = min(first_save_s, max_s)
        self._dispersion = dispersion
        self._began_s = now_s
        self._last_s = now_s
        self._block_s: deque[float] = deque(maxlen=KEPT_SAVES)
        self._persist_s: deque[float] = deque(maxlen=KEPT_SAVES)
        self._advice: IntervalAdvice | None = None
        self._interval_s: float | None = None

    def due(self, now_s: float) -> bool:
        """Whether so much time has passed since the last save that another one is due."""
        return now_s - self._last_s >= self.interval_s()

    def interval_s(self) -> float:
        """Training between two saves now; before the first measurement the time to the first save."""
        return self._first_save_s if self._interval_s is None else self._interval_s

    def begin(self, now_s: float) -> None:
        """Training goes on: a restore or the blocking part of a save (also of one that failed) is over."""
        self._last_s = now_s

    def note_save(self, now_s: float, block_s: float, persist_s: float) -> bool:
        """A save was committed: it blocked for `block_s` and was durable `persist_s` after that. May be called from another thread.

        Computes the interval anew from the medians of the latest saves; returns whether the one in use changed.
        """
        self._block_s.append(block_s)
        self._persist_s.append(persist_s)
        advice = advise(
            self.rate(now_s),
            self._nodes,
            statistics.median(tuple(self._block_s)),
            statistics.median(tuple(self._persist_s)),
            restart_s=self._restart_s,
            min_s=self._min_s,
            max_s=self._max_s,
        )
        self._advice = advice
        used = self._interval_s
        changed = used is None or not used / HYSTERESIS <= advice.advised_s <= used * HYSTERESIS
        # What bounds the interval from below is no optimum that is flat: it holds at once.
        changed = changed or (used is not None and used < advice.min_s)
        if changed:
            self._interval_s = advice.advised_s
        return changed

    def rate(self, now_s: float) -> RateEstimate:
        """Failure rate by what is known now: the prior, the run before this process, and this process without a failure so far."""
        before = self._history
        node_s = (before.node_s if before else 0.0) + self._nodes * max(0.0, now_s - self._began_s)
        failures = before.failures if before else 0
        return estimate_rate(self._prior, failures, node_s / DAY_S, dispersion=self._dispersion)

    def mttf_s(self, now_s: float) -> float:
        """Mean time between failures of the job by what is known now, in seconds."""
        return self.rate(now_s).mttf_s(self._nodes)

    def advice(self) -> IntervalAdvice | None:
        """What the last measurement came to; None before the first. `interval_s` may keep an earlier value (HYSTERESIS)."""
        return self._advice

    def advised_s(self) -> float | None:
        """The interval in use, None before the first measurement."""
        return self._interval_s

    def advised_attrs(self, before_s: float | None) -> dict[str, Any]:
        """The interval in use as attributes of the mark `advised`, with what it was computed from; `before_s`: the one before."""
        a = self._advice
        if a is None:
            return {}
        rate = a.rate
        return {
            "what": "interval_s",
            "value": self.interval_s(),
            "before": before_s,
            "reason": self.describe(),
            "block_s": a.block_s,
            "persist_lag_s": a.persist_lag_s,
            "nodes": a.nodes,
            "rate_shape": rate.shape,
            "rate_node_days": rate.shape / rate.rate_per_node_day,
            "dispersion": rate.dispersion,
        }

    def describe(self) -> str:
        """One line for the log: the interval and what it was computed from."""
        a = self._advice
        if a is None:
            return f"first checkpoint after {self._first_save_s:g} s, to measure what a save costs"
        bound = {"min": ", held at its lower bound", "max": ", held at its upper bound"}.get(a.bound, "")
        return (
            f"a checkpoint every {self.interval_s():.3g} s of training (optimum {a.interval_s.optimal:.3g} s{bound}): "
            f"a save blocks {a.block_s:.3g} s and is durable {a.persist_lag_s:.3g} s later; {a.nodes} nodes, "
            f"{1000 * a.rate.rate_per_node_day:.3g} failures per 1000 node-days "
            f"({1000 * a.rate.low:.3g} to {1000 * a.rate.high:.3g}), one every {a.mttf_s / 3600:.3g} h"
        )


def open_cadence(
    now_s: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    sku: str | None = None,
    min_s: float = MIN_INTERVAL_S,
    max_s: float = MAX_INTERVAL_S,
    first_save_s: float = FIRST_SAVE_S,
) -> Cadence:
    """The cadence of this process: nodes, prior and history from the environment (default `os.environ`), GPU model from torch.

    Raises ConfigError for a bad KEEPSTEP_FLEET_PRIOR or bad bounds.
    """
    env = os.environ if env is None else env
    return Cadence(
        time.monotonic() if now_s is None else now_s,
        nodes=node_count(env),
        prior=prior_from(env.get(frames.ENV_FLEET_PRIOR, ""), sku or local_sku(), frames.ENV_FLEET_PRIOR),
        history=read_history(env.get(frames.ENV_CYCLE_INFO)),
        min_s=min_s,
        max_s=max_s,
        first_save_s=first_save_s,
    )


def node_count(env: Mapping[str, str]) -> int:
    """Nodes of the job as the launcher says it (GROUP_WORLD_SIZE, or ranks over ranks a node); 1 when it says nothing."""
    for name in ("GROUP_WORLD_SIZE", "WORLD_SIZE"):
        text = env.get(name, "")
        if text.isdigit() and int(text) > 0:
            local = env.get("LOCAL_WORLD_SIZE", "1") if name == "WORLD_SIZE" else "1"
            return max(1, int(text) // max(1, int(local) if local.isdigit() else 1))
    return 1


def local_sku() -> str:
    """Model of this process's GPU when torch is loaded and CUDA in use, else "unknown". Loads nothing and starts no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "unknown"
    return sku_of(torch.cuda.get_device_name())


def prior_from(text: str, sku: str, where: str) -> Prior:
    """A prior from a flag's or variable's value: a rate, a record, the path of a file with one, or "" for the published rate.

    Raises ConfigError naming `where`.
    """
    if not text.strip():
        return published_prior(sku)
    return parse_prior(prior_text(text, where), sku, where)


def prior_text(text: str, where: str) -> str:
    """`text`, or what the file that it names holds. Raises ConfigError when it names a file that cannot be read."""
    if text.lstrip().startswith("{"):
        return text
    try:
        float(text)
    except ValueError:
        try:
            return Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{where} {text!r}: neither a number nor a readable file ({why})") from None
    return text


def read_history(path: str | None) -> FailureHistory | None:
    """The run's history from this node's copy of the cycle record; None without a launcher or where the record says nothing."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_CycleInfo).history
    except (OSError, msgspec.MsgspecError):
        return None
