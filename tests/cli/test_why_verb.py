"""`keepstep why`: what is asked, what is printed, what the exit code says."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.cli.bundle import nodes_of
from keepstep.cli.main import main
from keepstep.records.codec import to_json
from keepstep.records.cycle import Cycle, RankPlace

GONE = (
    "2031-03-03T04:05:06+00:00 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus.\n"
)
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 324.00 MiB. GPU 0 has a total capacity of 79 GiB\n"


def why(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["why", *arguments], input=stdin)


def fields(*arguments: str) -> dict[str, Any]:
    done = why(*arguments, "-o", "json")
    assert done.exit_code in (0, 3), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kern.log"
    path.write_text(GONE)
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Two cycles: the first failed, its GPU was named by the kernel log among its evidence."""
    folder = tmp_path / "run-1"
    for name in ("cycles", "logs", "incidents", "evidence/cycle-0000/gpu-17", "journal"):
        (folder / name).mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    ranks = [
        RankPlace(rank=r, local_rank=r % 2, node=f"gpu-{17 + r // 2}", host=f"gpu-{17 + r // 2}", exit="exit 1")
        for r in range(4)
    ]
    for number, reason in ((0, "failed"), (1, "succeeded")):
        cycle = Cycle(
            run_id="run-1",
            attempt=0,
            cycle=number,
            started_at="2031-03-03T04:00:00Z",
            end_reason=reason,
            ranks=ranks,
            active_nodes=["gpu-17", "gpu-18"],
        )
        (folder / "cycles" / f"cycle-{number:04d}.json").write_bytes(to_json(cycle))
        (folder / "logs" / f"cycle-{number:04d}.log").write_text("[rank 0] step 10\n" if number else f"[rank 3] {OOM}")
    (folder / "evidence/cycle-0000/gpu-17/kernel.log").write_text(GONE)
    return folder


def test_times_of_day_on_standard_input_have_a_day() -> None:
    # As in a file that was written now; without one, steps after a complaint could not be told from steps before it.
    done = why(
        "-", "-o", "json", stdin="10:00:10 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    )
    assert json.loads(done.stdout)["first_cause"]["time"][10:19] == "T10:00:10"


class TestVerdict:
    def test_a_current_fault_exits_3_with_all_fields_of_the_contract(self, kernel: Path) -> None:
        done = why(str(kernel), "-o", "json")
        assert done.exit_code == 3
        found = json.loads(done.stdout)
        assert found["schema"] == "keepstep.verdict/1"
        assert (found["class"], found["action"], found["no_current_fault"]) == ("hardware", "cordon_node", False)
        assert set(found) >= {
            "signature",
            "confidence",
            "tier",
            "entity",
            "first_cause",
            "evidence",
            "alternatives",
            "summary",
        }
        assert set(found["entity"]) == {"node", "gpu", "rank", "nic", "job"}
        assert found["entity"]["node"] == "gpu-17" and found["entity"]["gpu"] == "0000:3b:00.0"
        assert found["first_cause"]["schema"] == "keepstep.event/1" and found["first_cause"]["evidence"]["line"] == 1
        assert {e["bearing"] for e in found["evidence"]} <= {"supports", "contradicts", "symptom"}
        assert all(set(a) == {"class", "confidence", "why_not"} for a in found["alternatives"])
        assert found["used"][0]["events"] == 1 and found["unreadable"] == [] and found["catalog"]["version"]

    def test_the_table_says_whose_fault_where_and_what_to_do(self, kernel: Path) -> None:
        done = why(str(kernel), "-o", "table")
        lines = done.stdout.splitlines()
        assert lines[0].startswith("VERDICT") and "hardware" in lines[0]
        by_label = {line[:12].strip(): line for line in lines}
        assert "cordon_node: take the node out" in by_label["DO"]
        assert "node gpu-17, GPU 0000:3b:00.0" in by_label["AT FAULT"]
        assert "kern.log:1" in by_label["FIRST CAUSE"] and "2031-03-03 04:05:06" in by_label["FIRST CAUSE"]
        assert "kern.log" in by_label["READ"]

    def test_explain_shows_terms_that_add_up(self, kernel: Path) -> None:
        scores = fields(str(kernel), "--explain")["scores"]
        for name, total in scores["sums"].items():
            adds = sum(term["adds"].get(name, 0.0) for term in scores["terms"])
            assert total == pytest.approx(scores["priors"][name] + adds, abs=1e-3)
        assert sum(scores["chances"].values()) == pytest.approx(1.0, abs=1e-4)
        assert "TERMS" in why(str(kernel), "--explain", "-o", "table").stdout

    def test_without_explain_there_are_no_terms(self, kernel: Path) -> None:
        assert "scores" not in fields(str(kernel))

    def test_a_log_without_signs_is_unknown_and_says_what_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "empty.log").write_text("hello\n")
        found = fields(str(tmp_path / "empty.log"))
        assert (found["class"], found["action"]) == ("unknown", "ask_human") and found["missing"]

    def test_control_characters_of_a_log_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "evil.log").write_text("[rank0]: \x1b]0;owned\x07" + OOM)
        assert "\x1b" not in why(str(tmp_path / "evil.log"), "-o", "table").stdout


