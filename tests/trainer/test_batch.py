"""ks.batch_plan: the global batch is held exactly, or changed with its learning rate, or refused with values that work."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep.trainer as ks
from keepstep.records.errors import ConfigError
from keepstep.trainer.batch import Mismatch

counts = st.integers(1, 300)


def test_an_exact_plan() -> None:
    plan = ks.batch_plan(1024, 4, 64)
    assert (plan.accumulation_steps, plan.global_batch, plan.lr_factor) == (4, 1024, 1.0)


@given(micro=counts, dp=counts, steps=counts, rule=st.sampled_from(["refuse", "linear_lr", "sqrt_lr"]))
def test_what_divides_is_held_exactly_under_every_rule(micro: int, dp: int, steps: int, rule: Mismatch) -> None:
    plan = ks.batch_plan(micro * dp * steps, micro, dp, on_mismatch=rule)
    assert (plan.accumulation_steps, plan.global_batch, plan.lr_factor) == (steps, micro * dp * steps, 1.0)


@given(batch=st.integers(1, 100_000), micro=counts, dp=counts, rule=st.sampled_from(["linear_lr", "sqrt_lr"]))
def test_a_changed_batch_is_the_nearest_and_equal_on_all_replicas(
    batch: int, micro: int, dp: int, rule: Mismatch
) -> None:
    plan = ks.batch_plan(batch, micro, dp, on_mismatch=rule)
    assert plan.global_batch == plan.micro_batch * plan.dp * plan.accumulation_steps
    assert plan.accumulation_steps >= 1
    others = [plan.global_batch + d * micro * dp for d in (-1, 1)]
    assert all(abs(plan.global_batch - batch) <= abs(o - batch) for o in others if o > 0)
    ratio = plan.global_batch / batch
    assert plan.lr_factor == pytest.approx(ratio if rule == "linear_lr" else math.sqrt(ratio))
    assert plan.asked_global_batch == batch


@given(batch=st.integers(1, 5000), micro=st.integers(1, 40), dp=st.integers(1, 40))
def test_a_refusal_names_only_values_that_work(batch: int, micro: int, dp: int) -> None:
    try:
        ks.batch_plan(batch, micro, dp)
    except ConfigError as error:
        text = str(error)
    else:
        assert batch % (micro * dp) == 0
        return
    assert batch % (micro * dp) != 0
    asked: dict[str, Any] = {"global_batch": batch, "micro_batch": micro, "dp": dp}
    named = re.findall(r"(global_batch|micro_batch|dp)=(\d+)(?: or (\d+))?", text)
    assert named[0][0] == "global_batch"
    for name, *values in named:
        for value in filter(None, values):
            assert ks.batch_plan(**{**asked, name: int(value)}).lr_factor == 1.0


def test_a_lost_replica_keeps_the_steps_of_the_plan_it_was_lost_from() -> None:
    plan = ks.batch_plan(4096, 8, 63, on_mismatch="linear_lr", reference_dp=64)
    assert (plan.accumulation_steps, plan.global_batch) == (8, 4032)
    assert plan.lr_factor == pytest.approx(63 / 64)
    assert ks.batch_plan(4096, 8, 63, on_mismatch="sqrt_lr", reference_dp=64).lr_factor == pytest.approx(
        math.sqrt(63 / 64)
    )
    assert ks.batch_plan(4096, 8, 32, on_mismatch="linear_lr", reference_dp=64).accumulation_steps == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 0}, "global_batch=0 is not"),
        ({"micro_batch": -1}, "micro_batch=-1 is not"),
        ({"dp": 2.0}, "dp=2.0 is not"),
        ({"dp": True}, "dp=True is not"),
        ({"reference_dp": 0}, "reference_dp=0 is not"),
        ({"on_mismatch": "drop"}, "on_mismatch='drop'; use 'refuse', 'linear_lr' or 'sqrt_lr'"),
        ({"dp": 3}, r"these work: global_batch=60 or 72; dp=2 or 4, or let"),
        (
            {"dp": 3, "on_mismatch": "linear_lr", "reference_dp": 5},
            "reference_dp 5; these work: global_batch=60 or 80; reference_dp=4 or 8",
        ),
    ],
)
def test_a_mistake_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ks.batch_plan(**{"global_batch": 64, "micro_batch": 4, "dp": 2, **arguments})
    assert caught.value.exit_code == 2
