"""Attacks on a root that a real job then restores from: what has gone is missed, and a person's word is the way on."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.checkpoint.support import flip_bit, restore_value, save_steps

from keepstep.checkpoint.format.layout import MARKER_SIGNED
from keepstep.cli.main import main
from keepstep.records.errors import RefuseToStartError

SHARD = "rank-00000-of-00001.safetensors"


def refusal(root: Path, cycle: int) -> str:
    (result,) = restore_value(root, cycle=cycle)
    assert isinstance(result, RefuseToStartError), result
    return str(result)


def follow(message: str, reason: str) -> None:
    """Type the command that the refusal names."""
    command = message[message.index("keepstep ckpt pin") :].partition("TEXT")[0]
    result = CliRunner().invoke(main, [*shlex.split(command)[1:], reason, "--yes", "-o", "name"])
    assert result.exit_code == 0, result.stderr


def test_a_deleted_newest_checkpoint_is_missed_until_somebody_answers_for_it(root: Path) -> None:
    *_, newest = save_steps(root, [10, 20, 30])
    shutil.rmtree(newest)
    message = refusal(root, 1)
    assert "step-00000020" in message and "has disappeared" in message
    follow(message, "disk was replaced")
    assert restore_value(root, cycle=1) == [(20, 20.0)]
    assert restore_value(root, cycle=2) == [(20, 20.0)]


def test_an_old_copy_of_the_root_is_not_taken_for_the_root(root: Path, tmp_path: Path) -> None:
    save_steps(root, [10])
    old = tmp_path / "old"
    shutil.copytree(root, old)
    save_steps(root, [20, 30], cycle=1)
    shutil.rmtree(root)
    shutil.copytree(old, root)
    assert "has disappeared" in refusal(root, 2)
    # With another id in it, and in it alone, it is still the same place.
    (root / ".keepstep" / "root" / "id.json").unlink()
    assert "has disappeared" in refusal(root, 2)


def test_a_root_that_is_empty_all_of_a_sudden_is_said(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(root, [10])
    shutil.rmtree(root)
    root.mkdir()
    assert restore_value(root, cycle=1) == [(0, -1.0)]
    assert "is the checkpoint root mounted? Starting at step 0" in capfd.readouterr().err


def test_a_planted_quarantine_record_or_a_deleted_marker(root: Path) -> None:
    _, newest = save_steps(root, [10, 20])
    record = root / ".keepstep" / "quarantine" / f"{newest.name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("{}")
    assert "quarantined by a record that this job did not write" in refusal(root, 1)
    record.unlink()
    (newest / MARKER_SIGNED).unlink()
    assert restore_value(root, cycle=1) == [(10, 10.0)]
    assert "was committed, and its manifest is gone" in record.read_text()


def test_real_damage_needs_nobody(root: Path) -> None:
    _, second, third = save_steps(root, [10, 20, 30])
    flip_bit(third / SHARD, -1)
    flip_bit(second / MARKER_SIGNED, 50)
    assert restore_value(root, cycle=1) == [(10, 10.0)]
    assert restore_value(root, cycle=2) == [(10, 10.0)]
    save_steps(root, [15], cycle=3)
    assert restore_value(root, cycle=4) == [(15, 15.0)]


def test_rolling_back_on_purpose_keeps_what_was_rolled_back_from_out(root: Path) -> None:
    save_steps(root, [10, 20, 30])
    command = ["ckpt", "pin", str(root), "--allow-rollback", "10", "--reason", "loss spike", "--yes"]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert restore_value(root, cycle=1) == [(10, 10.0)]
    assert restore_value(root, cycle=2) == [(10, 10.0)]
    (again,) = save_steps(root, [11], cycle=3)
    flip_bit(again / MARKER_SIGNED, 50)
    assert restore_value(root, cycle=4) == [(10, 10.0)]