class TestInputs:
    def test_folders_and_packed_files_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "kern.log.gz").write_bytes(gzip.compress(GONE.encode()))
        assert fields(str(tmp_path / "logs"))["class"] == "hardware"

    def test_standard_input_is_read(self) -> None:
        done = why("-", "-o", "json", stdin=GONE)
        assert done.exit_code == 3 and json.loads(done.stdout)["class"] == "hardware"

    def test_a_path_that_is_not_there_exits_6(self, tmp_path: Path) -> None:
        done = why(str(tmp_path / "nothing.log"))
        assert done.exit_code == 6 and "nothing.log" in done.output

    def test_nothing_readable_exits_1_and_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(100))
        done = why(str(tmp_path / "core"))
        assert done.exit_code == 1 and "ELF" in done.output

    def test_nothing_asked_exits_2(self) -> None:
        assert why().exit_code == 2

    def test_since_makes_older_signs_count_no_more(self, kernel: Path) -> None:
        done = why(str(kernel), "--since", "2031-03-03T05:00:00Z", "-o", "json")
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        assert found["no_current_fault"] and found["evidence"][0]["stale"] == "too_old"

    def test_spans_count_from_now(self, kernel: Path) -> None:
        assert why(str(kernel), "--since", "1h", "--now", "2031-03-03T05:00:00Z", "-o", "name").exit_code == 3
        assert why(str(kernel), "--since", "1h", "--now", "2031-03-03T06:00:00Z", "-o", "name").exit_code == 0

    def test_until_leaves_later_signs_out(self, kernel: Path) -> None:
        assert fields(str(kernel), "--until", "2031-03-03T04:00:00Z")["class"] == "unknown"

    def test_a_bad_time_names_the_flag(self, kernel: Path) -> None:
        done = why(str(kernel), "--until", "yesterday")
        assert done.exit_code == 2 and "--until" in done.output


