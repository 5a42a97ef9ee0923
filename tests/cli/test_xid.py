"""`keepstep xid` and `keepstep get patterns`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.catalog.load import VERSION, shipped
from tests.cli.story import keepstep


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    return tmp_path


def answer(*args: str | Path) -> Any:
    result = keepstep(*args, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_code_is_explained_with_who_sees_it_otherwise() -> None:
    record = answer("xid", "94")
    assert record["schema"] == "keepstep.xid/1" and record["code"] == 94
    assert record["nvidia"] == {
        "immediate": "RESTART_APP",
        "investigatory": "IGNORE (sympathetic)",
        "severity": "NONFATAL",
    }
    assert record["entry"]["action"] == "restart_job" and record["entry"]["class"] == "hardware"
    assert [variant["id"] for variant in record["variants"]] == ["xid.94.reset"]
    says = {one["tool"]: one["unhealthy"] for one in record["tools"]}
    assert says == {
        "NVIDIA catalog": False,
        "gpud": True,
        "Meta gcm": True,
        "k8s-device-plugin": True,
        "EKS node agent": False,
        "Azure NHC": False,
        "NVSentinel": None,
    }
    assert record["disagreement"].startswith("unhealthy: gpud")
    assert record["catalog"]["version"] == VERSION and record["catalog"]["digest"] == shipped().digest


def test_tools_that_agree_disagree_about_nothing() -> None:
    assert answer("xid", "79")["disagreement"] == ""


@pytest.mark.parametrize("words", [["63"], ["xid", "63"], ["Xid", "63"], ["xid63"], ["XID:63"], ["xid.63"]])
def test_a_code_may_be_written_in_many_ways(words: list[str]) -> None:
    assert answer("xid", *words)["code"] == 63


def test_several_codes_are_a_list() -> None:
    assert [record["code"] for record in answer("xid", "48", "63")] == [48, 63]
    names = keepstep("xid", "48", "63", "-o", "name")
    assert names.stdout.split() == ["xid.48", "xid.63"]


def test_a_line_of_the_kernel_log_is_read() -> None:
    line = "NVRM: Xid (PCI:0000:d7:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17 (0x04084507 0x00000004 0x0"
    record = answer("xid", line)
    assert record["entry"]["id"] == "xid.145.nonfatal" and record["line"]["link"] == "17"
    assert record["decoded"]["bucket"] == "XID_154_EVAL"


def test_registers_are_decoded_by_driver() -> None:
    older = answer("xid", "145", "--registers", "0x00000082 0x00000040", "--driver", "570.158.01")["decoded"]
    assert (older["bucket"], older["units"], older["driver_branch"]) == ("RESET_GPU", ["RLW_REMAP"], 570)
    newer = answer("xid", "145", "--registers", "0x00000082,0x00000040", "--driver", "580")["decoded"]
    assert newer["bucket"] is None and newer["note"] == "no row of the table fits these registers"
    hopper = answer("xid", "74", "--registers", "0x200000 0x0")["decoded"]
    assert hopper == {"bits": {"signal": ["reg0 bit 21"]}, "variant": "signal"}


def test_an_nvswitch_code() -> None:
    record = answer("xid", "--sxid", "24007")
    assert record["kind"] == "sxid" and record["nvidia"] == {"always_fatal": False, "potentially_fatal": True}
    line = answer("xid", "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Non-fatal, Link 28 timeout")
    assert line["entry"]["id"] == "sxid.24007.nonfatal"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["xid", "9999"], 6, ["no Xid 9999", "173"]),
        (["xid", "24007"], 6, ["--sxid"]),
        (["xid", "--sxid", "94"], 6, ["no SXid 94"]),
        (["xid", "ninety"], 2, ["ninety", "number"]),
        (["xid", "xid"], 2, ["no code"]),
        (["xid", "94", "--registers", "0x1 0x2"], 2, ["144 to 150", "94"]),
        (["xid", "145", "--registers", "none"], 2, ["none", "0x00000082"]),
        (["xid", "145", "--registers", "0x1 0x2", "--driver", "new"], 2, ["--driver", "new"]),
        (["xid", "94", "--catalog", "gone.toml"], 2, ["gone.toml"]),
        (["get", "patterns", "run-7"], 2, ["run-7"]),
        (["get", "patterns", "--cycle", "1"], 2, ["--cycle"]),
        (["get", "jobs", "--catalog", "x.toml"], 2, ["--catalog"]),
    ],
)
def test_what_is_wrong_is_said(args: list[str], code: int, words: list[str]) -> None:
    result = keepstep(*args)
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr


def test_a_sites_change_is_shown_with_its_reason(home: Path) -> None:
    folder = home / "catalog.d"
    folder.mkdir()
    (folder / "site.toml").write_text('[[override]]\nid = "xid.63"\nreason = "no spare nodes"\naction = "ask_human"\n')
    assert answer("xid", "63")["entry"]["action"] == "ask_human"
    assert "no spare nodes" in keepstep("xid", "63", "-o", "table").stdout
    other = home / "other.toml"
    other.write_text('[[override]]\nid = "xid.63"\nreason = "a test"\naction = "cordon_node"\n')
    assert answer("xid", "63", "--catalog", other)["entry"]["action"] == "cordon_node"


def test_a_table_has_what_a_person_asks_for() -> None:
    shown = keepstep("xid", "145", "-o", "wide").stdout
    assert "they disagree" in shown and "xid.145.fatal" in shown and "NVLink 5" in shown


def test_get_patterns_lists_the_catalog() -> None:
    records = answer("get", "patterns")
    assert [record["id"] for record in records] == sorted(entry.id for entry in shipped())
    storage = answer("get", "patterns", "-l", "class=storage,role=root")
    assert storage and all(record["weights"]["storage"] > 0 for record in storage)
    assert "nvme.timeout" in keepstep("get", "patterns", "-o", "wide").stdout
