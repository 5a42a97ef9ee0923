"""The parser of scheduler records on anything: it returns, and takes time and says things in line with its input."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.parse import parse
from tests.sources.scheduling import catalog, documents

SEEDS = (
    "JobID|State|ExitCode|NodeList\n8|NODE_FAIL|0:0|n[3-4]\n8.0|CANCELLED by 1|0:15|n[3-4]\n",
    "JobID    JobName   State ExitCode \n-------- --------- ------ -------- \n8   tok   OUT_OF_ME+    0:125 \n",
    "JobId=7 JobName=x\n   JobState=TIMEOUT Reason=TimeLimit ExitCode=0:9\n   NodeList=n[1-2]\n",
    "NodeName=n2 Arch=x86_64\n   State=ALLOCATED+DRAIN\n   Reason=fan [root@2031-01-01T00:00:00]\n",
    "REASON   USER   TIMESTAMP   NODELIST\nKill task failed   root   2031-01-25T15:12:23   n[1-2]\n",
    "SLURM_JOB_ID=25\nSLURM_JOB_EXIT_CODE=35072\n",
    '{"meta": {"plugin": {"type": "openapi/v0.0.40"}}, "jobs": [{"job_id": 1, "job_state": ["FAILED"], "exit_code": 35072}]}\n',
    '{"kind": "Pod", "status": {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}]}}\n',
    "status:\n  phase: Failed\n  containerStatuses:\n  - name: m\n    state: {terminated: {exitCode: 137, reason: Error}}\n---\n",
    "NAME  READY  STATUS  RESTARTS  AGE  NODE\nw-1  0/1  OOMKilled  3 (12s ago)  3m  g-2\n",
    "Name: t\nNode: n/1\nStatus: Running\n    Last State:  Terminated\n      Exit Code:  1\n    Restart Count:  4\n",
    "Capacity:\n  nvidia.com/gpu:  8\nAllocatable:\n  nvidia.com/gpu:  6\n",
    "memory.current 137\nmemory.stat: anon 21 / file 113\nmemory.events:\noom_kill 3\n",
    "global_step_200  global_step_400\n",
)
TITLES = (
    "",
    "ls ckpt",
    "cat x/memory.stat",
    "sinfo -h -o '%N %T %E'",
    "sacct -n -o JobID,State",
    "echo $?",
    "cat latest",
    "x'",
)
WORDS = st.sampled_from(
    ["|", "=", ":", "{", "}", "[", '"', "'", "- ", "\t", "  ", "&a", "*a", "!!x", "\x00", "\u2028", "9" * 40, "é"]
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Lines of real records in a strange order, some cut, some with marks inside."""
    lines = "".join(draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=3))).splitlines(keepends=True)
    chosen = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=14))
    done = []
    for line in chosen:
        at = draw(st.integers(0, len(line)))
        change = draw(st.sampled_from(("keep", "cut", "insert", "join")))
        inside = draw(WORDS) if change == "insert" else ""
        changed = line[:at] if change == "cut" else line[:at] + inside + line[at:]
        done.append(changed.rstrip("\n") if change == "join" else changed)
    return "".join(done)


def run(text: str, title: str) -> int:
    """How many events a text gives; all of them are whole."""
    count = 0
    for document in documents(text, title):
        for event in parse(document, catalog()) or []:
            assert event.signature in catalog()
            assert len(event.evidence.text) <= 2000
            assert event.time_ns is None or abs(event.time_ns) < 2**63
            count += 1
    return count


class TestAnything:
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(mutated(), st.sampled_from(TITLES))
    def test_records_that_are_broken(self, text: str, title: str) -> None:
        assert run(text, title) <= 600 * (text.count("\n") + 1)

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=300), st.sampled_from(TITLES))
    def test_any_text(self, text: str, title: str) -> None:
        run(text, title)

    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=300))
    def test_any_bytes(self, data: bytes) -> None:
        run(data.decode("utf-8", errors="surrogateescape"), "")


HARD = {
    "open braces": '{"kind": [',
    "braces in strings": '{"a": "}',
    "yaml heads": "status: x\nprose",
    "one yaml": "status:\n  a: b",
    "headers": "JOBID STATE NODELIST",
    "rows": "JobID|State|NodeList\n8|NODE_FAIL|n[1-500]",
    "host lists": "NODELIST STATE REASON\nn[1-500] down x",
    "assignments": "JobId=1 JobState=TIMEOUT " + "K=V " * 20,
    "fields": "Name: a\n    Last State:  Terminated\n      Exit Code:  1",
    "memory": "memory.stat: anon 1",
    "deep": "  " * 200 + "kind: x",
}


class TestTime:
    @pytest.mark.parametrize("name", HARD)
    def test_long_inputs_take_seconds_at_most(self, name: str) -> None:
        lines = (HARD[name] + "\n").splitlines() * 5000
        document = Document("input.log", "", tuple(Line(n, text, text) for n, text in enumerate(lines[:10_000], 1)))
        begin = time.process_time()
        parse(document, catalog())
        assert time.process_time() - begin < 8.0
