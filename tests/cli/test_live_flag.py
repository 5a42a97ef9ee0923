"""`--live SOURCE` of `scan` and `why`: commands, an exporter, a tree as sysfs; and what is said where nothing answers."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.cli.main import main
from keepstep.sources.live import asking
from keepstep.sources.reading import Answered, read_paths

XID = "2031-06-15T12:00:00,123456+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus."
METRICS = (
    "# TYPE DCGM_FI_DEV_ROW_REMAP_FAILURE gauge\n"
    'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="3",UUID="GPU-1",pci_bus_id="00000000:3B:00.0",Hostname="gpu-17"} 1\n'
)
IBSTAT = "CA 'mlx5_3'\\n\\tPort 1:\\n\\t\\tState: Down\\n\\t\\tPhysical state: Disabled\\n\\t\\tRate: 400"
SACCT = "JobID|State|ExitCode|NodeList\\n8|NODE_FAIL|0:0|n[3-4]"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def found(*arguments: str) -> Any:
    done = invoke(*arguments, "-o", "json")
    assert done.exit_code in (0, 3), done.output
    return json.loads(done.stdout)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands before all others on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def command(folder: Path, name: str, output: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '%b\\n' {shlex.quote(output)}\n")
    path.chmod(0o755)


@pytest.fixture
def exporter() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


class TestWhatIsAsked:
    def test_the_kernels_ring_with_the_name_of_this_machine(self, commands: Path) -> None:
        command(commands, "dmesg", XID)
        (event,) = [e for e in found("scan", "--live", "kernel") if e["signature"] == "xid.79"]
        assert event["node"] == socket.gethostname()
        assert event["time"] == "2031-06-15T12:00:00.123456000Z"
        assert event["gpu"]["pci"] == "0000:3b:00.0"

    def test_the_real_ring_is_read_or_it_is_said_why_not(self) -> None:
        answer = asking.kernel()
        assert bool(answer.text) != bool(answer.notes)

    def test_slurm_and_the_kernel_make_one_verdict(self, commands: Path) -> None:
        command(commands, "dmesg", XID)
        command(commands, "sacct", SACCT)
        verdict = found("why", "--live", "kernel", "--live", "slurm=8")
        assert (verdict["class"], verdict["signature"]) == ("hardware", "xid.79")
        assert {u["path"] for u in verdict["used"]} == {"live:kernel", "live:slurm"}
        assert any("scontrol: not found" in u for u in verdict["unreadable"])

    def test_the_job_of_this_allocation(self, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command(commands, "sacct", SACCT)
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert "slurm.job_node_fail" in {e["signature"] for e in found("scan", "--live", "slurm")}

    def test_the_tools_that_are_here(self, commands: Path) -> None:
        command(commands, "ibstat", IBSTAT)
        events = found("scan", "--live", "tools")
        (port,) = [e for e in events if e["signature"] == "nic.port"]
        assert (port["node"], port["nic"], port["attrs"]["up"]) == (socket.gethostname(), "mlx5_3", False)

    def test_an_exporter_beside_a_file(self, exporter: str, tmp_path: Path) -> None:
        (tmp_path / "kern.log").write_text(XID.replace(" NVRM", " gpu-18 kernel: NVRM").replace(",", ".", 1) + "\n")
        records = found("scan", str(tmp_path), "--live", f"dcgm={exporter}")
        assert {("gpu.remap_failed", "gpu-17"), ("xid.79", "gpu-18")} <= {
            (r["signature"], r.get("node")) for r in records
        }

    def test_counters_that_rise_between_two_readings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        downed = port / "counters" / "link_downed"
        downed.write_text("3\n")
        monkeypatch.setattr(time, "sleep", lambda _: downed.write_text("5\n"))
        answer = asking.ports(shipped(), 2.0, tmp_path)
        assert answer.events and all(e.time_ns is not None for e in answer.events)
        assert all(e.node == socket.gethostname() for e in answer.events)
        reading = read_paths([], shipped(), answers=[answer])
        assert attribute(reading.events, shipped()).fault_class == "fabric"

    def test_words_of_what_nobody_chose_to_show_lean_to_nothing(self) -> None:
        text = "the optimizer state of the checkpoint was not restored by the trainer library\n"
        alone = read_paths([], shipped(), answers=[Answered("live:slurm", text)])
        assert all(e.signature != "text.words" for e in alone.events)


class TestWhatCannotBeAsked:
    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("foo", "no such source; there are kernel, gpu, tools,"),
            ("gpu=3", "no such source"),
            ("ib=never", "seconds between two readings"),
            ("ib=-1", "seconds between two readings"),
            ("ib=nan", "seconds between two readings"),
            ("slurm", "SLURM_JOB_ID is not set here"),
            ("slurm=8;rm", "is no Slurm job id"),
            ("kubernetes=train", "NAMESPACE/SELECTOR"),
            ("kubernetes=-A/a=b", "is no namespace"),
        ],
    )
    def test_bad_sources_are_usage_errors(self, source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        for verb in ("scan", "why"):
            done = invoke(verb, "--live", source)
            assert done.exit_code == 2, done.output
            assert said in done.output

    def test_nothing_answered(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        for verb in ("scan", "why"):
            done = invoke(verb, "--live", "slurm=8", "--live", "tools")
            assert done.exit_code == 1
            assert "sacct: not found" in done.output
            assert "none of nvidia-smi, dcgmi, ibstat, perfquery, lspci is installed here" in done.output

    def test_what_does_not_answer_is_said_beside_the_verdict(self, commands: Path) -> None:
        command(commands, "dmesg", XID)
        verdict = found("why", "--live", "kernel", "--live", "dcgm=http://127.0.0.1:9/metrics")
        assert verdict["class"] == "hardware"
        assert any("is dcgm-exporter running there?" in u for u in verdict["unreadable"])

    def test_a_recorded_incident_asks_nobody(self) -> None:
        done = invoke("why", "INC-0001", "--live", "kernel")
        assert done.exit_code == 2
        assert "--live goes with paths or a run" in done.output

    def test_following_is_something_else(self) -> None:
        assert "give one of them" in invoke("scan", "--follow", "--live", "kernel").output
