"""`keepstep simulate`: flags, files, sweeps, pictures and what it says when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from keepstep.goodput.interval import optimal_s
from keepstep.planner.scenario import DAY_S
from keepstep.records.exits import EXIT_NOT_FOUND
from tests.cli.story import keepstep
from tests.planner.scenarios import simple

pytest.importorskip("numpy")
JOB: tuple[str, ...] = ("--gpus", "512", "--failure-rate", "50", "--delta", "10", "--restart", "120")
QUICK: tuple[str, ...] = ("--days", "3", "--runs", "40", "--jobs", "1")


def run(*args: str | Path) -> Result:
    return keepstep("simulate", *args)


def record(*args: str | Path) -> Any:
    result = run(*args, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*args: str | Path) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    return result.stderr


class TestRecord:
    def test_what_it_says(self) -> None:
        found = record(*JOB, *QUICK, "--spares", "6", "--price", "2")
        assert found["schema"] == "keepstep.simulation/1"
        assert (found["nodes"], found["gpus"], found["spares"], found["runs"]) == (64, 512, 6, 40)
        assert found["interval_s"] == pytest.approx(optimal_s(10.0, DAY_S / (0.05 * 64)))
        assert sum(found["ledger_s"].values()) == pytest.approx(3 * DAY_S)
        goodput, paid = found["goodput"], found["paid"]
        assert goodput["p5"] < goodput["mean"] < goodput["p95"]
        assert paid["mean"] == pytest.approx(goodput["mean"] * 64 / 70)
        lost = (1 - goodput["mean"]) * 72 * 512 * 2
        assert found["money"]["lost_usd"] == pytest.approx(lost)
        assert found["money"]["spares_usd"] == pytest.approx(6 * 8 * 72 * 2)
        assert found["failures"]["crash"] == pytest.approx(9.6, abs=2)

    def test_same_seed_same_numbers_on_both_engines(self) -> None:
        pytest.importorskip("numba")
        one, other = (record(*JOB, *QUICK, "--spares", "6", "--engine", e) for e in ("numpy", "numba"))
        for name in ("engine", "wall_s", "runs_per_s"):
            assert one.pop(name) != other.pop(name)
        assert one == other
        assert record(*JOB, *QUICK, "--spares", "6", "--seed", "1")["goodput"] != one["goodput"]

    def test_spares_that_nobody_gave(self) -> None:
        result = run(*JOB, *QUICK, "-o", "json")
        assert json.loads(result.stdout)["spares"] == 10
        assert "--spares 10: enough in 99.9 % of the time" in result.stderr

    def test_every_feature_has_a_flag(self) -> None:
        extra: tuple[str, ...] = (
            "--dispersion",
            "3",
            "--lemon-share",
            "0.1",
            "--lemon-factor",
            "5",
            "--burst-per-day",
            "0.5",
        )
        extra += (
            "--burst-nodes",
            "4",
            "--startup-failure",
            "0.1",
            "--false-alarms-per-day",
            "1",
            "--bad-return",
            "0.2",
        )
        extra += (
            "--gate",
            "1h",
            "--gate-catch",
            "0.9",
            "--repair-sigma",
            "1",
            "--block-nodes",
            "8",
            "--spares-in",
            "block",
        )
        extra += ("--idle-hazard", "0.5", "--restart-immune", "--retire-after", "3", "--weibull-shape", "0.7")
        extra += ("--mttr", "12h", "--straggler-share", "0.05")
        found = record(*JOB, *QUICK, *extra)
        assert found["spares"] % 8 == 0
        assert all(found["failures"][kind] > 0 for kind in ("crash", "burst", "startup", "false_alarm"))
        assert found["ledger_s"]["straggler"] > 0 and found["ledger_s"]["false_positive"] > 0


class TestFiles:
    def test_a_scenario_and_flags_over_it(self, tmp_path: Path) -> None:
        file = tmp_path / "scenario.json"
        file.write_bytes(msgspec.json.encode(simple(nodes=32, days=2.0, spares=5, interval_s=500.0)))
        found = record("--scenario", file, "--runs", "10")
        assert (found["nodes"], found["days"], found["spares"], found["interval_s"]) == (32, 2.0, 5, 500.0)
        found = record("--scenario", file, "--runs", "10", "--gpus", "128", "--days", "1", "--interval", "10m")
        assert (found["nodes"], found["days"], found["spares"], found["interval_s"]) == (16, 1.0, 5, 600.0)
        assert "--tier and --scenario" in refused("--scenario", file, "--tier", "disk")

    def test_a_bad_scenario(self, tmp_path: Path) -> None:
        file = tmp_path / "scenario.json"
        file.write_text('{"job": {"nodes": 1, "rate_per_node_day": 0.1, "interval_s": "x"}}')
        assert "$.job.interval_s" in refused("--scenario", file)
        result = run("--scenario", tmp_path / "none.json")
        assert result.exit_code == EXIT_NOT_FOUND
        assert "there is no such file" in result.stderr

    @pytest.mark.parametrize("form", ["lines", "array", "object"])
    def test_a_trace(self, tmp_path: Path, form: str) -> None:
        faults = [{"t_s": 1000.0 * i, "node": i % 60, "down_s": 600.0} for i in range(1, 200)]
        text = {
            "lines": "\n".join(json.dumps(fault) for fault in faults),
            "array": json.dumps(faults),
            "object": json.dumps({"days": 3, "faults": faults}),
        }[form]
        file = tmp_path / "trace.json"
        file.write_text(text)
        found = record(*JOB, *QUICK, "--trace", file, "--spares", "4")
        assert 150 < found["interruptions"]["mean"] + found["idle_faults"] <= 199

    def test_bad_traces(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        file.write_text('{"t_s": 1}\n{"t_s": 2}')
        assert "--trace" in refused(*JOB, *QUICK, "--trace", file)
        file.write_text("[]")
        assert "no faults" in refused(*JOB, *QUICK, "--trace", file)
        assert "give the trace" in refused(*JOB, *QUICK, "--process", "trace")


class TestSweep:
    def test_flags_and_keys(self) -> None:
        found = record(*JOB, *QUICK, "--sweep", "spares=2,12", "--sweep", "repair.mean_s=3600,86400")
        assert [r["at"] for r in found] == [
            {"spares": s, "repair.mean_s": m} for s in ("2", "12") for m in ("3600", "86400")
        ]
        few, many = found[1]["goodput"]["mean"], found[3]["goodput"]["mean"]
        assert found[1]["spares"] == 2 and few < many

    def test_a_flag_changes_what_follows_from_it(self) -> None:
        found = record(*JOB, *QUICK, "--spares", "9", "--sweep", "gpus=256,512", "--sweep", "interval=5m,10m")
        assert [(r["nodes"], r["interval_s"]) for r in found] == [(32, 300.0), (32, 600.0), (64, 300.0), (64, 600.0)]

    def test_lines_and_table(self) -> None:
        args: tuple[str, ...] = (*JOB, *QUICK, "--sweep", "spares=2,12")
        lines = run(*args, "-o", "jsonl").stdout.splitlines()
        assert [json.loads(line)["spares"] for line in lines] == [2, 12]
        table = run(*args, "-o", "table", "--price", "2").stdout
        assert "spares" in table and "$" in table and len(table.splitlines()) == 3

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("spares=x", "--sweep spares=x"),
            ("nothing=1", "nothing: there is no such key"),
            ("gpus", "give a key and its values"),
            ("delta=-1", "--delta"),
        ],
    )
    def test_mistakes(self, spec: str, said: str) -> None:
        assert said in refused(*JOB, *QUICK, "--sweep", spec)


class TestTablesAndPictures:
    def test_a_table(self) -> None:
        text = run(*JOB, *QUICK, "--spares", "6", "--price", "2.5", "-o", "table").stdout
        for part in ("goodput 0.", "where the time goes", "rollback", "training stops", "p99.9", "all that is lost"):
            assert part in text

    @pytest.mark.parametrize("name", ["one.png", "one.svg"])
    def test_pictures(self, tmp_path: Path, name: str) -> None:
        pytest.importorskip("matplotlib")
        record(*JOB, *QUICK, "--spares", "6", "--plot", tmp_path / name)
        head = (tmp_path / name).read_bytes()[:400]
        assert head.startswith(b"\x89PNG") or b"<svg" in head or b"<?xml" in head

    def test_a_picture_of_a_sweep(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        sweep = ("--sweep", "spares=2,6,12", "--sweep", "spares_in=pool", "--plot", tmp_path / "sweep.svg")
        record(*JOB, *QUICK, *sweep)
        assert (tmp_path / "sweep.svg").stat().st_size > 5000

    def test_a_picture_of_what(self, tmp_path: Path) -> None:
        assert "must end with .png or .svg" in refused(*JOB, *QUICK, "--plot", tmp_path / "one.jpg")
        assert "there is no folder" in refused(*JOB, *QUICK, "--plot", tmp_path / "none" / "one.png")


class TestMistakes:
    def test_what_is_missing_is_named(self) -> None:
        assert "--gpus" in refused("--failure-rate", "6.5", "--delta", "10")
        assert "--delta" in refused("--gpus", "512", "--failure-rate", "6.5")

    def test_what_makes_no_sense_is_named(self) -> None:
        assert "block_nodes 7" in refused(*JOB, *QUICK, "--spares", "2", "--block-nodes", "7")
        assert "--dispersion 0.5" in refused(*JOB, *QUICK, "--dispersion", "0.5")
