"""`keepstep scan`: what is found, what is said beside it, what the exit code says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.cli.main import main

GONE = "2031-06-15T12:00:00Z gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
LATER = "2031-06-15T13:00:00Z gpu-18 kernel: NVRM: Xid (PCI:0000:3c:00): 79, GPU has fallen off the bus.\n"
MILD = (
    "2031-06-15T12:30:00Z gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 154, "
    "GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)\n"
)


def scan(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["scan", *map(str, arguments)], input=stdin)


def found(*arguments: str | Path, stdin: str | None = None) -> list[dict[str, Any]]:
    done = scan(*arguments, "-o", "json", stdin=stdin)
    assert done.exit_code in (0, 3), done.output
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "kern.log"
    path.parent.mkdir()
    path.write_text(LATER + GONE + MILD)
    return path


class TestWhatIsFound:
    def test_events_by_time(self, log: Path) -> None:
        records = found(log)
        assert [(r["signature"], r["node"], r["time"][11:19]) for r in records if r["signature"] == "xid.79"] == [
            ("xid.79", "gpu-17", "12:00:00"),
            ("xid.79", "gpu-18", "13:00:00"),
        ]
        assert all(r["schema"] == "keepstep.event/1" and r["id"] for r in records)
        assert records[0]["evidence"] == {"path": str(log), "line": 2, "text": GONE.rstrip()}

    def test_standard_input(self) -> None:
        assert [r["node"] for r in found("-", stdin=GONE)] == ["gpu-17"]

    def test_compressed_files_and_folders(self, log: Path) -> None:
        packed = log.with_name("old.log.gz")
        packed.write_bytes(gzip.compress(GONE.replace("gpu-17", "gpu-19").encode()))
        assert {r["node"] for r in found(log.parent)} == {"gpu-17", "gpu-18", "gpu-19"}

    def test_a_storm_is_one_record(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text(
            "".join(f"[{n}.000000] NVRM: Xid (PCI:0000:3b:00): 95, pid={n}\n" for n in range(1, 200))
        )
        (record,) = found(tmp_path / "x")
        assert (record["count"], record["attrs"]["last_order"]) == (199, 199)

    @pytest.mark.parametrize("form", ["jsonl", "name", "yaml", "table", "wide"])
    def test_formats(self, log: Path, form: str) -> None:
        done = scan(log, "-o", form, "--signature", "xid.79")
        lines = done.stdout.splitlines()
        assert done.exit_code == 3 and len(lines) == (
            3 if form in ("table", "wide") else 2 if form != "yaml" else len(lines)
        )
        assert "gpu-17" in done.stdout or form == "name"

    def test_text_has_no_power_over_a_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\x1b]0;gone\x07" + GONE.encode())
        done = scan(tmp_path / "x", "-o", "table")
        assert "\x1b" not in done.stdout and "xid.79" in done.stdout


class TestWhatIsWanted:
    @pytest.mark.parametrize(
        ("flags", "nodes"),
        [
            (["--node", "gpu-18"], ["gpu-18"]),
            (["--node", "gpu-*"], ["gpu-17", "gpu-18"]),
            (["--since", "2031-06-15T12:59:00Z"], ["gpu-18"]),
            (["--until", "2031-06-15T12:59:00Z"], ["gpu-17"]),
            (["--signature", "xid.*", "--severity", "fatal"], ["gpu-17", "gpu-18"]),
            (["--signature", "nccl.*"], []),
            (["--limit", "1"], ["gpu-17"]),
        ],
    )
    def test_flags(self, log: Path, flags: list[str], nodes: list[str]) -> None:
        assert [r["node"] for r in found(log, *flags) if r["signature"] == "xid.79"] == nodes

    def test_a_truncated_list_says_so(self, log: Path) -> None:
        assert "1 of 3 events shown" in scan(log, "--limit", "1", "-o", "json").stderr

    def test_entries_of_a_site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = {
            "id": "site.gateway",
            "kind": "storage.error",
            "title": "gateway down",
            "severity": "error",
            "role": "context",
            "scope": "storage",
            "depth": 2,
            "pattern": ["GATEWAY-(?P<node>\\w+) IS DOWN"],
            "examples": ["GATEWAY-g3 IS DOWN"],
            "source": "our gateway",
            "reason": "its own words",
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
        own, line = tmp_path / "catalog.d" / "site.toml", "12:00:01 GATEWAY-g3 IS DOWN\n"
        own.parent.mkdir()
        own.write_text("\n".join(["[[signature]]", *lines]))
        (given,) = found("-", "--catalog", own, stdin=line)
        monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
        (installed,) = found("-", stdin=line)
        assert [(r["signature"], r["node"]) for r in (given, installed)] == [("site.gateway", "g3")] * 2


class TestExitCodes:
    def test_a_problem(self, log: Path) -> None:
        assert scan(log, "-o", "json").exit_code == 3

    def test_none(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("all is well\n")
        done = scan(tmp_path / "x", "-o", "json")
        assert (done.exit_code, json.loads(done.stdout)) == (0, [])

    def test_a_missing_file(self, tmp_path: Path) -> None:
        done = scan(tmp_path / "missing")
        assert done.exit_code == 6 and "missing" in done.stderr

    def test_nothing_that_can_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\x7fELF" + bytes(100))
        done = scan(tmp_path / "x")
        assert done.exit_code == 1 and "an ELF file" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "give PATH"),
            (["x", "--cursor-file", "c"], "--cursor-file goes with --follow"),
            (["a", "b", "--follow"], "one source"),
            (["--since", "yesterday", "x"], "--since"),
        ],
    )
    def test_usage(self, arguments: list[str], said: str) -> None:
        done = scan(*arguments)
        assert done.exit_code == 2 and said in done.stderr

    def test_following_what_cannot_be_followed(self, log: Path) -> None:
        done = scan("--follow", log)
        assert done.exit_code == 1 and "neither a FIFO nor /dev/kmsg" in done.stderr


def test_what_was_left_out_is_said(log: Path) -> None:
    (log.parent / "model.safetensors").write_bytes(b"x")
    (log.parent / "prog").write_bytes(b"\x7fELF" + bytes(100))
    (log.parent / "nccl_trace_rank_0").write_bytes(b"\x80\x02}(X\x09\x00\x00\x00pg_config")
    said = scan(log.parent, "-o", "json").stderr
    assert "left out" in said and "safetensors" in said
    assert "not read" in said and "an ELF file" in said
    assert f"keepstep hang {log.parent}" in said
