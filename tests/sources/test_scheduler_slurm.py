"""Records of Slurm: every state, columns in any order, cut ones, and samples of a real cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keepstep.sources.scheduler.making import moment
from keepstep.sources.scheduler.slurmjobs import SIGNATURES, code_of, state_of
from tests.sources.scheduling import attrs, events, one, signatures


def samples() -> Path:
    shared = os.environ.get("KEEPSTEP_SHARED")
    if shared is None:
        pytest.skip("KEEPSTEP_SHARED is not set: no samples of a real Slurm cluster")
    return Path(shared) / "data/slurm-samples"


class TestSacct:
    def test_columns_in_any_order_and_steps_apart(self) -> None:
        text = "State|ExitCode|JobID|NodeList\nNODE_FAIL|0:0|8|n[3-4]\nCOMPLETED|0:0|8.batch|n3\nCANCELLED|0:15|8.0|n[3-4]\n"
        event = one(text, "slurm.job_node_fail")
        assert (event.job, event.node, event.attrs["nodes"]) == ("8", None, "n[3-4]")
        assert signatures(text) == ["slurm.job_node_fail"]

    def test_a_job_on_one_node_names_it(self) -> None:
        assert one("JobID|State|NodeList\n8|TIMEOUT|n3\n", "slurm.job_time_limit").node == "n3"

    def test_trailing_bars_of_parsable(self) -> None:
        assert signatures("JobID|State|ExitCode|\n8|PREEMPTED|0:0|\n") == ["slurm.job_preempted"]

    @pytest.mark.parametrize(
        ("state", "signature"),
        [(s, i) for s, i in SIGNATURES.items()]
        + [("CANCELLED by 1000", "slurm.job_cancelled"), ("OUT_OF_ME+", "slurm.job_oom")],
    )
    def test_every_state_has_an_entry(self, state: str, signature: str) -> None:
        assert signature in signatures(f"JobID|State\n8|{state}\n")

    def test_who_cancelled_is_kept(self) -> None:
        assert attrs("JobID|State\n8|CANCELLED by 1000\n", "slurm.job_cancelled")["by_uid"] == "1000"

    def test_default_columns_are_cut_by_their_dashes(self) -> None:
        text = (
            "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode \n"
            "------------ ---------- ---------- ---------- ---------- ---------- -------- \n"
            "9120             tok ds        cpu                    64 OUT_OF_ME+    0:125 \n"
            "9120.extern      extern                               64  COMPLETED      0:0 \n"
            "\n"
            "9999 is not a row\n"
        )
        event = one(text, "slurm.job_oom")
        assert event.job == "9120"
        assert event.attrs["code"] == 0
        assert "signal" not in event.attrs  # 125 is Slurm's mark, no signal

    def test_memory_beside_the_job_is_not_that_of_the_job(self) -> None:
        text = "JobID|State|ExitCode\n7|COMPLETED|0:0\n7.extern|OUT_OF_MEMORY|0:125\n"
        assert signatures(text) == ["slurm.job_completed"]
        assert "slurm.job_oom" in signatures("JobID|State|ExitCode\n7.0|OUT_OF_MEMORY|0:125\n")

    def test_a_headless_table_is_read_by_its_command(self) -> None:
        text = "$ sacct -n -P -X --format=State,JobID,NodeList\nTIMEOUT|7|n1\n$ squeue -h -o '%i|%T|%N'\n8|RUNNING|n2\n"
        assert signatures(text) == ["slurm.job_time_limit", "slurm.job_running"]

    def test_the_warning_signal_is_told_from_a_crash(self) -> None:
        text = "JobID|State|ExitCode\n88|FAILED|138:0\n88.0|FAILED|0:10\n"
        assert signatures(text) == ["slurm.user_signal", "slurm.job_failed", "slurm.user_signal"]
        assert "slurm.user_signal" not in signatures("JobID|State|ExitCode\n88|FAILED|10:0\n")

    def test_sacct_loses_128_of_a_code(self) -> None:
        assert attrs("JobID|State|ExitCode\n88|FAILED|9:0\n", "slurm.job_failed")["ambiguous_code"] is True
        assert "ambiguous_code" not in attrs("JobID|State|ExitCode\n88|FAILED|0:9\n", "slurm.job_failed")

    def test_memory_shows_at_a_step_or_in_the_derived_code_only(self) -> None:
        text = "JobID|State|ExitCode|DerivedExitCode\n22|FAILED|1:0|0:125\n22.0|OUT_OF_MEMORY|0:125|\n"
        assert signatures(text) == ["slurm.job_failed", "slurm.job_oom", "slurm.job_oom"]

    def test_a_job_that_never_ran_for_its_output(self) -> None:
        assert "slurm.output_path" in signatures("JobID|State|ExitCode\n88|FAILED|0:53\n")

    def test_times_are_taken_for_utc_and_said_to_be(self) -> None:
        event = one(
            "JobID|State|Start|End\n7|TIMEOUT|2031-01-01T00:00:00|2031-01-01T00:01:00\n", "slurm.job_time_limit"
        )
        assert (event.time_ns, event.time_quality) == (1_924_992_060_000_000_000, "zone_assumed")


class TestScontrol:
    JOB = (
        "JobId=7 JobName=my job with words\n"
        "   JobState={state} Reason={reason} Dependency=(null)\n"
        "   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode={code}\n"
        "   StartTime=2031-01-01T00:00:00 EndTime=2031-01-01T00:01:00 Deadline=N/A\n"
        "   PreemptTime={preempt}\n   NodeList=n[1-2]\n"
    )

    def test_a_job(self) -> None:
        found = attrs(
            self.JOB.format(state="TIMEOUT", reason="TimeLimit", code="0:9", preempt="None"), "slurm.job_time_limit"
        )
        assert (found["restarts"], found["signal"], found["reason"]) == ("2", 9, "TimeLimit")

    def test_preempted_but_completed_is_no_success(self) -> None:
        text = self.JOB.format(state="COMPLETED", reason="None", code="0:0", preempt="2031-01-01T00:00:58")
        assert signatures(text) == ["slurm.job_preempted_completed"]
        assert signatures(text.replace("2031-01-01T00:00:58", "None")) == ["slurm.job_completed"]

    def test_held_after_a_failed_launch(self) -> None:
        text = self.JOB.format(state="PENDING", reason="launch failed requeued held", code="0:0", preempt="None")
        assert signatures(text) == ["slurm.job_pending", "slurm.held_after_requeues"]

    @pytest.mark.parametrize(
        ("state", "signature", "busy"),
        [
            ("DOWN+NOT_RESPONDING", "slurm.node_down", False),
            ("DOWN*+DRAIN", "slurm.node_down", False),
            ("IDLE+DRAIN", "slurm.node_drain", False),
            ("ALLOCATED+DRAIN", "slurm.node_drain", True),
            ("MIXED+DRAIN", "slurm.node_drain", True),
            ("UNKNOWN+DRAIN+INVALID_REG", "slurm.node_drain", False),
        ],
    )
    def test_a_node(self, state: str, signature: str, busy: bool) -> None:
        text = (
            f"NodeName=n2 Arch=x86_64\n   State={state} ThreadsPerCore=1\n"
            "   Reason=fan a=b slow [root@2031-01-01T00:00:00]\n"
        )
        event = one(text, signature)
        assert (event.node, event.attrs["busy"]) == ("n2", busy)
        assert (event.attrs["reason"], event.attrs["user"]) == ("fan a=b slow", "root")
        assert event.time_ns == 1_924_992_000_000_000_000

    def test_a_node_in_service_says_nothing(self) -> None:
        assert events("NodeName=n2 Arch=x86_64\n   State=MIXED ThreadsPerCore=1\n") == []

    def test_one_line_records(self) -> None:
        text = "JobId=4 JobState=NODE_FAIL ExitCode=0:0 NodeList=n3\nJobId=5 JobState=TIMEOUT NodeList=n4\n"
        assert signatures(text) == ["slurm.job_node_fail", "slurm.job_time_limit"]


class TestNodes:
    def test_reasons_with_words_and_host_lists(self) -> None:
        text = (
            "REASON               USER      TIMESTAMP           NODELIST\n"
            "Kill task failed     root      2031-01-25T15:12:23 n[1-2],x7\n"
        )
        assert [(e.node, e.attrs["reason"]) for e in events(text)] == [
            (n, "Kill task failed") for n in ("n1", "n2", "x7")
        ]

    def test_without_header(self) -> None:
        text = 'NHC: check "x" timed out   root   2031-03-30T08:11:10   hpc-g-0031\n'
        event = one(text, "slurm.node_drain", title="sinfo -R --noheader")
        assert (event.node, event.attrs["reason"]) == ("hpc-g-0031", 'NHC: check "x" timed out')

    def test_states_by_format(self) -> None:
        text = "worker-7 draining [node_problem] gpu pending\nworker-8 idle none\n"
        event = one(text, "slurm.node_drain", title="sinfo -N -h -o '%N %T %E'")
        assert (event.node, event.attrs["busy"], event.attrs["reason"]) == (
            "worker-7",
            True,
            "[node_problem] gpu pending",
        )

    def test_a_host_list_that_is_too_long_is_one_event(self) -> None:
        text = "NODELIST STATE REASON\nn[1-90000] down x\n"
        assert [e.node for e in events(text)] == [None]


class TestJson:
    def test_states_and_codes_of_several_versions(self) -> None:
        jobs = [
            {"job_id": 1, "job_state": "FAILED", "exit_code": 35072, "nodes": "n1", "end_time": 1795966771},
            {"job_id": 2, "job_state": ["TIMEOUT"], "exit_code": {"return_code": {"number": 0}, "signal": {"id": {"number": 9}}}},
            {"job_id": 3, "job_state": ["FAILED"], "exit_code": {"return_code": {"number": 1}, "signal": {"id": {"number": 0}}}},
        ]  # fmt: skip
        found = events(json.dumps({"meta": {"plugin": {"type": "openapi/v0.0.40"}}, "jobs": jobs}))
        assert [(e.signature, e.attrs.get("code"), e.attrs.get("signal")) for e in found] == [
            ("slurm.job_failed", 137, 9), ("slurm.job_time_limit", 0, 9), ("slurm.job_failed", 1, None)
        ]  # fmt: skip
        assert found[0].time_ns == 1795966771 * 10**9

    def test_codes_of_a_version_that_prints_them_wrong_are_not_read(self) -> None:
        job = {"job_id": 4, "state": {"current": "FAILED"}, "exit_code": {"status": "SUCCESS", "return_code": 0}}
        found = attrs(
            json.dumps({"meta": {"plugin": {"type": "openapi/dbv0.0.38"}}, "jobs": [job]}), "slurm.job_failed"
        )
        assert "code" not in found

    def test_nodes(self) -> None:
        nodes = [
            {"name": "n1", "state": ["IDLE", "DRAIN"], "reason": "x", "reason_changed_at": {"number": 5}},
            {"name": "n2", "state": "down", "state_flags": ["NOT_RESPONDING"], "reason": ""},
            {"name": "n3", "state": "idle", "state_flags": []},
        ]
        found = events(json.dumps({"meta": {}, "nodes": nodes}))
        assert [(e.node, e.signature) for e in found] == [("n1", "slurm.node_drain"), ("n2", "slurm.node_down")]


class TestEpilog:
    def test_codes_in_either_form(self) -> None:
        text = "SLURM_JOB_ID=25\nSLURM_JOB_EXIT_CODE=35072\nSLURM_JOB_RESTART_COUNT=1\n"
        assert attrs(text, "slurm.job_failed")["code"] == 137
        assert attrs(text + "SLURM_JOB_EXIT_CODE2=93:0\n", "slurm.job_failed")["code"] == 93

    def test_a_success_says_nothing(self) -> None:
        assert events("SLURM_JOB_ID=25\nSLURM_JOB_EXIT_CODE2=0:0\nSLURM_JOB_EXIT_CODE=0\n") == []


class TestRealSamples:
    """Slurm 22.05.8; what happened to each job is in the cluster's own notes."""

    def test_states_of_every_job(self) -> None:
        found = events((samples() / "sacct_D_parsable2.txt").read_text())
        by_job = {(e.job, e.signature) for e in found}
        assert {
            ("8", "slurm.job_node_fail"), ("7", "slurm.job_time_limit"), ("14", "slurm.job_preempted"),
            ("15", "slurm.job_preempted"), ("17", "slurm.job_cancelled"), ("22", "slurm.job_oom"),
            ("23", "slurm.job_oom"), ("4", "slurm.job_failed"), ("9", "slurm.job_node_fail"), ("1", "slurm.job_completed"),
        } <= by_job  # fmt: skip
        # 6 was killed for memory by another mechanism, which Slurm does not call out of memory.
        assert ("6", "slurm.job_oom") not in by_job
        assert next(e for e in found if e.job == "4").attrs["code"] == 93

    @pytest.mark.parametrize(
        ("name", "signature"),
        [
            ("job_CANCELLED", "slurm.job_cancelled"),
            ("job_COMPLETED", "slurm.job_completed"),
            ("job_FAILED_exit93", "slurm.job_failed"),
            ("job_FAILED_sigkill_137", "slurm.job_failed"),
            ("job_NODE_FAIL", "slurm.job_node_fail"),
            ("job_OUT_OF_MEMORY", "slurm.job_oom"),
            ("job_SPECIAL_EXIT", "slurm.held_after_requeues"),
            ("job_TIMEOUT", "slurm.job_time_limit"),
            ("job_REQUEUED_after_NODE_FAIL", "slurm.job_pending"),
            ("node_DOWN_not_responding", "slurm.node_down"),
            ("node_DRAINED", "slurm.node_drain"),
            ("node_DRAINING", "slurm.node_drain"),
            ("node_INVAL", "slurm.node_drain"),
        ],
    )
    def test_scontrol(self, name: str, signature: str) -> None:
        assert signature in signatures((samples() / f"scontrol_show_{name}.txt").read_text())

    def test_json_agrees_with_text(self) -> None:
        text = {
            (e.job, e.signature)
            for e in events((samples() / "sacct_D_parsable2.txt").read_text())
            if e.attrs.get("step") is None
        }
        found = {(e.job, e.signature) for e in events((samples() / "sacct_all_states.json").read_text())}
        ends = {"slurm.job_node_fail", "slurm.job_preempted", "slurm.job_time_limit", "slurm.job_completed"}
        assert {p for p in found if p[1] in ends} == {p for p in text if p[1] in ends}

    def test_queue_json_has_true_codes(self) -> None:
        found = {
            e.job: e.attrs.get("code")
            for e in events((samples() / "squeue.json").read_text())
            if e.signature == "slurm.job_failed"
        }
        assert found["4"] == 93
        assert found["5"] == 137

    def test_nodes_and_completions(self) -> None:
        assert signatures((samples() / "sinfo_node_INVALID_gres_mismatch.txt").read_text()) == ["slurm.node_drain"]
        assert signatures((samples() / "sinfo.json").read_text()) == []
        found = signatures((samples() / "jobcomp_filetxt.txt").read_text())
        assert {"slurm.job_node_fail", "slurm.job_time_limit", "slurm.job_failed"} <= set(found)

    def test_an_epilog_whose_job_was_well(self) -> None:
        assert signatures((samples() / "epilog_environment.txt").read_text()) == []


class TestParts:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("143:0", (143, 0)),
            (" 0:9 ", (0, 9)),
            (35072, (137, 0)),
            (9, (0, 9)),
            ("x", None),
            (None, None),
            (True, None),
            (-1, None),
        ],
    )
    def test_codes(self, text: object, code: tuple[int, int] | None) -> None:
        assert code_of(text) == code

    @pytest.mark.parametrize("text", ["", "C+", "NONSENSE", None, [], 7, "+"])
    def test_no_state(self, text: object) -> None:
        assert state_of(text) is None

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("2031-01-01T00:00:00Z", 1_924_992_000), ("2031-01-01T02:00:00+02:00", 1_924_992_000),
            ("Wed, 01 Jan 2031 00:00:00 +0000", 1_924_992_000), (1_924_992_000, 1_924_992_000),
            ("Unknown", None), (0, None), (True, None), ("2031-99-01T00:00:00", None), (1e300, None),
        ],
    )  # fmt: skip
    def test_times(self, text: object, seconds: int | None) -> None:
        assert moment(text)[0] == (None if seconds is None else seconds * 10**9)