class TestRunFolder:
    def test_the_last_failed_cycle_is_meant(self, run_folder: Path) -> None:
        found = fields(str(run_folder))
        assert found["cycle"] == 0 and found["signature"].startswith("xid.79")
        assert all("cycle-0001" not in u["path"] for u in found["used"])

    def test_the_rank_map_joins_ranks_and_nodes(self, run_folder: Path) -> None:
        (run_folder / "evidence/cycle-0000/gpu-17/kernel.log").unlink()
        assert fields(str(run_folder))["entity"] == {
            "node": "gpu-18",
            "gpu": None,
            "rank": 3,
            "nic": None,
            "job": "run-1",
        }

    def test_a_cycle_can_be_chosen(self, run_folder: Path) -> None:
        assert fields(str(run_folder), "--cycle", "1")["cycle"] == 1
        done = why(str(run_folder), "--cycle", "7")
        assert done.exit_code == 6 and "0, 1" in done.output

    def test_an_incident_is_judged_by_the_files_of_its_cycle(self, run_folder: Path) -> None:
        record = {"schema": "keepstep.incident/1", "id": "INC-0001", "cycle": 0, "verdict": {"class": "unknown"}}
        (run_folder / "incidents/INC-0001.json").write_text(json.dumps(record))
        assert fields("INC-0001", "--run", str(run_folder))["class"] == "hardware"

    def test_an_incident_that_has_a_verdict_is_shown_as_recorded(self, run_folder: Path, kernel: Path) -> None:
        verdict = fields(str(kernel)) | {"summary": "as it was seen then"}
        record = {"schema": "keepstep.incident/1", "id": "INC-0002", "cycle": 0, "verdict": verdict}
        (run_folder / "incidents/INC-0002.json").write_text(json.dumps(record))
        assert fields("INC-0002", "--run", str(run_folder))["summary"] == "as it was seen then"
        assert "as it was seen then" in why("INC-0002", "--run", str(run_folder), "-o", "table").output

    def test_an_incident_that_is_not_there_exits_6_and_names_those_that_are(self, run_folder: Path) -> None:
        (run_folder / "incidents/INC-0001.json").write_text("{}")
        done = why("INC-0009", "--run", str(run_folder))
        assert done.exit_code == 6 and "INC-0001" in done.output

    def test_a_cycle_needs_a_run(self, kernel: Path) -> None:
        assert why(str(kernel), "--cycle", "0").exit_code == 2

    def test_the_same_failure_on_another_node_before_travels_with_the_job(self, run_folder: Path) -> None:
        (run_folder / "evidence/cycle-0000/gpu-17/kernel.log").unlink()
        alone = fields(str(run_folder))
        assert "derived.history.software" not in {e["signature"] for e in alone["evidence"]}
        before = alone | {"entity": alone["entity"] | {"node": "gpu-9"}}
        record = {"schema": "keepstep.incident/1", "id": "INC-0001", "run_id": "run-1", "attempt": 0, "cycle": 0,
                  "time": "2031-03-03T03:00:00Z", "kind": "cycle.failed", "attrs": {}, "verdict": before}  # fmt: skip
        (run_folder / "incidents/INC-0001.json").write_text(json.dumps(record))
        later = json.loads((run_folder / "cycles/cycle-0000.json").read_bytes()) | {"cycle": 2}
        (run_folder / "cycles/cycle-0002.json").write_text(json.dumps(later))
        (run_folder / "logs/cycle-0002.log").write_text(f"[rank 3] {OOM}")
        found = fields(str(run_folder), "--cycle", "2")
        assert "derived.history.software" in {e["signature"] for e in found["evidence"]}
        assert found["signature"] == alone["signature"]
        own = fields(str(run_folder), "--cycle", "0")
        assert "derived.history.software" not in {e["signature"] for e in own["evidence"]}, (
            "a cycle is no past of its own"
        )


FIVE_HOURS_LATER = GONE.replace("T04:", "T09:").replace("gpu-17", "gpu-21").replace("0000:3b", "0000:9c")


class TestSeveralIncidents:
    def test_two_faults_hours_apart_on_two_nodes_are_two(self, kernel: Path) -> None:
        kernel.write_text(GONE + FIVE_HOURS_LATER)
        first, second = fields(str(kernel))["incidents"]
        assert set(first) == {"begin", "end", "class", "signature", "action", "entity", "summary"}
        assert [i["entity"]["node"] for i in (first, second)] == ["gpu-17", "gpu-21"]
        assert first["begin"].startswith("2031-03-03T04:05:06") and second["end"].startswith("2031-03-03T09:05:06")
        assert {i["action"] for i in (first, second)} == {"cordon_node"}

    def test_the_table_names_the_one_that_the_verdict_is_not_of(self, kernel: Path) -> None:
        kernel.write_text(GONE + FIVE_HOURS_LATER)
        node = fields(str(kernel))["entity"]["node"]
        (also,) = [row for row in why(str(kernel), "-o", "table").output.splitlines() if row.startswith("ALSO")]
        assert {"gpu-17": "09:05:06", "gpu-21": "04:05:06"}[node] in also and node not in also

    def test_one_fault_is_none_of_several(self, kernel: Path) -> None:
        assert "incidents" not in fields(str(kernel))
        kernel.write_text(GONE + GONE.replace(":06+", ":36+").replace("79, pid", "154, pid"))
        assert "incidents" not in fields(str(kernel))

    def test_what_the_job_went_on_after_is_nothing_to_act_on_any_more(self, tmp_path: Path) -> None:
        log = tmp_path / "job.log"
        day = "2031-03-03T{}:00:00Z "
        steps = "".join(f"{day.format('05')[:-5]}{m:02d}:00Z step {m} loss 2.1\n" for m in range(30))
        log.write_text(f"{day.format('04')}{OOM}{steps}{day.format('10')}{OOM}")
        found = fields(str(log))
        assert [i["action"] for i in found["incidents"]] == ["none", found["action"]]
        assert found["action"] != "none"

    def test_of_very_many_only_the_newest_are_told(self, kernel: Path) -> None:
        kernel.write_text("".join(GONE.replace("T04", f"T{h:02d}").replace("3b", f"{h:02x}") for h in range(24)))
        found = fields(str(kernel))["incidents"]
        assert len(found) == 20 and found[-1]["begin"].startswith("2031-03-03T23:05:06")

    def test_an_archive_for_others_names_no_node_of_any(self, kernel: Path, tmp_path: Path) -> None:
        kernel.write_text(GONE + FIVE_HOURS_LATER)
        assert {"gpu-17", "gpu-21"} <= nodes_of(fields(str(kernel)))


