"""`keepstep plan`: from flags, the size of a model, events, a trace and runs; what it prints and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.goodput.interval import exact, exact_restart_immune, first_order, meta, optimal_s
from keepstep.records.codec import rfc3339
from tests.cli.story import BASE_NS, END, FAULT, FIRST, SECOND, S, keepstep, write_run

pytestmark = pytest.mark.usefixtures("shell")
SHARED = os.environ.get("KEEPSTEP_SHARED", "")
LARGE = ("--gpus", "16384", "--delta", "10", "--restart", "120", "--failure-rate", "6.5")


def plan(*args: str | Path) -> dict[str, Any]:
    result = keepstep("plan", *args, "-o", "json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    assert record["schema"] == "keepstep.plan/1"
    return record


class TestFlags:
    def test_a_large_job(self) -> None:
        record = plan(*LARGE)
        assert record["mttf_s"] == pytest.approx(1.803 * 3600, rel=1e-3)
        assert record["interval_s"] == pytest.approx(
            {"young": 360.29, "daly": 350.29, "daly_higher_order": 353.65, "optimal": 353.65}, abs=0.01
        )
        at = (record["used_interval_s"], 10.0, record["mttf_s"], 120.0)
        assert record["used_interval_s"] == optimal_s(10.0, record["mttf_s"])
        assert record["goodput"] == pytest.approx(
            {
                "first_order": first_order(*at),
                "meta": meta(*at),
                "exact": exact(*at),
                "exact_restart_immune": exact_restart_immune(*at),
            }
        )
        assert record["goodput"]["exact"] + sum(record["lost"].values()) == pytest.approx(1.0)
        low, high = record["goodput_interval"]
        assert low < record["goodput"]["exact"] < high
        assert record["inputs"]["origins"]["failure_rate"] == "given"
        assert record["spares"] is None

    def test_units_and_a_given_interval(self) -> None:
        record = plan(
            "--nodes", "2048", "--delta", "10s", "--restart", "2m", "--failure-rate", "6.5", "--interval", "0.5h"
        )
        assert record["used_interval_s"] == 1800.0
        assert record["goodput"]["exact"] == pytest.approx(exact(1800.0, 10.0, record["mttf_s"], 120.0))
        assert next(r for r in record["recommendation"] if r["change"] == "interval")["gain_points"] > 1.0

    def test_money_spares_and_a_goal(self) -> None:
        args = (
            "--hang-share",
            "0.3",
            "--hang-timeout",
            "10m",
            "--mttr",
            "1d",
            "--price",
            "2.5",
            "--spares",
            "10",
            "--goal",
            "0.95",
        )
        record = plan(*LARGE, *args)
        assert record["expected"]["usd"] == pytest.approx(16_384 * 24 * 54 * 2.5)
        assert record["spares"]["given"]["spares"] == 10
        assert record["spares"]["best"]["spares"] > 20
        assert record["expected"]["paid_goodput"] < record["expected"]["goodput"] < record["goodput"]["exact"]
        assert record["lost"]["detection"] == pytest.approx(0.026, abs=0.002)
        assert record["goal"]["restart_s"] is None or record["goal"]["restart_s"] < 300.0
        assert record["recommendation"][0]["gain_usd"] is not None

    def test_tiers_and_kinds(self) -> None:
        record = plan(
            "--gpus", "16384", "--failure-rate", "6.5", "--restart", "90",
            "--tier", "memory,block=5,load=5", "--tier", "disk,every=9,block=2,lag=2m,load=1m",
            "--kind", "software,share=0.6,tier=memory,replace=no", "--kind", "node,share=0.4,tier=disk",
        )  # fmt: skip
        assert [t["name"] for t in record["tiers"]] == ["memory", "disk"]
        assert record["tiers"][1]["every"] >= 1
        assert record["goodput"]["exact"] + sum(record["lost"].values()) == pytest.approx(1.0)

    def test_the_table_says_the_answer_first(self, tmp_path: Path) -> None:
        args = (*LARGE, "--price", "2.5", "--mttr", "24h", "--goal", "0.93", "--plot", str(tmp_path / "t.svg"))
        result = keepstep("plan", *args, "-o", "table")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].startswith("16384 GPUs on 2048 nodes: a failure every 1h 48m")
        assert "save every 5m 54s" in lines[1] and "expected goodput 0.92" in lines[1]
        for part in (
            "what to change",
            "tornado",
            "█",
            "paid goodput",
            "Daly, higher order",
            "restarts are the largest loss",
            "0.93 takes",
        ):
            assert part in result.stdout
        assert (tmp_path / "t.svg").read_text().lstrip().startswith("<?xml")
        assert keepstep("plan", *LARGE, "-o", "name").stdout.strip().startswith("353.6")

    def test_the_size_of_a_model(self) -> None:
        record = plan(
            "--nodes",
            "2048",
            "--params",
            "70e9",
            "--bytes-per-param",
            "16",
            "--storage-gbps",
            "20",
            "--failure-rate",
            "6.5",
        )
        derived = record["inputs"]["derived"]
        assert derived["checkpoint_bytes"] == pytest.approx(1.12e12)
        assert record["inputs"]["persist_lag_s"] == pytest.approx(56.0)
        assert record["inputs"]["delta_s"] == pytest.approx(1.12e12 / 16_384 / 20e9)
        assert "assumed" in record["inputs"]["origins"]["delta"]
        given = plan(
            "--nodes", "64", "--params", "70e9", "--storage-gbps", "20", "--delta", "7", "--failure-rate", "6.5",
            "--stage-gbps", "5",
        )  # fmt: skip
        assert (given["inputs"]["delta_s"], given["inputs"]["origins"]["delta"]) == (7.0, "given")

    def test_without_a_rate_the_published_one_is_taken_and_named(self) -> None:
        result = keepstep("plan", "--gpus", "64", "--delta", "5", "--sku", "H100", "-o", "json")
        assert "3.79 per 1000 node-days" in result.stderr
        assert json.loads(result.stdout)["inputs"]["failure_rate_per_1000_node_days"] == pytest.approx(3.79)

    def test_a_prior_of_the_fleet(self, shell: Path) -> None:
        (shell / "fleet.json").write_text(
            '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": 40, "node_days": 10000}}}'
        )
        base = ("--gpus", "1024", "--delta", "30", "--sku", "H100", "--failure-prior", "fleet.json")
        alone = plan(*base)
        assert alone["inputs"]["failure_rate_per_1000_node_days"] == pytest.approx(4.05)
        seen = plan(*base, "--failures", "100", "--node-days", "20000")
        assert 4.05 < seen["inputs"]["failure_rate_per_1000_node_days"] < 5.0
        refused = keepstep("plan", *base, "--failure-rate", "3")
        assert refused.exit_code == 2 and "give one of them" in refused.stderr

    def test_counts_narrow_the_interval(self) -> None:
        base = ("--gpus", "1024", "--delta", "30", "--restart", "5m", "--dispersion", "1")
        few, many = (plan(*base, "--failures", str(n), "--node-days", str(n / 6.5e-3)) for n in (5, 500))
        width = [high - low for low, high in (few["mttf_interval_s"], many["mttf_interval_s"])]
        assert width[1] < width[0] / 4

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--delta", "1", "--failure-rate", "5"], "--gpus is needed"),
            (["--gpus", "8", "--failure-rate", "5"], "--delta is needed"),
            (["--gpus", "8", "--nodes", "1"], "--nodes 1 and --gpus 8"),
            (["--gpus", "8", "--delta", "5x"], "--delta 5x"),
            (["--gpus", "8", "--delta", "1", "--interval", "0"], "--interval 0"),
            (["--gpus", "8", "--delta", "1", "--hang-share", "0.5"], "--hang-timeout"),
            (["--gpus", "8", "--delta", "1", "--failures", "3"], "--node-days"),
            (["--gpus", "8", "--delta", "1", "--failures", "3", "--node-days", "9", "--trace", "x"], "give one of them"),
            (["--gpus", "8", "--delta", "1", "--tier", "a"], "--tier and --delta"),
            (["--gpus", "8", "--tier", "a", "--kind", "x,share=0.4"], "add up to 0.4"),
            (["--gpus", "8", "--tier", "a", "--kind", "x,share=1,tier=b"], "tier=b"),
            (["--gpus", "8", "--tier", "a,every=0"], "every=0"),
            (["--gpus", "8", "--tier", "a,size=0"], "size=0"),
            (["--gpus", "8", "--delta", "1", "--restart", "5", "--replace", "9"], "--replace 9"),
            (["--gpus", "8", "--delta", "1", "--restart", "5", "--start", "9"], "--restart and --start"),
            (["--gpus", "8", "--storage-gbps", "9"], "needs --params"),
            (["--gpus", "8", "--params", "1e9"], "--storage-gbps"),
            (["--params", "1e9", "--storage-gbps", "9"], "--params needs"),
            (["--gpus", "8", "--delta", "1", "--plot", "x.pdf"], "--plot x.pdf"),
            (["--gpus", "8", "--delta", "1", "--store"], "--store"),
            (["--events", "none.jsonl", "--gpus", "8", "--delta", "1"], "none.jsonl"),
        ],
    )  # fmt: skip
    def test_refusals(self, args: list[str], says: str) -> None:
        result = keepstep("plan", *args)
        assert result.exit_code in (1, 2, 6), result.output
        assert says in result.stderr
        assert "Traceback" not in result.stderr

    def test_a_run_that_is_not_there(self) -> None:
        assert keepstep("plan", "nowhere").exit_code == 6


class TestHistories:
    def test_a_run(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])
        record = plan(run_dir, "--delta", "0.5")
        inputs = record["inputs"]
        assert (inputs["nodes"], inputs["gpus"], inputs["persist_lag_s"]) == (2, 4, 0.25)
        assert inputs["origins"]["persist_lag"].startswith("run job-1: median")
        assert sum(inputs["restart_phases"].values()) > 0.0
        assert inputs["origins"]["failures"].startswith("1 run(s): 1 in")
        two = plan(run_dir, run_dir, "--delta", "0.5")
        assert two["inputs"]["origins"]["failures"].startswith("2 run(s): 2 in")

    def test_a_fleet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its rate directly, as a file, and as what the other runs say about one."""
        monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
        folders = [write_run(tmp_path / "runs" / f"job-{n}", [*FIRST, *FAULT, *SECOND, *END]) for n in range(3)]
        record = plan("--fleet", "--nodes", "2", "--delta", "1")
        assert "fleet, unknown" in record["inputs"]["origins"]["failure_rate"]
        path = tmp_path / "prior.json"
        wrote = keepstep("goodput", "--fleet", "--write-prior", path, "-o", "name")
        assert wrote.exit_code == 0, wrote.output
        assert json.loads(path.read_text())["schema"] == "keepstep.failure_prior/1"
        by_file = plan("--failure-prior", path, "--nodes", "2", "--delta", "1")
        assert by_file["inputs"]["failure_rate_per_1000_node_days"] > 6.5
        others = plan(folders[0], "--failure-prior", "fleet", "--delta", "1")
        assert "other runs of the fleet" in others["inputs"]["origins"]["failure_rate"]
        assert (
            keepstep("plan", "--fleet", "--failures", "1", "--node-days", "9", "--nodes", "2", "--delta", "1").exit_code
            == 2
        )
        assert keepstep("plan", "--since", "3d", "--nodes", "2", "--delta", "1").exit_code == 2

    def test_events(self, tmp_path: Path) -> None:
        """Four exceptions, a day apart: three days of 16 nodes."""
        lines = [
            {
                "schema": "keepstep.event/1", "id": f"e{day}", "kind": "rank.exception", "severity": "fatal",
                "signature": "python.exception", "time": rfc3339(BASE_NS + day * 86_400 * S), "node": f"n{day}", "rank": day,
            }
            for day in range(4)
        ]  # fmt: skip
        path = tmp_path / "events.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = keepstep("plan", "--events", path, "--nodes", "16", "--delta", "5", "-o", "json")
        assert result.exit_code == 0, result.output
        assert "in 48 node-days" in json.loads(result.stdout)["inputs"]["origins"]["failures"]

    def test_a_trace(self, tmp_path: Path) -> None:
        head = {"schema": "keepstep.faults/1", "nodes": 10, "days": 100.0}
        faults = [
            {"node": f"n{i}", "begin_s": 86_400.0 * 9 * (i + 1), "end_s": 86_400.0 * (9 * (i + 1) + 2)}
            for i in range(10)
        ]
        path = tmp_path / "faults.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [head, *faults]))
        record = plan("--trace", path, "--nodes", "64", "--delta", "5", "--restart", "60")
        inputs = record["inputs"]
        assert "10 in 1000 node-days" in inputs["origins"]["failures"]
        assert inputs["mttr_s"] == pytest.approx(2 * 86_400.0)
        assert inputs["peakedness"] == 1.0
        assert plan("--trace", path, "--nodes", "64", "--delta", "5", "--mttr", "1h")["inputs"]["mttr_s"] == 3600.0

    def test_a_public_trace_of_many_systems(self) -> None:
        shared = Path(SHARED) / "data/traces/lanl-failures-1996-2005.csv.xz"
        if not SHARED or not shared.exists():
            pytest.skip("KEEPSTEP_SHARED does not hold the trace")
        result = keepstep("plan", "--trace", shared, "--nodes", "64", "--delta", "5")
        assert result.exit_code == 2
        assert "lanl-20" in result.stderr
        record = plan("--trace", f"{shared}#lanl-20", "--nodes", "64", "--delta", "5")
        assert 2.0 < record["inputs"]["failure_rate_per_1000_node_days"] < 3.6
