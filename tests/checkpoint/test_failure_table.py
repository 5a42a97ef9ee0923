"""The known ways in which saving and resuming went wrong in other systems, and the tests here that cause each of them.

The numbers are those of the project's list of failures, collected from issue trackers and from running other tools.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import msgspec
import pytest

TESTS = Path(__file__).parents[1]


class Row(msgspec.Struct, frozen=True):
    """A failure: `tests` are `package/module.py::test` below tests/, with the class between them where there is one."""

    number: int
    fault: str
    tests: tuple[str, ...]


def row(number: int, fault: str, *tests: str) -> Row:
    """A row; modules are in tests/checkpoint unless another folder is named."""
    return Row(number, fault, tuple(test if "/" in test else f"checkpoint/{test}" for test in tests))


ROWS = (
    row(
        1,
        "an error in a helper of the writer is lost, and the save counts",
        "test_failure_rows.py::test_row_01_and_02_an_error_in_the_helper_is_this_saves_and_not_the_nexts",
        "test_failure_rows.py::test_row_01_a_full_disk_in_the_helper",
        "test_writer_and_keys.py::test_error_on_the_hashing_thread_surfaces",
        "launcher/test_faults.py::test_storage_that_fails_or_stalls_costs_a_save_not_the_job",
    ),
    row(
        2,
        "replies of overlapping saves are crossed",
        "test_failure_rows.py::test_row_02_saves_in_flight_at_the_same_time_keep_their_own_outcomes",
        "test_writer_process.py::test_answer_to_a_request_that_was_given_up_is_dropped",
        "test_writer_process.py::test_two_clients_never_get_each_others_answers",
    ),
    row(
        3,
        "once the writer process is dead, every later save fails",
        "test_failure_rows.py::test_row_03_a_killed_writer_process_costs_at_most_one_save",
        "test_writer_process.py::test_process_killed_in_a_write_fails_that_save_only",
        "test_writer_process.py::test_process_that_died_between_saves_is_not_even_noticed",
    ),
    row(
        4,
        "old shards under a new index, or the other way round, load silently",
        "test_failure_rows.py::test_row_04_shards_of_another_attempt_never_mix",
        "test_save_failures.py::test_older_try_of_the_same_save_is_left_alone",
        "test_manifest.py::test_manifest_copied_from_another_checkpoint_is_refused",
        "test_crash_points.py::test_a_dozen_ends_of_a_save",
        "test_crash_points.py::test_every_end_of_a_save",
    ),
    row(
        5,
        "a flipped bit loads silently",
        "test_restore_faults.py::test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded",
        "test_damage.py::test_flipped_bit_is_placed",
        "test_damage.py::test_exactly_the_changed_blocks_are_named",
    ),
    row(
        6,
        "a zeroed range, or an empty file after a power cut, loads silently",
        "test_restore_faults.py::test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded",
        "test_crash_points.py::test_every_end_of_a_save",
    ),
    row(
        7,
        "a truncated shard: the job crashes at it again and again",
        "test_restore_faults.py::test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded",
        "test_posix_root.py::test_file_that_was_cut_after_it_was_opened",
    ),
    row(
        8,
        "a missing shard or index: the same",
        "test_restore_faults.py::test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded",
        "test_restore_faults.py::test_unfinished_saves_are_passed_over",
        "test_object_root.py::test_lost_and_damaged_objects_are_found",
    ),
    row(
        9,
        "weights that change while they are staged tear the checkpoint",
        "test_failure_rows.py::test_row_09_what_changes_right_after_save_returns_is_not_in_the_checkpoint",
        "test_staging.py::test_weights_may_change_as_soon_as_save_returns",
        "test_save_failures.py::test_staging_buffer_is_not_touched_while_a_save_is_in_flight",
    ),
    row(
        10,
        "a staging buffer is used again while it is still being written",
        "test_failure_rows.py::test_row_10_a_staging_buffer_that_is_reused_too_early_fails_the_save",
        "test_failure_store.py::test_row_10_a_buffer_that_is_reused_during_an_upload_fails_the_save",
        "test_write_engine.py::test_buffer_that_changes_during_the_write_fails_the_save",
    ),
    row(
        11,
        "staged copies leak until there is no memory",
        "test_failure_rows.py::test_row_11_memory_stays_flat_over_many_saves",
        "test_writer_process.py::test_fifty_saves_leave_nothing_behind",
    ),
    row(
        12,
        "the first save takes more memory than the host has",
        "test_staging.py::test_an_image_that_does_not_fit_is_written_block_by_block",
        "test_staging.py::test_an_object_root_refuses_what_cannot_be_staged_with_the_numbers",
        "test_staging.py::test_the_tightest_cgroup_above_this_process_counts",
    ),
    row(
        13,
        "a save in the background and the training share a process group",
        "test_failure_ranks.py::test_row_13_saves_cross_collectives_of_the_training_and_need_no_group",
        "test_backends.py::test_save_and_restore",
    ),
    row(
        14,
        "too many open files, or no port, for the writer process",
        "test_failure_rows.py::test_row_14_five_thousand_tensors_with_few_descriptors",
        "test_writer_process.py::test_thousands_of_open_files_do_not_matter_and_none_is_inherited",
    ),
    row(
        15,
        "a save of the life before a restart finishes into the next one",
        "test_failure_ranks.py::test_row_15_the_save_of_a_cycle_that_is_over_cannot_commit",
        "test_save_failures.py::test_commit_needs_the_grant",
        "test_round_trip.py::test_nothing_is_committed_once_the_lease_has_run_out",
    ),
    row(
        16,
        "the newest is announced and older ones deleted before it is durable",
        "test_prune.py::test_row_16_killed_between_dispatch_and_commit_the_old_one_survives",
        "test_crash_points.py::test_every_end_of_a_save",
    ),
    row(
        17,
        "with one to keep, the only good one is deleted before the new one is written",
        "test_prune.py::test_row_17_a_full_disk_with_one_to_keep_leaves_that_one",
    ),
    row(
        18,
        "torn checkpoints count among the last to keep",
        "test_prune.py::test_row_18_torn_folders_are_not_among_the_last",
        "test_retention.py::test_a_torn_checkpoint_never_takes_the_place_of_a_good_one",
    ),
    row(
        19,
        "a copy loses its marker, and the good checkpoint is deleted as unfinished",
        "test_prune.py::test_row_19_a_copy_that_lost_its_marker_is_reported_and_kept",
        "test_prune.py::test_killed_before_every_call_nothing_half_deleted_is_a_candidate",
    ),
    row(
        20,
        "a save that failed in the background is still taken for the latest",
        "test_prune.py::test_row_20_a_save_that_failed_later_is_not_the_latest",
    ),
    row(
        21,
        "one rank fails: the others publish, or hang",
        "test_failure_ranks.py::test_row_21_one_rank_fails_and_nobody_waits_for_a_third_that_never_reports",
        "test_save_failures.py::test_one_rank_that_fails_is_known_to_all_and_nothing_is_committed",
        "test_save_failures.py::test_rank_that_is_gone_fails_the_save_in_bounded_time",
    ),
    row(
        22,
        "the storage of one rank stalls, and the job is killed",
        "test_failure_ranks.py::test_row_22_storage_that_stalls_for_one_rank_costs_a_save_and_training_goes_on",
        "test_writer_process.py::test_stalled_write_is_given_up_at_its_deadline",
        "launcher/test_faults.py::test_storage_that_fails_or_stalls_costs_a_save_not_the_job",
    ),
    row(
        23,
        "one failed save ends the training, or none ever does",
        "test_failure_ranks.py::test_row_23_failures_are_outlived_until_there_are_too_many_in_a_row",
        "test_save_failures.py::test_failures_in_a_row_end_the_training_clearly",
        "launcher/test_faults.py::test_full_disk_during_a_save_costs_the_save_not_the_job",
    ),
    row(
        24,
        "planning through one rank takes for ever among thousands",
        "test_failure_rows.py::test_row_24_one_ranks_plan_costs_the_same_among_4096_ranks",
        "test_staging.py::test_the_split_is_planned_once_until_the_structure_changes",
    ),
    row(
        25,
        "the store answers 503 SlowDown",
        "test_failure_store.py::test_row_25_two_ranks_save_and_restore_while_the_store_throttles",
        "test_failure_store.py::test_row_25_throttled_for_too_long_the_save_fails_and_the_next_one_works",
        "test_failure_store.py::test_row_25_server_killed_in_the_middle_of_an_upload",
        "test_failure_store.py::test_a_rank_killed_at_every_write_of_a_save_leaves_the_old_step_or_the_new_one",
        "test_object_root.py::test_keys_of_one_save_spread_over_prefixes",
        "test_object_root.py::test_passing_failures_are_ridden_out",
    ),
    row(
        26,
        "the loader's place is lost at an epoch's end or in its middle",
        "resume/test_resume.py::test_everything_at_once",
        "resume/test_resume.py::test_epoch_boundary",
        "trainer/test_loader.py::test_any_chain_of_lives_uses_the_stream_of_one_life",
    ),
    row(
        27,
        "the second resume in one epoch shifts the data",
        "resume/test_resume.py::test_several_resumes_in_one_epoch",
    ),
    row(
        28,
        "on fewer ranks the state of the others is dropped silently",
        "resume/test_resume.py::test_another_number_of_ranks",
        "resume/test_resume.py::test_four_ranks_to_two_and_back",
        "resume/test_resume.py::test_state_of_single_ranks_is_never_dropped",
        "test_restore_faults.py::test_other_number_of_ranks_is_refused_not_dropped",
    ),
    row(
        29,
        "the model is of one step and the loader of another",
        "resume/test_resume.py::test_everything_at_once",
    ),
    row(
        30,
        "after a recovery the loader is a batch behind the model",
        "resume/test_resume.py::test_the_loader_goes_back_with_the_rest",
        "trainer/test_run.py::TestRollback::test_decisions_of_the_replay_are_new_and_shared",
    ),
    row(
        31,
        "random state is missing, rank 0's everywhere, or seeded anew",
        "resume/test_resume.py::test_one_part_that_is_not_loaded_shows",
        "resume/test_resume.py::test_everything_on_four_ranks",
        "test_round_trip.py::test_training_goes_on_bit_for_bit",
        "test_restore_faults.py::test_missing_random_state_is_refused",
    ),
    row(
        32,
        "the emergency save never happens",
        "resume/test_resume.py::test_sigterm_saves_also_with_workers",
        "launcher/test_faults.py::test_sigterm_saves_at_once_and_the_same_run_id_goes_on_from_there",
        "trainer/test_loader.py::test_a_worker_outlives_everybodys_sigterm_but_its_parents",
    ),
    row(
        33,
        "a value that the format cannot hold: the save succeeds, the file cannot be read",
        "test_failure_rows.py::test_row_33_what_could_not_be_read_back_is_refused_at_save_time",
        "test_round_trip.py::test_what_cannot_be_saved_is_named",
        "test_values.py::test_anything_else_is_refused_by_path",
    ),
    row(
        34,
        "code planted in a checkpoint runs at resume",
        "test_restore_faults.py::test_damaged_checkpoint_is_quarantined_and_the_older_one_loaded",
        "test_dcp_import.py::test_payload_in_metadata_is_refused",
        "test_dcp_import.py::test_payload_in_a_value_is_refused",
        "test_dcp_import.py::test_payload_in_a_tensor_is_refused",
        "test_dcp_plugin.py::test_nothing_on_disk_is_a_pickle",
    ),
    row(
        35,
        "an older checkpoint with a valid signature is put back",
        "test_rollback_restores.py::test_an_old_copy_of_the_root_is_not_taken_for_the_root",
        "test_rollback_restores.py::test_a_deleted_newest_checkpoint_is_missed_until_somebody_answers_for_it",
        "test_rollback.py::test_what_disappears_is_missed_until_it_is_permitted_once",
    ),
)


@cache
def names_in(module: str) -> frozenset[str]:
    """The tests that `module`, a path below tests/, defines."""
    found = set()
    for node in ast.parse((TESTS / module).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_failure_is_there() -> None:
    assert [row.number for row in ROWS] == list(range(1, 36))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row {row.number}")
def test_its_tests_exist(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        module, _, name = test.partition("::")
        assert name in names_in(module), f"{row.number} ({row.fault}): {test} is gone"


def test_tests_named_after_a_row_are_listed_in_it() -> None:
    listed = {(row.number, test) for row in ROWS for test in row.tests}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = f"checkpoint/{path.name}"
        for name in names_in(module):
            if name.startswith("test_row_"):
                assert (int(name[9:11]), f"{module}::{name}") in listed, f"{name} is not in the table"
