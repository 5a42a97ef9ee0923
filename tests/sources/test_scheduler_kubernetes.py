"""Objects, tables and descriptions of Kubernetes: why a pod went, how its containers ended, what a node offers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keepstep.sources.scheduler.objects import load_yaml
from tests.sources.scheduling import attrs, events, one, signatures

POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "w-3", "namespace": "t", "labels": {"jobset.sigs.k8s.io/jobset-name": "big"}},
    "spec": {"nodeName": "g-7"},
    "status": {"phase": "Failed"},
}


def pod(**status: Any) -> str:
    return json.dumps(POD | {"status": {"phase": "Failed", **status}})


def disrupted(reason: str, message: str = "", kind: str = "DisruptionTarget", state: str = "True") -> str:
    return pod(conditions=[{"type": kind, "status": state, "reason": reason, "message": message}])


def ended(**terminated: Any) -> str:
    return pod(containerStatuses=[{"name": "m", "restartCount": 2, "state": {"terminated": terminated}}])


class TestPods:
    @pytest.mark.parametrize(
        ("reason", "message", "signature"),
        [
            ("PreemptionByScheduler", "", "k8s.preempted"),
            ("EvictionByEvictionAPI", "", "k8s.evicted"),
            ("DeletionByTaintManager", "", "k8s.taint_eviction"),
            ("DeletionByPodGC", "", "k8s.node_gone"),
            ("TerminationByKubelet", "Pod was terminated in response to imminent node shutdown.", "k8s.node_shutdown"),
            ("TerminationByKubelet", "The node was low on resource: memory. Threshold", "k8s.node_pressure_memory"),
            ("TerminationByKubelet", "The node was low on resource: ephemeral-storage.", "k8s.node_pressure_disk"),
            ("TerminationByKubelet", "Pod ephemeral local storage usage exceeds the total limit", "k8s.own_disk_limit"),
            ("SomethingNew", "", "k8s.evicted"),
        ],
    )
    def test_who_took_it_away(self, reason: str, message: str, signature: str) -> None:
        event = one(disrupted(reason, message), signature)
        assert (event.node, event.job, event.attrs["pod"]) == ("g-7", "big", "w-3")

    def test_a_condition_of_another_type_and_one_that_is_false(self) -> None:
        assert "kueue.preempted" in signatures(disrupted("WorkloadEvictedDueToPreempted", kind="TerminationTarget"))
        assert signatures(disrupted("PreemptionByScheduler", state="False")) == ["k8s.pod_state"]

    def test_memory_only_where_it_is_named(self) -> None:
        assert "k8s.oom_killed" in signatures(ended(exitCode=137, reason="OOMKilled"))
        found = attrs(ended(exitCode=137, reason="Error", finishedAt="2031-01-01T00:00:00Z"), "k8s.container_exit")
        assert (found["code"], found["signal"], found["restarts"]) == (137, 9, 2)

    def test_the_warning_signal(self) -> None:
        assert "slurm.user_signal" in signatures(ended(exitCode=138, reason="Error"))

    def test_a_good_end_says_nothing(self) -> None:
        assert signatures(ended(exitCode=0, reason="Completed")) == ["k8s.pod_state"]

    def test_the_last_state_counts_too(self) -> None:
        text = pod(containerStatuses=[{"name": "m", "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}}])
        assert attrs(text, "k8s.container_exit")["earlier"] is True

    @pytest.mark.parametrize(
        ("waiting", "signature"),
        [
            ("ImagePullBackOff", "k8s.image_pull"), ("CreateContainerConfigError", "k8s.config_missing"),
            ("RunContainerError", "k8s.runtime_failed"), ("CrashLoopBackOff", "k8s.crash_loop"),
        ],
    )  # fmt: skip
    def test_why_it_does_not_start(self, waiting: str, signature: str) -> None:
        assert signature in signatures(
            pod(initContainerStatuses=[{"name": "i", "state": {"waiting": {"reason": waiting}}}])
        )

    @pytest.mark.parametrize(
        ("reason", "signature"),
        [
            ("UnexpectedAdmissionError", "k8s.admission_devices"), ("OutOfnvidia.com/gpu", "k8s.admission_devices"),
            ("NodeLost", "k8s.node_gone"), ("Evicted", "k8s.evicted"), ("DeadlineExceeded", "k8s.job_deadline"),
        ],
    )  # fmt: skip
    def test_reasons_of_the_pod_itself(self, reason: str, signature: str) -> None:
        assert signature in signatures(pod(reason=reason))

    def test_lists_and_pretty_print(self) -> None:
        text = json.dumps({"kind": "List", "items": [json.loads(disrupted("PreemptionByScheduler"))] * 2}, indent=2)
        found = [e for e in events(text) if e.signature == "k8s.preempted"]
        assert len(found) == 2
        assert all("PreemptionByScheduler" in e.evidence.text for e in found)


class TestYaml:
    EXCERPT = (
        "status:\n  phase: Failed\n  conditions:\n  - type: DisruptionTarget\n"
        '    status: "True"\n    reason: PreemptionByScheduler\n'
    )

    def test_an_excerpt_points_at_its_line(self) -> None:
        assert one(self.EXCERPT, "k8s.preempted").evidence.line == 6

    def test_several_documents_with_a_table_after_them(self) -> None:
        table = "LAST SEEN   TYPE     REASON   OBJECT   MESSAGE\n3m   Normal   Killing   pod/x   Stopping\n"
        assert signatures(f"{self.EXCERPT}---\n{self.EXCERPT}---\n{table}").count("k8s.preempted") == 2

    def test_a_text_that_breaks_off_is_read_as_far_as_it_goes(self) -> None:
        assert "k8s.preempted" in signatures(self.EXCERPT + "  containerStatuses: [{name: x, state: {term\n")

    def test_text_before_and_after(self) -> None:
        text = "some words: first\n$ kubectl get pod -o yaml\n" + self.EXCERPT + "Error from server: x\n"
        assert "k8s.preempted" in signatures(text)

    def test_words_stay_words(self) -> None:
        assert load_yaml("a: yes\nb: 2031-01-01\nc: 0o17\n")[0] == {"a": "yes", "b": "2031-01-01", "c": "0o17"}

    @pytest.mark.parametrize(
        "text",
        [
            "a: &x [1]\nb: [*x, *x]\n",
            "a: " + "[" * 5000 + "]" * 5000,
            "a: !!python/object/apply:os.system ['true']\n" * 3 + "&",
            "kind: " + "x" * (9 << 20),
        ],
        ids=["aliases", "depth", "tags", "size"],
    )
    def test_what_could_harm_is_refused(self, text: str) -> None:
        assert load_yaml(text)[0] is None

    def test_tags_run_nothing(self) -> None:
        assert load_yaml("a: !!python/object/apply:os.system ['true']\n")[0] == {"a": ["true"]}


class TestWorkloads:
    def test_only_what_is_true_now(self) -> None:
        status = {
            "conditions": [
                {"type": "Evicted", "status": "False", "reason": "QuotaReserved", "message": "Previously: Preempted"},
                {"type": "QuotaReserved", "status": "True"},
            ]
        }
        assert signatures(json.dumps({"kind": "Workload", "status": status})) == []

    @pytest.mark.parametrize(
        ("reason", "signature"), [("Preempted", "kueue.preempted"), ("PodsReadyTimeout", "kueue.evicted")]
    )
    def test_evictions(self, reason: str, signature: str) -> None:
        status = {"conditions": [{"type": "Evicted", "status": "True", "reason": reason}], "requeueState": {"count": 1}}
        found = attrs(json.dumps({"kind": "Workload", "metadata": {"name": "w"}, "status": status}), signature)
        assert found["requeues"] == "1"

    def test_nodes_that_the_queue_gave_up(self) -> None:
        text = json.dumps({"kind": "Workload", "status": {"unhealthyNodes": [{"name": "g-4"}]}})
        assert one(text, "k8s.node_not_ready").node == "g-4"

    def test_a_jobset(self) -> None:
        text = json.dumps(
            {
                "kind": "JobSet",
                "metadata": {"name": "j"},
                "spec": {"failurePolicy": {"maxRestarts": 3}},
                "status": {
                    "restarts": 3,
                    "conditions": [{"type": "Failed", "status": "True", "reason": "ReachedMaxRestarts"}],
                },
            }
        )
        assert attrs(text, "jobset.restarts")["most"] == 3
        assert one(text, "k8s.job_failed").job == "j"

    def test_a_job_that_a_disruption_ended(self) -> None:
        condition = {"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy",
                     "message": "Pod d/w-3 has condition DisruptionTarget matching FailJob rule at index 0"}  # fmt: skip
        assert "k8s.policy_disruption" in signatures(json.dumps({"kind": "Job", "status": {"conditions": [condition]}}))


class TestNodes:
    def test_conditions_taints_and_devices(self) -> None:
        node = {
            "kind": "Node",
            "metadata": {"name": "g-1"},
            "spec": {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]},
            "status": {
                "capacity": {"nvidia.com/gpu": "8"},
                "allocatable": {"nvidia.com/gpu": "7"},
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "MemoryPressure", "status": "True", "reason": "KubeletHasInsufficientMemory"},
                    {"type": "GPUUnhealthy", "status": "True", "lastTransitionTime": "2031-01-01T00:00:00Z",
                     "lastHeartbeatTime": "2031-01-02T00:00:00Z"},
                ],
            },
        }  # fmt: skip
        text = json.dumps(node)
        assert set(signatures(text)) == {
            "k8s.node_cordoned", "k8s.node_not_ready", "k8s.node_pressure", "k8s.node_condition", "k8s.node_gpus_missing"
        }  # fmt: skip
        assert {e.node for e in events(text)} == {"g-1"}
        gpu = next(e for e in events(text) if e.attrs.get("condition") == "GPUUnhealthy")
        assert (gpu.attrs["heartbeat"], gpu.time_ns) == ("2031-01-02T00:00:00Z", 1_924_992_000_000_000_000)
        missing = attrs(text, "k8s.node_gpus_missing")
        assert (missing["allocatable"], missing["capacity"]) == (7, 8)

    def test_a_description(self) -> None:
        text = (
            "Name:               tr-9\nTaints:             node.kubernetes.io/unreachable:NoSchedule\nConditions:\n"
            "  Type             Status    LastHeartbeatTime                 LastTransitionTime                Reason\n"
            "  Ready            Unknown   Mon, 07 Jul 2031 01:00:10 +0000   Mon, 07 Jul 2031 01:00:55 +0000   NodeStatusUnknown\n"
            "  DiskPressure     False     Mon, 07 Jul 2031 01:00:10 +0000   Mon, 07 Jul 2031 01:00:55 +0000   Fine   all well\n"
            "Capacity:\n  cpu:             96\n  nvidia.com/gpu:  8\nAllocatable:\n  cpu:             95\n  nvidia.com/gpu:  6\n"
        )
        found = signatures(text)
        assert found.count("k8s.node_not_ready") == 2
        assert found.count("k8s.node_condition") == 1
        assert attrs(text, "k8s.node_gpus_missing")["allocatable"] == 6

    def test_amounts_on_one_line(self) -> None:
        assert signatures("Capacity:    nvidia.com/gpu: 8\nAllocatable: nvidia.com/gpu: 7\n") == [
            "k8s.node_gpus_missing"
        ]
        assert signatures("Capacity:    nvidia.com/gpu: 8\nAllocatable: nvidia.com/gpu: 8\n") == []


class TestTables:
    def test_rows_of_pods_without_the_header(self) -> None:
        event = one("train  worker-3  0/1  OOMKilled  2 (5m ago)  3h  10.0.0.7  node-b  <none>\n", "k8s.oom_killed")
        assert (event.node, event.attrs["pod"], event.attrs["restarts"]) == ("node-b", "worker-3", 2)
        assert signatures("worker-3   1/1   Running   0   3h\nworker-4 was OOMKilled 2 times in 3h\n") == []

    def test_pods_with_where_they_are(self) -> None:
        text = (
            "NAMESPACE   NAME   READY   STATUS              RESTARTS       AGE   IP         NODE\n"
            "t           w-0    1/1     Running             0              3m    10.1.0.4   g-1\n"
            "t           w-1    0/1     OOMKilled           3 (12s ago)    3m    <none>     g-2\n"
        )
        assert [(e.signature, e.node) for e in events(text)] == [
            ("k8s.pod_state", "g-1"), ("k8s.pod_state", "g-2"), ("k8s.oom_killed", "g-2")
        ]  # fmt: skip
        assert attrs(text, "k8s.oom_killed")["restarts"] == 3

    def test_a_table_pasted_out_of_line(self) -> None:
        text = "NAME READY STATUS RESTARTS AGE\nw-1 0/1 Evicted 0 3m\n"
        assert signatures(text) == ["k8s.pod_state", "k8s.evicted"]

    def test_nodes(self) -> None:
        text = (
            "NAME   STATUS                        ROLES    AGE   VERSION\n"
            "g-88   NotReady,SchedulingDisabled   <none>   90d   v1.33.2\n"
        )
        assert [(e.signature, e.node) for e in events(text)] == [
            ("k8s.node_not_ready", "g-88"),
            ("k8s.node_cordoned", "g-88"),
        ]

    def test_prose_is_no_table(self) -> None:
        assert events("The status and reason are in the node table.\nNAME of the job\n") == []


class TestDescribe:
    def test_states_of_containers(self) -> None:
        text = (
            "Name:         t-2\nNode:         ip-10-2-7-44/10.2.7.44\nStatus:       Running\nContainers:\n  trainer:\n"
            "    State:          Waiting\n      Reason:       CrashLoopBackOff\n"
            "    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    1\n"
            "      Finished:     Mon, 03 Feb 2031 11:20:29 +0000\n    Restart Count:  4\n"
            "  side:\n    State:          Running\n"
        )
        found = {e.signature: e for e in events(text)}
        assert set(found) == {"k8s.pod_state", "k8s.crash_loop", "k8s.container_exit"}
        ended = found["k8s.container_exit"]
        assert (ended.node, ended.attrs["code"], ended.attrs["restarts"]) == ("ip-10-2-7-44", 1, 4)
        assert ended.time_quality == "exact"

    def test_the_pods_own_reason(self) -> None:
        text = "Name: a\nNode: n/1\nStatus: Failed\nReason: UnexpectedAdmissionError\nMessage: Allocate failed\n"
        assert attrs(text, "k8s.admission_devices")["message"] == "Allocate failed"
