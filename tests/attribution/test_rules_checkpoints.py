"""Rules about checkpoints: each says what it says only where it should."""

from __future__ import annotations

import pytest

from keepstep.attribution.rules import checkpoints as rules
from keepstep.records.event import Event
from tests.attribution.ruling import conclusion, event, steps, told


class TestWhatIsDurable:
    def test_storage_that_failed_some_and_stalled_others(self) -> None:
        wait = event("torch.watchdog_timeout", 600)
        assert conclusion(rules.storage_first, event("storage.throttled", 1, rank=3), wait).node is None
        assert not told(rules.storage_first, wait, event("storage.throttled", 700))
        assert not told(rules.storage_first, event("storage.throttled", 1))

    @pytest.mark.parametrize("end", ["slurm.job_time_limit", "slurm.job_preempted", "exit.sigkill", "k8s.oom_killed"])
    def test_a_writer_that_was_killed(self, end: str) -> None:
        found = conclusion(rules.torn_by_kill, event(end, 1), event("ckpt.torn_file", 100))
        assert set(found.attrs["explains"]) == {end, "ckpt.torn_file"}
        assert not told(rules.torn_by_kill, event("ckpt.torn_file", 100), event(end, 200))

    def test_a_part_that_is_missing_counts_as_unreadable(self) -> None:
        text = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
        piece = event("ckpt.part_missing", 9, text=text.format("/out/global_step900/mp_rank_00_model_states.pt"))
        other = event("python.file_missing", 9, text=text.format("/data/train.bin"))
        assert told(rules.torn_by_kill, event("slurm.job_preempted", 1), piece)
        assert not told(rules.torn_by_kill, event("slurm.job_preempted", 1), other)

    def test_a_report_that_was_wrong(self) -> None:
        bad = event("ckpt.part_missing", 9, text="No such file: '/c/step_4000/__3_1.distcp'")
        assert told(rules.reported_good, event("ckpt.committed", 1, step="4000"), bad)
        assert not told(rules.reported_good, event("ckpt.committed", 1, step="3000"), bad)

    def test_announced_is_not_committed(self) -> None:
        found = conclusion(
            rules.announced_only, event("ckpt.announced", 1, step="5000"), event("ckpt.tracker", 2, step="4000")
        )
        assert (found.attrs["announced"], found.attrs["committed"]) == (5000, 4000)
        assert not told(
            rules.announced_only, event("ckpt.announced", 1, step="4000"), event("ckpt.tracker", 2, step="4000")
        )

    def test_called_complete_too_early(self) -> None:
        done, writing = event("ckpt.tracker", 1, step="110"), event("ckpt.still_writing", 2, step="0000110")
        assert told(rules.finalised_early, done, writing)
        assert not told(rules.finalised_early, event("ckpt.still_writing", 0, step="110"), done)
        assert not told(rules.finalised_early, done, event("ckpt.still_writing", 2, step="120"))

    def test_a_writer_that_should_be_dead(self) -> None:
        late = event("ckpt.late_writer", 9, attempt="3", step="31000")
        assert conclusion(rules.two_writers, event("ckpt.attempt", 5, attempt="4"), late).attrs["attempt"] == 3
        assert not told(rules.two_writers, late, event("ckpt.attempt", 12, attempt="4"))
        assert not told(rules.two_writers, event("ckpt.attempt", 5, attempt="2"), late)

    def test_deleted_before_the_next_was_complete(self) -> None:
        pruned, torn = event("ckpt.pruned", 5, step="100"), event("ckpt.no_metadata", 9)
        assert told(rules.pruned_too_early, pruned, torn)
        assert not told(rules.pruned_too_early, event("ckpt.committed", 4, step="200"), pruned, torn)
        assert not told(rules.pruned_too_early, pruned)

    def test_a_save_that_failed_unnoticed(self) -> None:
        saved, failed = event("ckpt.announced", 1, step="4000"), event("ckpt.commit_barrier", 600)
        missing = event("ckpt.part_missing", 3600, text="No such file or directory: '/mnt/ckpt/4000'")
        assert conclusion(rules.believed_saved, saved, failed, missing).attrs["explains"] == [
            "ckpt.part_missing",
            "python.file_missing",
        ]
        assert not told(rules.believed_saved, saved, missing)

    def test_a_save_that_came_good(self) -> None:
        failed, done = event("ckpt.save_failed", 1), event("ckpt.committed", 9, step="500")
        assert told(rules.save_recovered, failed, done)
        assert not told(rules.save_recovered, failed, done, event("ckpt.save_failed", 20))
        assert not told(rules.save_recovered, done)

    def test_a_save_that_outlasts_the_patience_of_the_others(self) -> None:
        save = event("ckpt.save_took", 1, seconds="712")
        assert told(rules.save_outlasts, save, event("torch.watchdog_timeout", 9, timeout_ms="600000"))
        assert not told(rules.save_outlasts, save, event("torch.watchdog_timeout", 9, timeout_ms="1800000"))
        assert not told(rules.save_outlasts, save)

    def test_ranks_that_wait_for_others_in_a_checkpoint(self) -> None:
        work, wait = event("ckpt.at_work", 1), event("torch.watchdog_timeout", 900)
        assert told(rules.stalled_in_checkpoint, work, wait)
        assert not told(rules.stalled_in_checkpoint, work)
        assert not told(rules.stalled_in_checkpoint, work, wait, event("storage.throttled", 2))
        assert not told(rules.stalled_in_checkpoint, wait, event("ckpt.at_work", 901))


