"""`keepstep ckpt interval`: from flags, from a recorded run, and from a real one that failed and went on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.goodput.interval import exact, optimal_s
from keepstep.launcher.views.failures import read_failures
from keepstep.records.frames import ENV_FLEET_PRIOR
from tests.cli.plans import plan, run
from tests.cli.story import BASE_NS, END, FAULT, FIRST, SECOND, S, keepstep, mark, opening, write_run
from tests.launcher.harness import Launch, training

pytestmark = pytest.mark.usefixtures("shell")
LARGE = ("--gpus", "16384", "--delta", "10", "--restart", "120")
RAMP_S = 0.5


def advise(*args: str | Path) -> dict[str, Any]:
    result = keepstep("ckpt", "interval", *args, "-o", "json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    assert record["schema"] == "keepstep.interval/1"
    return record


class TestFlags:
    def test_a_large_job(self) -> None:
        record = advise(*LARGE, "--failure-rate", "6.5")
        assert (record["nodes"], record["bound"]) == (2048, "")
        assert record["mttf_s"] == pytest.approx(1.803 * 3600, rel=1e-3)
        assert record["interval_s"]["young"] == pytest.approx(360.3, abs=0.1)
        assert record["advised_s"] == record["interval_s"]["optimal"] == pytest.approx(353.7, abs=0.1)
        assert record["goodput"]["exact"] == pytest.approx(0.928, abs=0.0005)
        assert record["goodput_at"]["young"]["first_order"] == pytest.approx(0.926, abs=0.0005)
        assert record["origins"]["nodes"] == "16384 GPUs, 8 a node"
        low, high = record["goodput_interval"]
        assert low < record["goodput"]["exact"] < high
        assert [row["factor"] for row in record["flatness"]] == [0.5, 1.5, 2.0, 4.0]

    def test_the_lag_and_the_bounds(self) -> None:
        assert advise(*LARGE, "--persist-lag", "500")["advised_s"] == 500
        assert advise(*LARGE, "--max", "100")["bound"] == "max"
        assert advise(*LARGE, "--min", "1000")["advised_s"] == 1000

    def test_smoothing_costs(self) -> None:
        plain, smooth = advise(*LARGE), advise(*LARGE, "--power-ramp", "60", "--stagger", "30")
        assert plain["smoothing_cost_points"] == 0
        assert smooth["smoothing_cost_points"] == pytest.approx(92.8 * (22.5 + 30) / 6490, rel=0.02)
        assert smooth["advised_s"] == plain["advised_s"]
        table = keepstep("ckpt", "interval", *LARGE, "--power-ramp", "60", "-o", "table").stdout
        assert "power ramp over 60 s: costs 0.32 points of goodput" in table

    def test_the_table_says_it_all(self) -> None:
        text = " ".join(keepstep("ckpt", "interval", *LARGE, "--sku", "H100", "-o", "table").stdout.split())
        for part in (
            "between checkpoints; expected goodput 0.9", "90 % interval of the failure rate", "M (1 + W0(-exp(-1 - d/M)))",
            "Llama 3", "3.79 per 1000 node-days", "daly higher order", "2 x optimal", "default: no history",
        ):  # fmt: skip
            assert part in text
        assert keepstep("ckpt", "interval", *LARGE, "-o", "name").stdout.strip().startswith("353.6")
        assert "optimal:" in keepstep("ckpt", "interval", *LARGE, "-o", "yaml").stdout

    def test_where_the_rate_comes_from(self, shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (shell / "fleet.json").write_text(
            '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": 40, "node_days": 10000}}}'
        )
        monkeypatch.setenv(ENV_FLEET_PRIOR, "1.0")
        assert ENV_FLEET_PRIOR in advise(*LARGE)["rate"]["prior"]["source"]
        record = advise(*LARGE, "--failure-rate", "fleet.json", "--sku", "H100")
        assert record["rate"]["rate_per_node_day"] == pytest.approx(40.5e-4)
        assert record["rate"]["high"] / record["rate"]["low"] < 2  # a history is surer than half a failure

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--gpus", "8"], "--delta is needed"),
            (["--delta", "1"], "--nodes or --gpus is needed"),
            (["--delta", "1", "--nodes", "1", "--gpus", "8"], "give one of them"),
            (["--delta", "1", "--nodes", "1", "--failure-rate", "none.json"], "--failure-rate 'none.json': neither"),
            (["--delta", "1", "--nodes", "1", "--failure-rate", "-2"], "--failure-rate '-2'"),
            (["--delta", "1", "--nodes", "1", "--min", "9", "--max", "3"], "--min 9 is above --max 3"),
            (["--delta", "x", "--nodes", "1"], "--delta x"),
            (["--delta", "1", "--nodes", "1", "--dispersion", "0.5"], "--dispersion 0.5"),
        ],
    )
    def test_refusals(self, args: list[str], says: str) -> None:
        result = keepstep("ckpt", "interval", *args)
        assert result.exit_code == 2
        assert says in result.stderr

    def test_a_run_that_is_not_there(self) -> None:
        assert keepstep("ckpt", "interval", "--run", "nowhere").exit_code == 6


class TestRunFlags:
    def test_a_prior_and_a_ramp_reach_the_configuration(self, shell: Path) -> None:
        (shell / "fleet.json").write_text(
            '{"schema": "keepstep.failure_prior/1",\n "skus": {"default": {"failures": 4, "node_days": 900}}}'
        )
        config = plan("--failure-prior", "fleet.json", "--power-ramp", "60")
        assert json.loads(config["failure_prior"])["skus"]["default"]["failures"] == 4
        assert config["power_ramp_s"] == 60
        assert (plan()["failure_prior"], plan()["power_ramp_s"]) == (None, 0)
        assert plan("--failure-prior", "5")["failure_prior"] == "5"

    def test_advice_reaches_it(self) -> None:
        config = plan("--advice", "auto", "--mttr", "7200")
        assert (config["advice"], config["mttr_s"]) == ("auto", 7200.0)
        assert (plan()["advice"], plan()["mttr_s"]) == ("off", None)

    @pytest.mark.parametrize(
        "args",
        [("--failure-prior", "0"), ("--failure-prior", "none.json"), ("--power-ramp", "-1"), ("--power-ramp", "x")],
    )
    def test_refusals(self, args: tuple[str, str]) -> None:
        result = run(*args, "train.py")
        assert result.exit_code == 2
        assert args[0] in result.stderr


class TestRecordedRuns:
    def test_failures_of_a_recorded_run(self, tmp_path: Path) -> None:
        """One fault in cycle 0 (2 nodes, 17 s) and a cycle of 12 s that finishes."""
        whole = read_failures(write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END]), 0)
        assert whole is not None
        assert (whole.failures, whole.node_s) == (1, 2 * 17 + 2 * 12)
        # Nobody leads it and no verdict: its launchers died, with the work of 8 s.
        lost = read_failures(write_run(tmp_path / "job-2", [*FIRST, *FAULT, *SECOND]), BASE_NS + 10**6 * S)
        assert lost is not None
        assert (lost.failures, lost.node_s) == (2, 2 * 17 + 2 * 8)
        # The next attempt finds the same, and counts what is its own.
        again = [
            opening(2, 1, len(FIRST + FAULT + SECOND)),
            mark(60, "run_started", 2, 1),
            mark(61, "run_ended", 2, 1, outcome="stopped", exit_code=143),
        ]
        later = read_failures(write_run(tmp_path / "job-3", [*FIRST, *FAULT, *SECOND], again), 0)
        assert later == lost

    def test_a_run_without_saves_says_what_is_missing(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])
        result = keepstep("ckpt", "interval", "--run", run_dir)
        assert result.exit_code == 2
        assert "--delta is needed" in result.stderr and str(run_dir) in result.stderr
        record = advise("--run", run_dir, "--delta", "0.5")
        assert (record["nodes"], record["rate"]["failures"], record["persist_lag_s"]) == (2, 1, 0.25)
        assert record["origins"]["persist_lag_s"] == "median of 1 commits of the run"
        assert record["restart_s"] > 0


HISTORY = """
from keepstep.trainer.cadence import open_cadence
rate = open_cadence(0.0).rate(0.0)
print("history", rate.failures, round(rate.exposure_node_days * 86400, 3), rate.prior.shape, flush=True)
"""


def test_a_real_run_that_failed_and_went_on(tmp_path: Path) -> None:
    """Ranks of the next cycle learn of the failure, the ramp slows their first steps, the verb reads what was measured."""
    script = training(24, 6).replace("step = ckpt.restore()", f"{HISTORY}\nstep = ckpt.restore()")
    launch = Launch(
        tmp_path, script, "--nproc-per-node=2", "--inject", "raise@step=15,rank=1",
        "--failure-prior", "2.5", "--power-ramp", f"{RAMP_S}",
    )  # fmt: skip
    assert launch.finish() == 0, launch.output
    first, second = launch.wait_line(r"history 0 .*"), launch.wait_line(r"history 1 .*", count=2)
    assert first[0] == "history 0 0.0 0.5"
    node_s = float(second[0].split()[2])
    own_s = (launch.mark("cycle_ended").t_ns - launch.mark("cycle_started").t_ns) / 1e9
    assert node_s == pytest.approx(own_s, abs=0.002)
    assert launch.output.count(f"power ramp over {RAMP_S:g} s: every start of the ranks loses 0.188 s") == 2
    assert [None if c.history is None else c.history.failures for c in launch.cycles] == [None, 1]

    record = advise("--run", launch.run_dir)
    assert (record["nodes"], record["rate"]["failures"]) == (1, 1)
    assert record["rate"]["prior"]["source"].startswith("--failure-prior of the run")
    assert record["block_s"] == launch.summary["checkpoints"]["block_s_median"]
    assert record["persist_lag_s"] > 0
    restart_s = sum(launch.summary["cycles"][1]["phases"].values())
    assert record["restart_s"] == pytest.approx(restart_s)
    optimum_s = optimal_s(record["block_s"], record["mttf_s"], record["persist_lag_s"])
    assert record["interval_s"]["optimal"] == pytest.approx(optimum_s)
    at = (record["block_s"], record["mttf_s"], record["restart_s"], record["persist_lag_s"])
    assert record["goodput"]["exact"] == pytest.approx(exact(record["advised_s"], *at))
