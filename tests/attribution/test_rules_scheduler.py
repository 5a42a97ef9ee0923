"""Rules about schedulers: each says what it says only where it should."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keepstep.attribution.rules import scheduler as rules
from keepstep.attribution.rules.checkpoints import CHECKPOINT_RULES
from keepstep.records.event import Event
from tests.attribution.ruling import catalog, conclusion, event, steps, told


class TestWhoEndedTheJob:
    def test_errors_after_the_end_are_its_effects(self) -> None:
        found = conclusion(
            rules.ended_by_scheduler, event("slurm.job_preempted", 10), event("python.user_exception", 12)
        )
        assert found.attrs["explains"] == ["python.user_exception"]

    def test_an_error_before_the_end_is_not(self) -> None:
        assert not told(rules.ended_by_scheduler, event("python.user_exception", 5), event("slurm.job_preempted", 10))

    def test_an_error_that_the_job_survived_does_not_count(self) -> None:
        story = [
            event("python.user_exception", 1),
            steps(2, 9),
            event("slurm.job_time_limit", 10),
            event("python.user_exception", 11),
        ]
        assert told(rules.ended_by_scheduler, *story) == ["derived.sched.ended"]

    def test_peers_of_a_lost_node_fail_before_the_scheduler_knows(self) -> None:
        story = [event("python.user_runtime_error", 5), event("slurm.job_node_fail", 300)]
        assert not told(rules.ended_by_scheduler, *story)  # nothing after the end to be explained
        story.append(event("python.user_exception", 301))
        assert told(rules.ended_by_scheduler, *story) == ["derived.sched.ended"]
        machine = event("nvrm.fallen_off_bus", 4)
        assert not told(rules.ended_by_scheduler, machine, *story)

    def test_memory_and_checkpoints_are_no_dying_words(self) -> None:
        end = event("slurm.job_preempted", 10)
        assert not told(rules.ended_by_scheduler, end, event("k8s.oom_killed", 11), event("ckpt.torn_file", 12))

    def test_words_that_hint_are_no_record(self) -> None:
        assert not told(rules.ended_by_scheduler, event("sched.taken_away", 10), event("python.user_exception", 12))

    def test_a_conclusion_about_a_checkpoint_comes_first(self) -> None:
        story = [
            event("slurm.job_preempted", 10),
            event("derived.ckpt.torn_by_kill", 10),
            event("python.user_exception", 12),
        ]
        assert not told(rules.ended_by_scheduler, *story)

    def test_a_hang_until_the_limit(self) -> None:
        wait, limit = event("torch.watchdog_timeout", 100), event("slurm.job_time_limit", 4000)
        assert told(rules.hung_until_limit, wait, limit) == ["derived.sched.hung_until_limit"]
        assert not told(rules.hung_until_limit, wait, steps(200, 3990), limit)
        assert not told(rules.hung_until_limit, limit, event("torch.watchdog_timeout", 4001))


class TestCancelled:
    def test_a_wish(self) -> None:
        found = conclusion(
            rules.cancelled, event("slurm.job_cancelled", 10, uid="5"), event("torch.watchdog_terminated", 11)
        )
        assert found.attrs["explains"] == ["torch.watchdog_terminated"]
        assert found.attrs["uid"] == "5"

    @pytest.mark.parametrize("before", ["torch.watchdog_timeout", "python.user_exception", "slurm.job_failed"])
    def test_not_where_something_was_wrong_before(self, before: str) -> None:
        assert not told(rules.cancelled, event(before, 5), event("slurm.job_cancelled", 10))

    def test_not_where_the_order_is_not_known(self) -> None:
        story = [event("python.user_exception", path="b.log"), event("slurm.job_cancelled", 10)]
        assert not told(rules.cancelled, *story)

    def test_not_beside_another_end(self) -> None:
        assert not told(rules.cancelled, event("slurm.job_cancelled", 10), event("slurm.job_time_limit", 9))


class TestOutOfSight:
    def test_steps_after_it(self) -> None:
        assert told(rules.blip, event("k8s.node_not_ready", 5, node="n"), steps(1, 60)) == ["derived.sched.blip"]

    def test_no_steps_after_it(self) -> None:
        assert not told(rules.blip, event("k8s.node_not_ready", 50, node="n"), steps(1, 49))

    def test_files_without_common_times_need_the_node_back(self) -> None:
        lost = event("k8s.node_not_ready", None, path="b", node="n")
        assert not told(rules.blip, lost, steps(1, 60))
        assert told(rules.blip, lost, event("k8s.node_ready", None, path="c", node="n"), steps(1, 60)) == [
            "derived.sched.blip"
        ]

    def test_not_where_the_job_failed(self) -> None:
        assert not told(
            rules.blip, event("k8s.node_not_ready", 5, node="n"), steps(1, 60), event("slurm.job_failed", 70)
        )


class TestAttempts:
    def test_a_later_row_is_what_counts(self) -> None:
        story = [event("slurm.job_preempted", 1, job="7", line=1), event("slurm.job_completed", 9, job="7", line=2)]
        assert told(rules.done_since, *story) == ["derived.sched.done_since"]
        assert not told(rules.done_since, story[0], event("slurm.job_completed", 9, job="8", line=2))
        assert not told(
            rules.done_since,
            event("slurm.job_completed", 1, job="7", line=1),
            event("slurm.job_preempted", 9, job="7", line=2),
        )

    def test_one_node_under_many_jobs(self) -> None:
        fails = [event("slurm.job_node_fail", n * 100, node="n13", job=str(n), line=n) for n in range(3)]
        found = conclusion(rules.lemon, *fails)
        assert (found.node, found.attrs["times"]) == ("n13", 3)
        assert not told(rules.lemon, *fails[:2])
        assert not told(rules.lemon, *fails, event("slurm.job_node_fail", 5, node="n14", job="9", line=9))

    def test_many_pods_at_once(self) -> None:
        pods = [
            event("k8s.taint_eviction", 5, text=f"TaintManagerEviction pod/w-{n} Marking for deletion Pod ns/w-{n}")
            for n in range(3)
        ]
        assert conclusion(rules.mass_eviction, *pods).attrs["pods"] == 3
        assert not told(rules.mass_eviction, *pods[:2])
        assert not told(rules.mass_eviction, *(pods[:1] * 5))


class TestMemory:
    GIB = 1 << 30

    def figures(self, **values: float) -> list[Event]:
        made = []
        for line, (key, value) in enumerate(values.items()):
            figures: dict[str, Any] = {key: int(value * self.GIB)}
            made.append(event("cgroup.memory", None, line=line, **figures))
        return made

    @pytest.mark.parametrize(
        ("values", "signature"),
        [
            ({"current": 128, "max": 128, "anon": 20, "file": 106}, "derived.sched.cache_counted"),
            ({"current": 128, "max": 128, "anon": 127, "file": 1}, "derived.sched.limit_reached"),
            ({"current": 128, "max": 128, "anon": 20, "shmem": 100}, "derived.sched.limit_reached"),
            ({"current": 60, "max": 128, "anon": 20, "file": 40}, None),
            ({"current": 128, "max": 128, "anon": 105, "file": 20}, None),
            ({"current": 128, "max": 128, "file": 120}, None),
        ],
    )  # fmt: skip
    def test_what_is_counted(self, values: dict[str, float], signature: str | None) -> None:
        assert told(rules.memory_counted, *self.figures(**values)) == ([signature] if signature else [])

    def test_a_kill_by_the_kernel_is_no_wrong_counting(self) -> None:
        facts = [
            *self.figures(current=128, max=128, anon=20, file=100),
            event("cgroup.memory", None, line=9, oom_kill=1),
        ]
        assert not told(rules.memory_counted, *facts)

    def test_an_end_that_is_called_memory(self) -> None:
        claim = event("k8s.oom_killed", 5, code=143)
        assert told(rules.not_memory, claim) == ["derived.sched.not_memory"]
        claim = event("k8s.oom_killed", 5, code=137)
        assert not told(rules.not_memory, claim)
        assert told(rules.not_memory, claim, *self.figures(max=1024, anon=100)) == ["derived.sched.not_memory"]
        assert not told(rules.not_memory, claim, *self.figures(max=1024, anon=900))
        kernel = event("oom.cgroup", 4)
        assert not told(rules.not_memory, kernel, claim, *self.figures(max=1024, anon=100))

    def test_a_node_that_is_out_of_memory(self) -> None:
        assert told(rules.memory_of_node, event("oom.global", 5)) == ["derived.sched.node_memory"]
        assert not told(rules.memory_of_node, event("oom.global", 5), event("oom.cgroup", 5))
        assert not told(rules.memory_of_node, event("oom.global", 5), event("derived.outgrew_host", 5))

    def test_who_filled_it(self) -> None:
        job = event("oom.global", 5, task="python3", anon_rss_kb="9000", line=1)
        daemon = event("oom.global", 6, task="telemetryd", anon_rss_kb="890000", line=2)
        assert conclusion(rules.memory_of_node, job, daemon).attrs["task"] == "telemetryd"
        small = event("oom.global", 6, task="telemetryd", anon_rss_kb="9900", line=2)
        assert told(rules.memory_of_node, job, small) == ["derived.sched.node_memory"]


class TestNodes:
    def starts(self, count: int, node: str | None = "n5", signature: str = "slurm.launch_failed") -> list[Event]:
        return [event(signature, n, node=node, job=str(n), line=n) for n in range(count)]

    def test_every_start_fails_on_one_node(self) -> None:
        found = conclusion(rules.black_hole, *self.starts(2))
        assert (found.signature, found.node) == ("derived.sched.black_hole", "n5")

    def test_with_a_sign_of_its_storage(self) -> None:
        story = [*self.starts(2), event("fs.corrupt", 1, node="n5")]
        assert told(rules.black_hole, *story) == ["derived.sched.black_hole_storage"]

    def test_storage_of_another_node_is_not_it(self) -> None:
        story = [*self.starts(2), event("fs.corrupt", 1, node="n6")]
        assert told(rules.black_hole, *story) == ["derived.sched.black_hole"]

    def test_once_or_on_several_nodes_is_no_black_hole(self) -> None:
        assert not told(rules.black_hole, *self.starts(1))
        assert not told(rules.black_hole, *self.starts(2), *self.starts(2, node="n6"))
        assert not told(rules.black_hole, *self.starts(3, node=None))

    def test_what_is_missing_everywhere(self) -> None:
        assert not told(rules.black_hole, *self.starts(4, signature="k8s.image_missing"))

    def test_refusals_that_pass_need_more(self) -> None:
        assert not told(rules.black_hole, *self.starts(2, signature="k8s.admission_devices"))
        assert told(rules.black_hole, *self.starts(3, signature="k8s.admission_devices"))

    def test_a_drain_with_a_job_on_it(self) -> None:
        drain = event("slurm.node_drain", 1, node="w-7", busy=True, reason="fan")
        assert conclusion(rules.drain_waits, drain).node == "w-7"
        assert not told(rules.drain_waits, event("slurm.node_drain", 1, node="w-7", busy=False))
        assert not told(rules.drain_waits, drain, event("slurm.job_failed", 2))
        assert not told(rules.drain_waits, drain, event("nvrm.fallen_off_bus", 2, node="w-7"))

    def test_a_volume_that_is_mounted_so(self) -> None:
        error, setting = event("fs.read_only", 1), event("k8s.volume_read_only", None)
        assert told(rules.mounted_read_only, error, setting) == ["derived.sched.mounted_read_only"]
        assert not told(rules.mounted_read_only, error)
        assert not told(rules.mounted_read_only, error, setting, event("block.io_error", 0))


class TestManyEvents:
    def test_a_storm_takes_seconds_at_most(self) -> None:
        ids = sorted(entry.id for entry in catalog())
        story = [
            event(ids[n % len(ids)], n, line=n, node=f"n{n % 50}", job=str(n % 7), step=str(n)) for n in range(12_000)
        ]
        story += [steps(n, n + 5) for n in range(2000)]
        begin = time.process_time()
        for rule in (*rules.SCHEDULER_RULES, *CHECKPOINT_RULES):
            rule(story, catalog())
        assert time.process_time() - begin < 15
