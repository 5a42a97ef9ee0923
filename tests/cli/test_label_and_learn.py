"""`keepstep label` and `keepstep learn`: what people verified, and the weights that follow from it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.cli.main import main
from keepstep.records.verdict import verdict_fields
from keepstep.sources.reading import read_text

GSP = (
    "2031-03-03T04:05:06+00:00 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 119, pid=88, name=python3, Timeout after 6s of waiting "
    "for RPC response from GPU0 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2080 0x4).\n"
)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def done(*arguments: str | Path) -> Any:
    result = invoke(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def verdict() -> dict[str, Any]:
    catalog = shipped()
    return verdict_fields(attribute(read_text("kern.log", GSP, catalog, Matcher(catalog)).events, catalog))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: dict[str, Any]) -> Path:
    """Eight runs with one incident each: a GSP time-out."""
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    for number in range(8):
        folder = tmp_path / "runs" / f"run-{number}"
        (folder / "incidents").mkdir(parents=True)
        (folder / "journal").mkdir()
        (folder / "run.json").write_text("{}")
        record = {
            "schema": "keepstep.incident/1",
            "id": "INC-0001",
            "run_id": folder.name,
            "cycle": 0,
            "verdict": verdict,
        }
        (folder / "incidents" / "INC-0001.json").write_text(json.dumps(record))
    return tmp_path


def labelled(home: Path, numbers: range, name: str) -> None:
    for number in numbers:
        done("label", "INC-0001", "--run", f"run-{number}", "--class", name, "--reason", "field diagnosis", "--yes")


class TestLabel:
    def test_a_label_is_kept_beside_the_verdict_and_shown(self, home: Path) -> None:
        before = (home / "runs/run-3/incidents/INC-0001.json").read_bytes()
        made = done(
            "label", "INC-0001", "--run", "run-3", "--class", "framework", "--reason", "driver 570 fixed it", "--yes"
        )
        assert (made["schema"], made["kind"], made["class"]) == ("keepstep.action/1", "label", "framework")
        (shown,) = done("get", "incidents", "run-3")
        assert shown["verified"] == "framework"
        assert (home / "runs/run-3/incidents/INC-0001.json").read_bytes() == before
        kept = json.loads((home / "runs/run-3/incidents/labels/INC-0001.json").read_bytes())
        assert (kept["schema"], kept["class"], kept["reason"]) == (
            "keepstep.label/1",
            "framework",
            "driver 570 fixed it",
        )
        assert "@" in kept["by"]

    def test_the_undo_it_prints_undoes_it(self, home: Path) -> None:
        first = done("label", "INC-0001", "--run", "run-0", "--class", "framework", "--reason", "a", "--yes")
        second = done("label", "INC-0001", "--run", "run-0", "--class", "hardware", "--reason", "b c", "--yes")
        done(*shlex.split(second["undo"])[1:], "--yes")
        assert done("get", "incidents", "run-0")[0]["verified"] == "framework"
        done(*shlex.split(first["undo"])[1:], "--yes")
        assert done("get", "incidents", "run-0")[0]["verified"] is None

    def test_a_dry_run_writes_nothing(self, home: Path) -> None:
        done("label", "INC-0001", "--run", "run-0", "--class", "hardware", "--reason", "a", "--dry-run")
        assert not (home / "runs/run-0/incidents/labels").exists()

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (["INC-0001", "--class", "hardware", "--yes"], 2, "--reason"),
            (["INC-0001", "--yes"], 2, "--class CLASS"),
            (["INC-0001", "--class", "hardware", "--remove", "--reason", "x", "--yes"], 2, "give one of"),
            (["INC-0001", "--class", "hardware", "--reason", "x"], 2, "give --yes"),
            (["INC-0001", "--class", "gremlins", "--reason", "x", "--yes"], 2, "gremlins"),
            (["INC-0009", "--class", "hardware", "--reason", "x", "--yes"], 6, "it has INC-0001"),
            (["../INC-0001", "--class", "hardware", "--reason", "x", "--yes"], 6, "it has INC-0001"),
            (["INC-0001", "--remove", "--yes"], 6, "has no label"),
        ],
    )
    def test_what_cannot_be_done(self, home: Path, arguments: list[str], code: int, said: str) -> None:
        result = invoke("label", *arguments, "--run", "run-0")
        assert (result.exit_code, said in result.output) == (code, True), result.output


class TestLearn:
    def test_verified_incidents_change_the_next_verdict(
        self, home: Path, tmp_path: Path, verdict: dict[str, Any]
    ) -> None:
        log = tmp_path / "kern.log"
        log.write_text(GSP)
        other = "hardware" if verdict["class"] == "framework" else "framework"
        labelled(home, range(8), other)
        target = home / "catalog.d" / "learned.toml"
        target.parent.mkdir()
        learned = done("learn", "--write", target)
        assert (learned["labelled"], learned["class_right"]) == (8, 0)
        assert any(c["id"] == "xid.119" and "8 verified incidents" in c["reason"] for c in learned["changes"])
        why = CliRunner().invoke(main, ["why", str(log), "-o", "json"])
        found = json.loads(why.stdout)
        assert found["class"] == other
        assert any(c["file"] == str(target) for c in found["catalog"]["changes"])

    def test_learning_again_starts_from_the_shipped_weights(self, home: Path) -> None:
        labelled(home, range(8), "platform")
        target = home / "catalog.d" / "learned.toml"
        target.parent.mkdir()
        done("learn", "--write", target)
        first = target.read_text()
        done("learn", "--write", target, "--force")
        assert target.read_text() == first

    def test_few_labels_change_nothing_and_it_is_said(self, home: Path) -> None:
        labelled(home, range(4), "platform")
        result = invoke("learn", "-o", "json")
        assert json.loads(result.stdout)["changes"] == []
        assert "4 of 8 incidents in 8 runs are labelled" in result.stderr
        assert "signs need 5 labelled incidents, the most of any has 4" in result.stderr

    def test_a_file_is_not_replaced_unasked_and_a_broken_label_is_named(self, home: Path) -> None:
        (home / "there.toml").write_text("")
        assert "--force replaces it" in invoke("learn", "--write", home / "there.toml").output
        nowhere = invoke("learn", "--write", home / "none" / "there.toml")
        assert (nowhere.exit_code, "there is no folder" in nowhere.output) == (2, True)
        labels = home / "runs/run-2/incidents/labels"
        labels.mkdir()
        (labels / "INC-0001.json").write_text("{")
        result = invoke("learn")
        assert result.exit_code == 1 and str(labels / "INC-0001.json") in result.output