class Endpoint:
    """A chat endpoint that answers what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.answer = 200, b'{"choices": [{"message": {"content": "A GPU is gone."}}]}'
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((self.path, dict(self.headers), body))
                self.send_response(endpoint.status)
                if endpoint.status in (301, 302):
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(endpoint.answer)

            def log_message(self, *_arguments: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Endpoint()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


class TestSummary:
    def test_it_stands_beside_the_verdict(self, kernel: Path, endpoint: Endpoint) -> None:
        plain, done = why(str(kernel), "-o", "json"), why(str(kernel), "-o", "json", "--summarize-with", endpoint.url)
        assert (done.stdout, done.exit_code) == (plain.stdout, plain.exit_code)
        assert "A GPU is gone." in done.stderr

    def test_what_is_sent_names_no_host_and_carries_the_token(
        self, kernel: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KEEPSTEP_SUMMARIZE_TOKEN", "t0ken")
        why(str(kernel), "-o", "json", "--summarize-with", endpoint.url, "--summarize-model", "m")
        ((path, headers, body),) = endpoint.asked
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer t0ken" and body["model"] == "m"
        assert "gpu-17" not in json.dumps(body) and "fallen off the bus" in json.dumps(body)

    def test_it_can_go_to_a_file(self, kernel: Path, endpoint: Endpoint, tmp_path: Path) -> None:
        target = tmp_path / "summary.txt"
        why(str(kernel), "--summarize-with", endpoint.url, "--summary-file", str(target))
        assert target.read_text() == "A GPU is gone.\n"

    @pytest.mark.parametrize(
        ("status", "answer"),
        [
            (500, b"no"),
            (302, b""),
            (200, b"not json"),
            (200, b"{}"),
            (200, b'{"choices": []}'),
            (200, b'{"choices": [{"message": {"content": null}}]}'),
            (200, b"[1]"),
            (200, b"x" * 300_000),
        ],
    )
    def test_a_failure_is_said_and_changes_nothing(
        self, kernel: Path, endpoint: Endpoint, status: int, answer: bytes
    ) -> None:
        endpoint.status, endpoint.answer = status, answer
        done = why(str(kernel), "-o", "json", "--summarize-with", endpoint.url)
        assert done.exit_code == 3 and "no summary from" in done.stderr
        assert json.loads(done.stdout)["class"] == "hardware"
        assert len(endpoint.asked) == 1  # a redirect is not followed

    def test_what_it_says_has_no_power_over_the_terminal(self, kernel: Path, endpoint: Endpoint) -> None:
        endpoint.answer = b'{"choices": [{"message": {"content": "\\u001b[2J fine"}}]}'
        assert "\x1b" not in why(str(kernel), "-o", "json", "--summarize-with", endpoint.url).stderr

    def test_an_address_that_is_none_is_refused(self, kernel: Path) -> None:
        assert why(str(kernel), "--summarize-with", "file:///etc/passwd").exit_code == 2
