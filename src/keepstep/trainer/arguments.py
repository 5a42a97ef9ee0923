"""Arguments of the Checkpointer: checked, and completed from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.checkpoint.format.index import check_state_name
from keepstep.records import frames
from keepstep.records.errors import ConfigError
from keepstep.trainer.channel import AgentChannel, Channel


def check_cadence(every_steps: int | None, every_seconds: float | None, memory_every_steps: int | None) -> None:
    """Raises ConfigError for a cadence that is none."""
    if every_steps is not None and every_seconds is not None:
        raise ConfigError("Checkpointer: give every_steps or every_seconds, not both")
    for name, value in (("every_steps", every_steps), ("memory_every_steps", memory_every_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"Checkpointer: {name}={value} is not a positive number of steps")
    if every_seconds is not None and not every_seconds > 0:
        raise ConfigError(f"Checkpointer: every_seconds={every_seconds} is not a positive time")


def steps_of(text: str) -> int:
    """The number of steps in KEEPSTEP_CKPT_EVERY_STEPS. Raises ConfigError."""
    if not text.isdecimal():
        raise ConfigError(f"{frames.ENV_CKPT_EVERY_STEPS}={text!r} is not a number of steps")
    return int(text)


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Raises ConfigError when argument `name` is none of the `valid` words."""
    if value not in valid:
        raise ConfigError(f"Checkpointer: {name}={value!r} is not one of {', '.join(valid)}")


def memory_wanted(asked: bool | None, channel: Channel) -> bool:
    """Whether images are kept in memory: where a launcher keeps them, unless that is not wanted."""
    if asked is not None:
        return asked
    return isinstance(channel, AgentChannel) and os.environ.get(frames.ENV_MEMORY_TIER) != "off"


def per_rank_names(per_rank: Iterable[str] | None, state: Mapping[str, Any]) -> frozenset[str]:
    """Names of the state that belong to each rank: those given, else the loader. Raises ConfigError."""
    for name in state:
        check_state_name(name)
    wanted = frozenset(per_rank) if per_rank is not None else frozenset({"loader"} & set(state))
    if wanted - set(state):
        raise ConfigError(
            f"Checkpointer: per_rank names {sorted(wanted - set(state))} are not in state {sorted(state)}"
        )
    return wanted
