"""Asking a cluster by its commands: what is run, what comes back, and what is said when nothing does. No cluster is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from keepstep.catalog.matcher import Matcher
from keepstep.records.errors import ConfigError
from keepstep.sources.live import commands
from keepstep.sources.live.commands import Answer, run, transcript
from keepstep.sources.live.kubernetes import kubernetes_transcript
from keepstep.sources.live.slurm import slurm_transcript
from keepstep.sources.reading import read_text
from tests.sources.scheduling import catalog


class Recorded:
    """Answers by the first words of a command; keeps what was asked."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> Answer:
        line = " ".join(command)
        self.asked.append(line)
        return next((a for words, a in self.answers.items() if line.startswith(words)), Answer("", f"{command[0]}: no"))


def signatures(text: str) -> set[str]:
    return {e.signature for e in read_text("live", text, catalog(), Matcher(catalog())).events}


class TestSlurm:
    ANSWERS: ClassVar = {
        "sacct": Answer("JobID|State|ExitCode|NodeList\n8|NODE_FAIL|0:0|n[3-4]\n8|PENDING|0:0|None assigned\n"),
        "scontrol show job": Answer("JobId=8 JobName=x\n   JobState=PENDING Reason=BeginTime\n   NodeList=n[3-4]\n"),
        "scontrol show node": Answer(
            "NodeName=n4 Arch=x86_64\n   State=DOWN+NOT_RESPONDING\n   Reason=Not responding [slurm@2031-01-01T00:00:00+0200]\n"
        ),
    }

    def test_a_job_with_its_nodes(self) -> None:
        runner = Recorded(self.ANSWERS)
        found = slurm_transcript("8", runner)
        assert runner.asked[0].startswith("sacct -D --parsable2 --format=JobID,")
        assert runner.asked[2] == "scontrol show node n[3-4]"
        assert found.notes == []
        assert {"slurm.job_node_fail", "slurm.job_pending", "slurm.node_down"} <= signatures(found.text)

    def test_without_accounting_the_rest_is_read(self) -> None:
        problem = Answer("", "sacct -j 8: exit 1: Slurm accounting storage is disabled")
        found = slurm_transcript("8", Recorded(self.ANSWERS | {"sacct": problem}))
        assert found.notes == [problem.problem]
        assert "slurm.node_down" in signatures(found.text)

    @pytest.mark.parametrize("job", ["", "8;rm", "-h", "8 9", "a", "8.0"])
    def test_only_job_ids(self, job: str) -> None:
        with pytest.raises(ConfigError, match="no Slurm job id"):
            slurm_transcript(job, Recorded({}))

    def test_nodes_are_asked_only_where_there_are_some(self) -> None:
        runner = Recorded(self.ANSWERS | {"scontrol show job": Answer("JobId=8\n   NodeList=(null)\n")})
        slurm_transcript("8", runner)
        assert len(runner.asked) == 2


class TestKubernetes:
    def test_pods_controllers_events_nodes(self) -> None:
        pod = {
            "kind": "Pod",
            "metadata": {"name": "w"},
            "spec": {"nodeName": "g-1"},
            "status": {"phase": "Failed", "reason": "NodeLost"},
        }
        node = {
            "kind": "Node",
            "metadata": {"name": "g-1"},
            "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
        }
        runner = Recorded(
            {
                "kubectl -n ml get pods": Answer(json.dumps({"kind": "List", "items": [pod]})),
                "kubectl -n ml get events": Answer(
                    "LAST SEEN   TYPE   REASON\n3m   Normal   TaintManagerEviction   pod/w\n"
                ),
                "kubectl get nodes": Answer(json.dumps({"kind": "List", "items": [node]})),
                "kubectl -n ml get workloads": Answer("", "the server doesn't have a resource type workloads"),
            }
        )
        found = kubernetes_transcript("ml", "jobset.sigs.k8s.io/jobset-name=big", runner)
        assert {"k8s.node_gone", "k8s.taint_eviction", "k8s.node_not_ready"} <= signatures(found.text)
        assert "kubectl get nodes g-1 -o json" in runner.asked
        assert any("workloads" in n for n in found.notes)

    @pytest.mark.parametrize(("namespace", "selector"), [("-A", "a=b"), ("ml", "--all"), ("ml", "a=b;x"), ("", "a=b")])
    def test_only_names(self, namespace: str, selector: str) -> None:
        with pytest.raises(ConfigError):
            kubernetes_transcript(namespace, selector, Recorded({}))

    def test_without_pods_nothing_else_is_asked(self) -> None:
        runner = Recorded({})
        assert kubernetes_transcript("ml", "a=b", runner).notes == ["kubectl: no"]
        assert len(runner.asked) == 1


class TestRunning:
    def script(self, folder: Path, text: str) -> str:
        path = folder / "tool"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_output_and_zone(self, tmp_path: Path) -> None:
        assert run([self.script(tmp_path, 'echo "$SLURM_TIME_FORMAT"')]) == Answer("%Y-%m-%dT%H:%M:%S%z\n")

    def test_a_failure_is_said_in_its_first_line(self, tmp_path: Path) -> None:
        answer = run([self.script(tmp_path, "echo one >&2; echo two >&2; exit 3")])
        assert answer.text == ""
        assert answer.problem.endswith("exit 3: one")

    def test_a_command_that_is_not_there(self) -> None:
        assert "not found" in run(["no-such-command-anywhere"]).problem

    def test_no_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commands, "TIMEOUT_S", 0.2)
        assert "no answer within" in run([self.script(tmp_path, "exec sleep 30")]).problem

    def test_output_is_cut(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commands, "SIZE_LIMIT", 10)
        assert len(run([self.script(tmp_path, "seq 1 1000")]).text) == 10

    def test_a_transcript_is_one_that_the_reader_takes_apart(self) -> None:
        found = transcript([["squeue", "-h", "-o", "%i %T"]], lambda _command: Answer("8 TIMEOUT\n"))
        assert found.text == "$ squeue -h -o '%i %T'\n8 TIMEOUT\n"
        assert "slurm.job_time_limit" in signatures(found.text)

    def test_the_environment_is_otherwise_kept(self, tmp_path: Path) -> None:
        assert run([self.script(tmp_path, 'echo "$HOME"')]).text.strip() == os.environ.get("HOME", "")
