"""`keepstep ckpt ls`, `verify`, `prune`, `suspect` and `release`, on real roots."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.checkpoint.keeping import pins
from keepstep.checkpoint.keeping.records import TOMBSTONES
from keepstep.checkpoint.restore.quarantine import QuarantineRecord, write_quarantine
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.keys import public_key_path
from keepstep.cli.main import main
from keepstep.records.codec import rfc3339
from keepstep.records.errors import StorageError
from tests.checkpoint.support import flip_bit, forget_marks, save_steps


def keepstep(*args: object) -> Result:
    """Run `keepstep ckpt ARGS`."""
    return CliRunner().invoke(main, ["ckpt", *map(str, args)])


def records(*args: object, exit_code: int = 0) -> Any:
    """Run it, and read what it prints as JSON."""
    result = keepstep(*args, "-o", "json")
    assert result.exit_code == exit_code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def root(shell: Path) -> Path:
    """Steps 100, 200 and 300 of cycle 0, each of two ranks; in the home of `shell` is their key."""
    save_steps(shell / "root", [100, 200, 300], world_size=2)
    return shell / "root"


def folder(root: Path, step: int) -> str:
    return next(name for name in PosixRoot(root).folders() if f"step-{step:08d}" in name)


# ---- ls


def test_ls_says_the_state_of_each_and_marks_what_a_restore_would_take(root: Path) -> None:
    place = PosixRoot(root)
    save_steps(root, [310, 320, 330, 340], world_size=2, cycle=1)
    (root / "job7-step-00000350-c0001-a0001").mkdir()
    place.put_record(TOMBSTONES, folder(root, 340), b"")
    quarantine = QuarantineRecord(
        checkpoint=folder(root, 330), step=330, reason="", file=None, by_rank=0, time=rfc3339(1)
    )
    write_quarantine(place, quarantine)
    forget_marks()
    save_steps(root, [311], world_size=2, cycle=2)  # from 320: nothing before it is abandoned
    pins.write_pin(place, pins.PinRecord(checkpoint=folder(root, 100), step=100, reason="paper", by="", time=""))
    reached = [{"tier": "shm", "time": "2026-01-01T00:00:00Z"}]
    place.delete_record("tiers", folder(root, 200))
    place.put_record("tiers", folder(root, 200), json.dumps({"checkpoint": "x", "reached": reached}).encode())
    manifest = root / folder(root, 310) / "manifest.sigstore.json"
    flip_bit(manifest, 300)
    found = {record["step"]: record for record in records("ls", root)}
    assert {record["schema"] for record in found.values()} == {"keepstep.checkpoints/1"}
    assert list(found) == [350, 340, 330, 320, 311, 310, 300, 200, 100]
    assert [record["state"] for record in found.values()] == [
        "unfinished", "tombstoned", "quarantined", "committed", "committed", "damaged", "committed", "committed", "committed",
    ]  # fmt: skip
    assert [step for step, record in found.items() if record["current"]] == [320]
    assert [step for step, record in found.items() if record["pinned"]] == [100]
    assert found[100]["pins"] == ["paper"] and found[100]["world"] == 2 and found[100]["age_s"] < 60
    assert [tier["tier"] for tier in found[200]["tiers"]] == ["shm", "disk"]
    assert found[200]["parent"] and len(found[200]["signed_by"]) == 64
    size = sum(p.stat().st_size for p in (root / folder(root, 200)).iterdir() if p.name != "manifest.sigstore.json")
    assert found[200]["size_bytes"] == size
    table = keepstep("ls", root, "-o", "table").stdout.splitlines()
    assert table[0].split()[:3] == ["STEP", "STATE", "TIME"]
    assert [line.split()[1] for line in table if line.startswith("*")] == ["320"]
    assert table[-1].split()[:3] == ["100", "committed,", "pinned"]
    assert keepstep("ls", root, "-o", "name").stdout.splitlines()[-1] == folder(root, 100)
    assert "manifest.sigstore.json" in keepstep("ls", root, "-o", "wide").stdout
    assert [record["step"] for record in records("ls", root, "--run", "another")] == []


def test_ls_knows_abandoned_and_untrusted_ones(root: Path, shell: Path) -> None:
    write_quarantine(
        PosixRoot(root),
        QuarantineRecord(checkpoint=folder(root, 300), step=300, reason="", file=None, by_rank=0, time=rfc3339(1)),
    )
    forget_marks()
    save_steps(root, [210], world_size=2, cycle=1)
    PosixRoot(root).delete_record("quarantine", folder(root, 300))
    assert [r["state"] for r in records("ls", root)] == ["abandoned", "committed", "committed", "committed"]
    key = shell / "their.pub"
    shutil.copy(public_key_path(), key)
    shutil.rmtree(shell / "home")
    unchecked = keepstep("ls", root, "-o", "json")
    assert "signatures are NOT checked" in unchecked.stderr
    assert [r["signed_by"] for r in json.loads(unchecked.stdout)] == [None] * 4
    assert len({r["signed_by"] for r in records("ls", root, "--trust-key", key)} - {None}) == 1
    save_steps(shell / "other", [1])  # makes another key
    refused = keepstep("ls", root, "-o", "json")
    assert [r["state"] for r in json.loads(refused.stdout)] == ["untrusted"] * 4
    assert "none of these can be restored" in refused.stderr


def test_a_root_that_is_not_there(shell: Path) -> None:
    for verb in (["ls"], ["verify", "--unsigned"], ["prune", "--dry-run", "--unsigned"]):
        result = keepstep(*verb, shell / "nowhere")
        assert result.exit_code == 6 and "nowhere: no such folder" in result.stderr
    assert keepstep("ls", "ftp://x/y").exit_code == 2


# ---- verify


def test_verify_says_what_is_whole_and_how_fast(root: Path) -> None:
    (report,) = records("verify", root)
    assert report["schema"] == "keepstep.verify/1" and report["step"] == 300 and report["ok"]
    assert [r["step"] for r in records("verify", root, "--all", "--jobs", "1")] == [300, 200, 100]
    said = keepstep("verify", root, "--all").stderr
    assert "GB/s" in said and "3 as their manifests say" in said
    assert [r["step"] for r in records("verify", root / folder(root, 100))] == [100]


def test_verify_names_what_differs_and_exits_with_3(root: Path) -> None:
    flip_bit(root / folder(root, 200) / "rank-00001-of-00002.safetensors", 9000)
    (root / folder(root, 100) / "index.json").unlink()
    assert records("verify", root)[0]["ok"], "the newest one is whole"
    result = keepstep("verify", root, "--all", "-o", "table")
    assert result.exit_code == 3
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["ok", "PROBLEM", "PROBLEM"]
    assert f"{folder(root, 200)}: rank-00001-of-00002.safetensors: SHA-256 is" in result.stderr
    assert "block 0" in result.stderr
    assert f"{folder(root, 100)}: index.json: is missing" in result.stderr
    assert "2 of 3 with problems" in result.stderr
    (report,) = records("verify", root / folder(root, 200), exit_code=3)
    assert [file["name"] for file in report["files"] if file["error"]] == ["rank-00001-of-00002.safetensors"]


def test_verify_without_anybody_to_trust_is_refused(root: Path, shell: Path) -> None:
    shutil.rmtree(shell / "home")
    result = keepstep("verify", root)
    assert result.exit_code == 2 and "give --trust-key FILE" in result.stderr
    assert not (shell / "home").exists(), "looking makes no key"
    result = keepstep("verify", root, "--unsigned", "-o", "json")
    assert result.exit_code == 0 and "signatures are NOT checked" in result.stderr


def test_verify_writes_down_what_it_found_when_asked(root: Path) -> None:
    records("verify", root / folder(root, 200), "--record")
    records("verify", root / folder(root, 200), "--record")
    lines = {line["step"]: line for line in records("prune", root, "--keep", "last:1", "--dry-run")["lines"]}
    assert lines[200]["reasons"] == [
        "newest that is known to be whole: ckpt verify found every byte as the manifest says"
    ]
    assert not lines[100]["keep"]


def test_verify_shows_a_bar_on_a_terminal_only(root: Path) -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()

    def drain() -> None:
        try:
            while data := os.read(ours, 4096):
                seen.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    command = [sys.executable, "-m", "keepstep.cli.main", "ckpt", "verify", "--all", str(root), "-o", "json"]
    done = subprocess.run(
        command, stderr=theirs, stdout=subprocess.PIPE, check=False, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 3
    assert "━".encode() in seen and b"as their manifests say" in seen
    assert "━" not in keepstep("verify", "--all", root).stderr


# ---- prune


def test_prune_explains_asks_and_deletes(root: Path) -> None:
    dry = keepstep("prune", root, "--keep", "last:1", "--dry-run", "-o", "table")
    assert [line.split()[:2] for line in dry.stdout.splitlines()[1:4]] == [
        ["300", "keep"],
        ["200", "delete"],
        ["100", "delete"],
    ]
    assert "would delete 2 of 3" in dry.stdout and "newest: the one a restore would take" in dry.stdout
    unasked = keepstep("prune", root, "--keep", "last:1")
    assert unasked.exit_code == 2 and "this would delete 2 of 3 checkpoints" in unasked.stderr
    assert len(PosixRoot(root).folders()) == 3
    gone = [folder(root, 100), folder(root, 200)]
    done = records("prune", root, "--keep", "last:1", "--yes", "--reason", "room")
    assert done["schema"] == "keepstep.prune/1" and sorted(done["deleted"]) == gone and done["freed_bytes"] > 0
    assert done["action"].startswith("prune-")
    assert PosixRoot(root).folders() == [folder(root, 300)]
    last = keepstep("prune", root, "--keep", "last:1", "-o", "table")
    assert last.exit_code == 0 and "deleted 0 of 1" in last.stdout, "with nothing to delete nobody is asked"


def test_prune_refuses_a_wrong_policy_before_it_looks(root: Path) -> None:
    for flags, said in (
        (["--keep", "last:0"], "--keep: 'last:0': '0' is not a whole number of at least 1"),
        (["--keep", "best:loss:2"], "write best:METRIC:K:min or best:METRIC:K:max"),
        (["--grace", "soon"], "--grace: 'soon' is not a time"),
    ):
        result = keepstep("prune", root, "--yes", *flags)
        assert result.exit_code == 2 and said in result.stderr
    assert len(PosixRoot(root).folders()) == 3


def test_prune_knows_from_the_verdict_that_a_run_is_over(root: Path, shell: Path) -> None:
    torn = root / "job7-step-00000400-c0000-a0001"
    torn.mkdir()
    os.utime(torn, (1, 1))

    def line() -> Any:
        return records("prune", root, "--dry-run")["lines"][0]

    assert line()["keep"] and "may still commit" in line()["reasons"][0]
    assert not records("prune", root, "--dry-run", "--run-over", "job7")["lines"][0]["keep"]
    run = shell / "home" / "runs" / "job7"
    run.mkdir(parents=True)
    (run / "verdict.json").write_text("{}")
    assert line()["reasons"] == ["unfinished, and its run is over"]


def test_what_cannot_be_deleted_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder(root, 100)
    real = PosixRoot.delete_file

    def delete_file(self: PosixRoot, name: str, file: str) -> None:
        if name == first:
            raise StorageError("cannot delete: Input/output error (EIO)")
        real(self, name, file)

    monkeypatch.setattr(PosixRoot, "delete_file", delete_file)
    result = keepstep("prune", root, "--keep", "last:1", "--yes", "-o", "json")
    assert result.exit_code == 1 and f"{first} is not deleted: cannot delete: Input/output error (EIO)" in result.stderr
    assert [name[:18] for name in json.loads(result.stdout)["deleted"]] == ["job7-step-00000200"]
    assert [r["state"] for r in records("ls", root)] == ["committed", "tombstoned"]


# ---- suspect, release


def test_a_suspicion_keeps_what_is_older_until_it_is_released(root: Path) -> None:
    dry = records("suspect", root, "--since-step", 200, "--reason", "loss spike", "--dry-run")
    assert dry["id"] is None
    action = records("suspect", root, "--since-step", 200, "--reason", "loss spike")
    assert action["kind"] == "ckpt-suspect" and action["undo"].startswith(
        f"keepstep ckpt release {root} {action['id']}"
    )
    lines = records("prune", root, "--keep", "last:1", "--yes")["lines"]
    assert [line["keep"] for line in lines] == [True, True, True]
    unknown = keepstep("release", root, "other", "--reason", "x")
    assert unknown.exit_code == 6 and action["id"] in unknown.stderr
    assert keepstep("release", root, action["id"], "--reason", "x").exit_code == 2, "nobody to ask"
    released = records("release", root, action["id"], "--reason", "a bad batch", "--yes")
    assert released["undo"] == f"keepstep ckpt suspect {root} --since-step 200 --reason TEXT"
    assert len(records("prune", root, "--keep", "last:1", "--yes")["deleted"]) == 2
    wrong = keepstep("suspect", root, "--since-step", 1, "--reason", "x", "--name", "../x")
    assert wrong.exit_code == 2 and "cannot name a suspicion" in wrong.stderr
