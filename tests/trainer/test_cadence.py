"""When to save: measured costs and failures in, an interval out; the same steps on every rank; the power ramp of a cycle's
start."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.goodput.advice import MAX_INTERVAL_S, MIN_BLOCKS, MIN_INTERVAL_S
from keepstep.goodput.interval import optimal_s
from keepstep.goodput.rates import Prior, prior_from_rate
from keepstep.records import frames
from keepstep.records import page as layout
from keepstep.records.cycle import FailureHistory
from keepstep.records.errors import ConfigError
from keepstep.trainer.cadence import FIRST_SAVE_S, HYSTERESIS, Cadence, local_sku, node_count, open_cadence, prior_from
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.ramp import ramp_cost, ramp_from, stagger_cost
from keepstep.trainer.run import Run

KNOWN = Prior(shape=1e9, node_days=1e9 / 6.5e-3, source="known: 6.5 per 1000 node-days")
"""So sure that nothing seen changes it."""


def cadence(nodes: int = 2048, prior: Prior = KNOWN, history: FailureHistory | None = None) -> Cadence:
    return Cadence(0.0, nodes=nodes, prior=prior, history=history)


class TestCadence:
    def test_the_first_save_is_early_and_measures(self) -> None:
        c = cadence()
        assert not c.due(FIRST_SAVE_S - 0.1)
        assert c.due(FIRST_SAVE_S)
        assert c.advice() is None
        assert "60 s, to measure" in c.describe()
        c.begin(FIRST_SAVE_S + 10)
        assert not c.due(
            2 * FIRST_SAVE_S
        )  # the clock runs from the end of the blocking part, also when that save fails
        assert c.due(2 * FIRST_SAVE_S + 10)

    def test_then_the_optimum(self) -> None:
        c = cadence()
        c.begin(70.0)
        assert c.note_save(75.0, 10.0, 5.0)
        advice = c.advice()
        assert advice is not None
        assert c.interval_s() == advice.advised_s == pytest.approx(353.7, abs=0.1)
        assert (advice.block_s, advice.persist_lag_s, advice.nodes) == (10.0, 5.0, 2048)
        assert [c.due(70.0 + s) for s in (353, 354)] == [False, True]
        assert "a checkpoint every 354 s" in c.describe()

    def test_small_changes_do_not_move_it(self) -> None:
        c = cadence()
        c.note_save(0.0, 10.0, 0.0)
        used = c.interval_s()
        for block_s in (10.5, 9.0, 11.0, 12.0, 8.5, 13.0):
            assert not c.note_save(0.0, block_s, 0.0)
            assert c.interval_s() == used
        for _ in range(20):  # really slower: the median follows, and the interval once it is HYSTERESIS away
            c.note_save(0.0, 16.0, 0.0)
        assert c.interval_s() == pytest.approx(optimal_s(16.0, 6490.4), rel=HYSTERESIS - 1)
        assert c.interval_s() > used * HYSTERESIS * 0.99

    def test_one_slow_save_is_no_trend(self) -> None:
        c = cadence()
        for _ in range(5):
            c.note_save(0.0, 10.0, 1.0)
        used = c.interval_s()
        assert not c.note_save(0.0, 500.0, 600.0)
        assert c.interval_s() == used

    def test_bounds(self) -> None:
        c = cadence(nodes=1)
        c.note_save(0.0, 100.0, 0.0)
        assert c.interval_s() == MAX_INTERVAL_S
        assert "upper bound" in c.describe()
        c = cadence(nodes=100_000)
        c.note_save(0.0, 0.001, 0.0)
        assert c.interval_s() == MIN_INTERVAL_S
        c = cadence(nodes=10_000_000)
        c.note_save(0.0, 10.0, 0.0)
        assert c.interval_s() == MIN_BLOCKS * 10.0
        c = cadence()
        c.note_save(0.0, 0.5, 700.0)
        assert c.interval_s() == 700.0  # one save in flight
        for bad in ((0.0, 5.0), (6.0, 5.0)):
            with pytest.raises(ConfigError, match="bounds"):
                Cadence(0.0, nodes=1, prior=KNOWN, min_s=bad[0], max_s=bad[1])
        assert Cadence(0.0, nodes=1, prior=KNOWN, max_s=20.0).interval_s() == 20.0

    def test_failures_of_the_run_shorten_it_and_calm_lengthens_it(self) -> None:
        prior = prior_from_rate(6.5, "x")
        week_s = 7 * 86_400.0

        def interval_s(failures: int, now_s: float = 0.0) -> float:
            c = cadence(64, prior, FailureHistory(failures=failures, node_s=64 * week_s, since="t"))
            c.note_save(now_s, 10.0, 0.0)
            return c.interval_s()

        assert interval_s(60) < interval_s(3) / 2
        assert interval_s(3, now_s=30 * week_s) > 2 * interval_s(3)

    def test_history_and_uptime_are_exposure(self) -> None:
        c = cadence(10, prior_from_rate(6.5, "x"), FailureHistory(failures=4, node_s=10 * 86_400.0, since="t"))
        rate = c.rate(2 * 86_400.0)
        assert (rate.failures, rate.exposure_node_days) == (4, 30.0)
        assert c.mttf_s(2 * 86_400.0) == pytest.approx(86_400.0 / (10 * rate.rate_per_node_day))


class TestEnvironment:
    def test_everything_from_the_launcher(self, tmp_path: Path) -> None:
        info = tmp_path / "cycle.json"
        info.write_text(
            json.dumps({"schema": "x", "ranks": [], "history": {"failures": 3, "node_s": 864000.0, "since": "t"}})
        )
        env = {"GROUP_WORLD_SIZE": "16", frames.ENV_CYCLE_INFO: str(info), frames.ENV_FLEET_PRIOR: "2.5"}
        rate = open_cadence(0.0, env=env).rate(0.0)
        assert (rate.failures, rate.exposure_node_days) == (3, 10.0)
        assert rate.prior.rate_per_node_day == pytest.approx(2.5e-3)

    @pytest.mark.parametrize("text", [None, "", "{", '{"history": null}', '{"history": {"failures": "x"}}'])
    def test_a_record_without_history_leaves_the_prior(self, text: str | None, tmp_path: Path) -> None:
        info = tmp_path / "cycle.json"
        if text is not None:
            info.write_text(text)
        rate = open_cadence(0.0, env={frames.ENV_CYCLE_INFO: str(info)}, sku="H100").rate(0.0)
        assert rate.failures == 0
        assert rate.rate_per_node_day == pytest.approx(3.79e-3)

    @pytest.mark.parametrize(
        ("env", "nodes"),
        [
            ({}, 1), ({"GROUP_WORLD_SIZE": "4", "WORLD_SIZE": "64"}, 4), ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}, 8),
            ({"WORLD_SIZE": "64"}, 64), ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"}, 1), ({"GROUP_WORLD_SIZE": "?"}, 1),
        ],
    )  # fmt: skip
    def test_nodes(self, env: dict[str, str], nodes: int) -> None:
        assert node_count(env) == nodes

    def test_a_file_as_prior(self, tmp_path: Path) -> None:
        path = tmp_path / "fleet.json"
        path.write_text(
            '{"schema": "keepstep.failure_prior/1", "skus": {"default": {"failures": 9, "node_days": 4000}}}'
        )
        assert prior_from(str(path), "unknown", "V").shape == 9.5
        for bad in (str(tmp_path / "none.json"), "-3", str(tmp_path)):
            with pytest.raises(ConfigError, match="V "):
                prior_from(bad, "unknown", "V")
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not text"):
            prior_from(str(tmp_path / "binary"), "unknown", "V")

    def test_the_gpu_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = SimpleNamespace(is_initialized=lambda: True, get_device_name=lambda: "NVIDIA H100 80GB HBM3")
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert local_sku() == "H100"
        cuda.is_initialized = lambda: False
        assert local_sku() == "unknown"
        monkeypatch.delitem(sys.modules, "torch")
        assert local_sku() == "unknown"


MakeRun = Callable[[MemoryChannel, int], Run]


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    def make(channel: MemoryChannel, rank: int) -> Run:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        return Run(channel, memoryview(bytearray(layout.PAGE_BYTES)).cast("Q"), False, ("loss",))

    return make


def test_ranks_that_measure_differently_save_at_the_same_steps(make_run: MakeRun) -> None:
    """Each rank has its own clock and its own idea of the cost; another one comes first at every step."""
    channel = MemoryChannel()
    runs = [make_run(channel, rank) for rank in range(4)]
    cadences = [cadence() for _ in runs]
    now_s = [0.0] * 4
    saved: list[list[int]] = [[] for _ in runs]
    for rank, run in enumerate(runs):
        run.propose_save = lambda _, rank=rank: cadences[rank].due(now_s[rank])
        run._decision_every = lambda: 1  # type: ignore[method-assign]  # these steps take no time
        run.note_restored(0)
    for step in range(1, 200):
        for turn in range(4):
            rank = (step * 7 + turn * 3) % 4
            now_s[rank] = 10.0 * step + 0.9 * rank
            with runs[rank].step(step - 1):
                pass
            decision = runs[rank].decision_at(step)
            if decision is not None and decision.save:
                saved[rank].append(step)
                cadences[rank].note_save(now_s[rank], 5.0 + 3.0 * rank, 2.0 * rank)
                cadences[rank].begin(now_s[rank])
    assert saved[0] == saved[1] == saved[2] == saved[3]
    assert saved[0][0] == 6
    assert len({c.interval_s() for c in cadences}) > 1
    gaps = [10 * (b - a) for a, b in zip(saved[0][1:], saved[0][2:], strict=False)]
    assert gaps
    assert min(gaps) >= 0.8 * min(c.interval_s() for c in cadences)


class TestRamp:
    def test_all_ranks_pause_alike_and_come_to_full_speed(
        self, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(frames.ENV_POWER_RAMP_S, "0.4")
        channel = MemoryChannel()
        runs = [make_run(channel, rank) for rank in range(2)]
        together = threading.Barrier(2)
        beats: list[list[int]] = [[], []]

        def train(rank: int) -> None:
            for step in range(60):
                with runs[rank].step(step):
                    beats[rank].append(runs[rank]._words[layout.W_BEAT_NS])
                    together.wait(30)
                    threading.Event().wait(0.01 + 0.005 * rank)  # ranks measure different steps

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        said = capsys.readouterr().err
        assert said.count("power ramp over 0.4 s: every start of the ranks loses 0.15 s of training") == 1
        pauses = {key: float(value) for key, value in channel._values.items() if key.startswith("ramp/")}
        assert list(pauses) == [f"ramp/0/{n}" for n in range(1, len(pauses) + 1)]  # from the second step, none left out
        assert pauses[f"ramp/0/{len(pauses)}"] == 0.0
        assert 3 <= len(pauses) < 59
        assert 0.05 < sum(pauses.values()) < 0.35
        assert runs[0]._ramp is runs[1]._ramp is None
        for rank in range(2):
            gaps = [b - a for a, b in zip(beats[rank], beats[rank][1:], strict=False)]
            assert gaps[0] > 1.5 * min(gaps[-10:])

    def test_off_it_is_asked_nothing(self, make_run: MakeRun) -> None:
        channel = MemoryChannel()
        run = make_run(channel, 0)
        for step in range(5):
            with run.step(step):
                pass
        assert not any(key.startswith("ramp/") for key in channel._values)

    def test_refusals_and_words(self) -> None:
        assert ramp_from({}) is ramp_from({frames.ENV_POWER_RAMP_S: "0"}) is None
        with pytest.raises(ConfigError, match=frames.ENV_POWER_RAMP_S):
            ramp_from({frames.ENV_POWER_RAMP_S: "fast"})
        assert "loses 22.5 s of training, at most 0.35 points" in ramp_cost(60.0, 6490.0)
        assert "durable that much later, at most 0.46 points" in stagger_cost(30.0, 6490.0)
