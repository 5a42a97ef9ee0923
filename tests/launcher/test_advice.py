"""`--advice auto`: what follows the failure rate, every change in the journal with its reason, forecasts that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.goodput import load_goodput
from keepstep.goodput.calibration import make_forecast
from keepstep.goodput.campaign import RateKnowledge
from keepstep.goodput.job import Job, Tier
from keepstep.goodput.settings import HANG_MOST_S, Source
from keepstep.launcher import messages as m
from keepstep.launcher.views.forecasts import calibrations, keep, read, telling
from keepstep.records.codec import rfc3339
from keepstep.records.errors import StorageError
from keepstep.records.timeline import Mark
from tests.cli.story import BASE_NS, END, FAULT, FIRST, SECOND, S, keepstep, write_run
from tests.launcher.harness import Launch, training
from tests.launcher.lives import Lead, hello, note, shape, started

OFTEN = '{"schema": "keepstep.failure_prior/1", "skus": {"default": {"failures": 30, "node_days": 3}}}'
"""Ten failures a node and day."""


def marks_of(lead: Lead, what: str) -> list[Mark]:
    return [mark for mark in lead.job.marks if mark.kind == "advised" and mark.attrs["what"] == what]


class TestDecisions:
    def test_a_first_cycle_waits_for_as_many_spares_as_are_best(self, tmp_path: Path) -> None:
        """One node and up to three spares were asked for; a node that fails once a year needs none, and training begins without."""
        rare = Source(
            prior='{"schema": "keepstep.failure_prior/1", "skus": {"default": {"failures": 10, "node_days": 3650}}}'
        )
        lead = Lead(tmp_path, shape(1, spares=3, advice=rare))
        lead.tell(hello("a"))
        assert lead.job.waiting is None
        assert isinstance(lead.job.command_for("a"), m.StartCycle)
        [mark] = marks_of(lead, "spares")
        assert (mark.attrs["value"], mark.attrs["before"]) == (0.0, None)
        assert "of at most 3 that were asked for 0 are best" in mark.attrs["reason"]
        lead.close()

    def test_without_advice_nothing_is_advised(self, tmp_path: Path) -> None:
        lead = Lead(tmp_path, shape(1))
        lead.tell(hello("a"))
        assert not [mark for mark in lead.job.marks if mark.kind == "advised"]
        lead.close()

    def test_the_floor_is_in_the_journal_once(self, tmp_path: Path) -> None:
        lead = Lead(tmp_path, shape(1, advice=Source(prior=OFTEN)))
        lead.tell(hello("a"))
        [mark] = marks_of(lead, "hang_floor_s")
        assert 60.0 <= mark.attrs["value"] < HANG_MOST_S
        assert lead.job.advised == {"hang_floor_s": mark.attrs["value"]}
        lead.close()


def test_a_mark_of_a_rank_without_sense_ends_nothing(tmp_path: Path) -> None:
    lead = Lead(tmp_path, shape(1))
    lead.tell(hello("a"), started("a", 0, [0, 1]), note("a", 0, 0, "advised", 5, value={"x": 1}))
    assert lead.job.advised == {"None": {"x": 1}}
    assert calibrations(tmp_path) == []
    lead.close()


def test_a_forecast_that_was_kept_meets_what_happened(tmp_path: Path) -> None:
    """Two nodes that train for half a minute and fail once; kept at the begin and after the end."""
    run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])
    job = Job(nodes=2, rate_per_node_day=1.0, interval_s=120.0, tiers=(Tier(name="disk", block_s=0.5),))
    often = RateKnowledge(shape=1e6, node_days=1e6 / (10 * 86_400.0 / 60.0), source="ten failures a node and minute")
    for made_ns in (BASE_NS, BASE_NS + 10**6 * S):
        keep(run_dir, make_forecast(job, often, 1.0, made_at=rfc3339(made_ns), source="plan"))
    account = load_goodput(run_dir, all_attempts=True)
    found = telling(run_dir)
    assert found is not None
    apart = sum(account.phases[name] or 0.0 for name in ("queue", "init", "drain"))
    assert found.wall_s == pytest.approx(account.wall_s - apart - account.lost_by_cause["startup"])
    assert (found.failures_measured, found.source) == (1, "plan")
    assert found.goodput_measured == pytest.approx((account.productive_s or 0.0) / found.wall_s)
    assert found.verdict == "above"  # failing every 3 s, it was forecast never to save
    assert found.failures_chance < 0.05
    late = calibrations(run_dir)[1]
    assert (late.verdict, late.wall_s) == ("too_early", 0.0)
    text = keepstep("goodput", run_dir, "-o", "table").stdout
    assert "(plan): goodput" in text and "above the interval" in text


def test_a_real_run_follows_advice_and_its_forecast_is_compared(tmp_path: Path) -> None:
    """The interval follows measured saves, the floor the prior; both are marks and events; forecasts meet what happened."""
    (tmp_path / "fleet.json").write_text(OFTEN)
    script = training(40, 1000).replace("every_steps=1000", "max_interval_s=0.2")
    launch = Launch(
        tmp_path, script, "--nproc-per-node=1", "--advice", "auto", "--failure-prior", str(tmp_path / "fleet.json"),
    )  # fmt: skip
    assert launch.finish() == 0, launch.output
    advised = {mark.attrs["what"]: mark.attrs for mark in launch.marks if mark.kind == "advised"}
    assert set(advised) == {"hang_floor_s", "interval_s"}
    assert advised["interval_s"]["block_s"] > 0.0 and "failures per 1000 node-days" in advised["interval_s"]["reason"]
    events = keepstep("events", launch.run_dir, "-o", "json")
    kinds = [event["kind"] for event in json.loads(events.stdout)]
    assert kinds.count("advice.changed") >= 2

    [row, *_] = calibrations(launch.run_dir)
    assert row.inputs["block_s"][0] == advised["interval_s"]["block_s"]
    assert row.goodput_measured is not None and row.verdict == "too_early"
    stored = keepstep("plan", launch.run_dir, "--store", "--failure-rate", "4", "-o", "json")
    assert stored.exit_code == 0, stored.output
    [kept] = read(launch.run_dir)
    assert (kept.source, kept.job.nodes) == ("plan", 1)
    assert kept.job.tiers[0].block_s == launch.summary["checkpoints"]["block_s_median"]
    assert len(calibrations(launch.run_dir)) >= 2


def test_a_damaged_forecast_is_named(tmp_path: Path) -> None:
    (tmp_path / "forecasts.jsonl").write_text('{"schema": "keepstep.forecast/1"}\n')
    with pytest.raises(StorageError, match=r"forecasts\.jsonl line 1"):
        read(tmp_path)