class TestResume:
    @pytest.mark.parametrize("there", ["ckpt.listed", "ckpt.tracker", "ckpt.committed"])
    def test_from_nothing_over_existing_ones(self, there: str) -> None:
        found = conclusion(rules.fresh_over_existing, event(there, 1, step="400"), event("ckpt.fresh_start", 9))
        assert found.attrs["newest"] == 400

    def test_a_first_start_is_one(self) -> None:
        assert not told(rules.fresh_over_existing, event("ckpt.fresh_start", 1))
        assert not told(rules.fresh_over_existing, event("ckpt.fresh_start", 1), event("ckpt.committed", 9, step="400"))

    def ranks(self, *pairs: tuple[str, str]) -> list[Event]:
        return [event("ckpt.state_compare", n, rank=n, saved=a, restored=b) for n, (a, b) in enumerate(pairs)]

    def test_state_of_ranks(self) -> None:
        found = conclusion(rules.state_differs, *self.ranks(("a", "a"), ("b", "a"), ("c", "a")))
        assert (found.attrs["ranks"], found.attrs["of"], found.attrs["one_copy"], found.rank) == (2, 3, True, None)
        assert not told(rules.state_differs, *self.ranks(("A0", "a0"), ("b", "b")))

    def test_what_was_staged_and_what_is_on_disk(self) -> None:
        assert told(rules.state_differs, event("ckpt.staged_compare", 1, saved="5C02", restored="77e1"))
        assert not told(rules.state_differs, event("ckpt.staged_compare", 1, saved="5C02", restored="5c02"))

    def test_positions(self) -> None:
        assert told(rules.state_differs, event("ckpt.position", 1, name="iter", got="5", expected="20"))
        assert not told(rules.state_differs, event("ckpt.position", 1, name="iter", got="5", expected="5"))

    @pytest.mark.parametrize(
        ("before", "after", "text", "differs"),
        [
            ("8.1e-05", "3.0e-04", "lr: before 8.1e-05, after resume 3.0e-04", True),
            ("1", "1.0", "lr before 1 after 1.0", False),
            ("2.1", "2.0", "loss before 2.1 after 2.0", False),
            ("1.2.3", "4", "version before 1.2.3 after 4", False),
        ],
    )
    def test_values(self, before: str, after: str, text: str, differs: bool) -> None:
        one = event("ckpt.value_compare", 1, before=before, after=after, text=text)
        assert told(rules.value_differs, one) == (["derived.ckpt.value_differs"] if differs else [])

    def test_ranks_that_restored_another_position(self) -> None:
        def restored(rank: int, value: str, second: float = 1) -> Event:
            return event("ckpt.rank_restored", second, rank=rank, what="epoch", value=value)

        assert told(rules.state_differs, restored(0, "3"), restored(1, "0")) == ["derived.ckpt.state_differs"]
        assert not told(rules.state_differs, restored(0, "3"), restored(1, "3"))
        assert not told(rules.state_differs, restored(0, "3"), restored(1, "3"), restored(0, "5", 9))  # a later attempt

    def test_state_dicts(self) -> None:
        loaded = event("ckpt.state_dict_loaded", 1, state="{'n': 100}")
        assert told(rules.value_differs, loaded, event("ckpt.state_dict_now", 2, state="{'n': 0}"))
        assert not told(rules.value_differs, loaded, event("ckpt.state_dict_now", 2, state="{'n':100}"))

    def test_epochs(self) -> None:
        def epochs(*counts: int) -> list[Event]:
            return [event("ckpt.epoch_length", n, epoch=str(n), count=str(c)) for n, c in enumerate(counts)]

        resumed = event("ckpt.resumed", 0.5, step="61")
        assert told(rules.epochs_shrank, resumed, *epochs(64, 3, 3))
        assert not told(rules.epochs_shrank, resumed, *epochs(64, 3, 64))  # the rest of the one that was interrupted
        assert not told(rules.epochs_shrank, *epochs(64, 3, 3))

    def test_parts_of_several_steps(self) -> None:
        text = "resume: model step=500, optimizer step=500, dataloader step={}"
        assert told(rules.mixed_steps, event("ckpt.component_steps", 1, text=text.format(501)))
        assert not told(rules.mixed_steps, event("ckpt.component_steps", 1, text=text.format(500)))

    def test_memory_that_grows(self) -> None:
        def saves(*amounts: float) -> list[Event]:
            return [
                event("ckpt.memory_at_save", n, step=str(n), amount=str(a), unit="GiB") for n, a in enumerate(amounts)
            ]

        assert told(rules.memory_grows, *saves(200, 390, 570, 750))
        assert not told(rules.memory_grows, *saves(200, 390))
        assert not told(rules.memory_grows, *saves(200, 390, 391, 392))


class TestNothingDone:
    STORY = (
        event("ckpt.resumed", 1, step="60"),
        event("ckpt.zero_progress", 2, step="60", total="120"),
        event("job.finished_rank", 3),
    )

    def test_a_run_that_ends_well_without_a_step(self) -> None:
        assert told(rules.nothing_done, *self.STORY) == ["derived.ckpt.nothing_done"]

    def test_not_when_steps_were_made(self) -> None:
        assert not told(rules.nothing_done, *self.STORY[:2], steps(2.5, 2.9, last_step=119), self.STORY[2])

    def test_not_when_all_was_done_before(self) -> None:
        assert not told(
            rules.nothing_done, self.STORY[0], event("ckpt.zero_progress", 2, step="120", total="120"), self.STORY[2]
        )

    def test_not_while_it_runs(self) -> None:
        assert not told(rules.nothing_done, *self.STORY[:2])

    def test_a_failure_is_another_story(self) -> None:
        assert not told(rules.nothing_done, *self.STORY[:2], event("ckpt.exit_status", 3, code=1))
