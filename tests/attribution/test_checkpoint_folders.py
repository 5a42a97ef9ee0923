"""Folders of checkpoints: left-overs under temporary names, trackers that point nowhere, clean-up that stumbles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.ckptnames import is_staging
from tests.attribution.jobtexts import conclusions, lines, signatures_of, verdict_of

STEPS = lines("[rank0]: step 2310 loss 1.9", "[rank0]: step 2320 loss 1.9")
LISTED = lines("$ ls /ckpt", "step-1500  step-2000", STEPS)
LEFT = "ckpt-scan: WARNING incomplete checkpoint: /ckpt/step-1500.tmp (no .metadata)"


@pytest.mark.parametrize(
    "name",
    [
        "tmp-checkpoint-1500",
        "/out/tmp-checkpoint-2000",
        "step-500.tmp",
        "/c/500.orbax-checkpoint-tmp-17",
        "gpt--step=6000-last-unfinished",
        ".tmp_step_4",
    ],
)
def test_names_of_checkpoints_in_the_making(name: str) -> None:
    assert is_staging(name)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-1500",
        "/tmp/ckpt/step-500",
        "/data/temp_runs1/x/step-5",
        "/ckpt.tmp/step-5",
        "template-5",
        "global_step_450",
    ],
)
def test_names_of_checkpoints_that_are_none_in_the_making(name: str) -> None:
    assert not is_staging(name)


def test_temporary_folders_beside_whole_ones_of_a_job_that_works_are_left_overs() -> None:
    verdict = verdict_of(lines(LEFT, LISTED))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(LEFT, LEFT.replace("1500.tmp", "2000"), LISTED),
        lines(LEFT.replace(".tmp", ""), LISTED),
        LEFT,
        lines(LEFT, STEPS),
        lines(LEFT, LISTED, "OSError: [Errno 28] No space left on device"),
        lines(LEFT, LISTED, "AssertionError: metadata is None"),
    ],
)
def test_an_unfinished_checkpoint_is_a_fault_by_any_other_sign(text: str) -> None:
    assert not verdict_of(text).no_current_fault


def test_an_unfinished_checkpoint_among_many_left_overs_is_seen() -> None:
    many = [LEFT.replace("1500", str(n)) for n in range(100, 140)]
    assert not verdict_of(lines(*many, LEFT.replace("1500.tmp", "2000"), LISTED)).no_current_fault


FRESH = "There were no checkpoints found in checkpoint_dir :/r/checkpoints. Training from scratch."
UNFINISHED = lines("$ ls /r/checkpoints", "gpt--step=6000-last-unfinished")


def test_starts_from_nothing_beside_a_save_that_was_cut_off_want_a_person() -> None:
    verdict = verdict_of(lines(FRESH, "step 10 loss 9.0", FRESH, UNFINISHED))
    assert (verdict.fault_class, verdict.action) == ("framework", "fail_fast")


@pytest.mark.parametrize("text", [lines(FRESH, UNFINISHED), lines(FRESH, FRESH)])
def test_a_first_start_and_an_empty_folder_are_no_fault_of_the_reader(text: str) -> None:
    assert "derived.ckpt.fresh_again" not in conclusions(text)


FULL = "OSError: [Errno 28] No space left on device"


def _tracker(step: int, *there: str, full: str = FULL) -> str:
    return lines(full, "$ cat /c/latest_checkpointed_iteration.txt", str(step), "$ ls /c", "  ".join(there))


def test_a_tracker_of_a_step_that_was_deleted_for_want_of_room_forbids_a_restart() -> None:
    verdict = verdict_of(_tracker(400, "global_step_450"))
    assert (verdict.fault_class, verdict.action) == ("storage", "fail_fast")


@pytest.mark.parametrize(
    "text",
    [
        _tracker(400, "global_step_400", "global_step_450"),
        _tracker(400, "global_step_350"),
        _tracker(400, "global_step_450", full="step 460 loss 2.0"),
    ],
)
def test_a_tracker_whose_step_is_there_or_that_nothing_failed_after_points_somewhere(text: str) -> None:
    assert "derived.ckpt.tracker_dangles" not in conclusions(text)


def test_a_listing_and_a_tracker_in_one_command_are_told_apart() -> None:
    found = signatures_of(lines("$ ls /c; cat latest_checkpointed_iteration.txt", "global_step_450", "400"))
    assert sorted(s for s in found if s.startswith("ckpt.")) == ["ckpt.listed", "ckpt.tracker"]


def _raised(path: str, name: str, error: str) -> str:
    return lines(
        "Traceback (most recent call last):",
        '  File "/home/u/exp/run.py", line 20, in main',
        "    trainer.save()",
        f'  File "{path}", line 680, in {name}',
        "    n = int(match.group(1))",
        error,
    )


DEFECT = "AttributeError: 'NoneType' object has no attribute 'group'"
TITAN = "/home/u/torchtitan/torchtitan/components/checkpoint.py"


def test_a_library_that_stumbles_while_it_clears_up_is_at_fault_itself() -> None:
    verdict = verdict_of(_raised(TITAN, "_purge_stale_checkpoints", DEFECT))
    assert (verdict.fault_class, verdict.action) == ("framework", "fail_fast")


@pytest.mark.parametrize(
    ("path", "name", "error"),
    [
        ("/home/u/exp/checkpoint.py", "purge_old", DEFECT),
        (TITAN, "save", DEFECT),
        (TITAN, "_purge_stale_checkpoints", "OSError: [Errno 5] Input/output error"),
    ],
)
def test_own_code_other_work_and_errors_of_storage_are_no_defect_of_retention(path: str, name: str, error: str) -> None:
    assert "derived.ckpt.retention_failed" not in conclusions(_raised(path, name, error))


@given(st.text(max_size=200))
def test_any_name_is_looked_at(name: str) -> None:
    assert is_staging(name) in (True, False)
