"""`keepstep ckpt keygen` and `pin`: keys are never overwritten, actions say how to undo them, permits are signed."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.keeping.pins import read_pin
from keepstep.checkpoint.restore.freshness import judge
from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.keys import signing_key, trusted_public_key
from keepstep.checkpoint.trust.marks import file_marks
from keepstep.checkpoint.trust.permits import Permit, read_permits
from keepstep.checkpoint.trust.policy import policy_from_environment
from keepstep.checkpoint.trust.rollback import Mark, position_of
from keepstep.cli.main import main

pytestmark = pytest.mark.usefixtures("shell")


def ckpt(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, args)])


def good(*args: str | Path) -> dict[str, Any]:
    result = ckpt(*args, "-o", "json")
    assert result.exit_code == 0, result.stderr
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def folder(step: int) -> str:
    return FolderName(step, 0, 1, 0, "job7").text


@pytest.fixture
def root(shell: Path) -> Path:
    """A root with steps 1, 2 and 3 of a run, signed, and an unfinished step 4."""
    path = shell / "ckpts"
    place = PosixRoot(path)
    for step in (1, 2, 3):
        name = FolderName(step, 0, 1, 0, "job7")
        made = place.make_folder(name)
        files = [place.put_file(made, "a.bin", [b"%d" % step])]
        facts = writer_facts(
            name, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5
        )
        commit(place, made, files, facts, signing_key())
    place.make_folder(FolderName(4, 0, 1, 0, "job7"))
    return path


def permits(root: Path) -> list[Permit]:
    found, problems = read_permits(PosixRoot(root).records("rollback"), policy_from_environment())
    assert problems == []
    return found


class TestKeygen:
    def test_the_default_is_the_key_that_saves_sign_with(self, shell: Path) -> None:
        record = good("keygen")
        private, public = Path(record["private_key"]), Path(record["public_key"])
        assert private == shell / "home" / "keys" / "ckpt-p256.pem" and stat.S_IMODE(private.stat().st_mode) == 0o600
        assert (record["schema"], record["algorithm"]) == ("keepstep.key/1", "ECDSA P-256 SHA-256")
        assert record["key_sha256"] == policy_fingerprint()
        assert record["next"] == f"keepstep run --trust-key {public} SCRIPT"

    def test_nothing_is_overwritten(self, shell: Path) -> None:
        good("keygen", "--out", "a.pem")
        before = (shell / "a.pem").read_bytes()
        for out in ("a.pem", "a"):
            result = ckpt("keygen", "--out", out)
            assert result.exit_code == 2 and "is there already and is not overwritten" in result.stderr
        assert (shell / "a.pem").read_bytes() == before
        assert ckpt("keygen", "--out", "a.pub").exit_code == 2

    def test_the_next_command_signs_with_that_key(self, shell: Path) -> None:
        (shell / "my keys").mkdir()
        record = good("keygen", "--out", "my keys")
        words = shlex.split(record["next"])
        assert words[:3] == ["keepstep", "run", "--ckpt-signer"] and words[4:6] == [
            "--ckpt-signer-cert",
            record["public_key"],
        ]
        done = subprocess.run(shlex.split(words[3]), input=b"bytes", capture_output=True, check=True)
        (shell / "sig").write_bytes(done.stdout)
        check = ["openssl", "dgst", "-sha256", "-verify", record["public_key"], "-signature", "sig"]
        assert subprocess.run(check, input=b"bytes", capture_output=True, check=False).returncode == 0

    def test_for_people(self) -> None:
        lines = ckpt("keygen", "--out", "k.pem", "-o", "table").stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["private", "public", "fingerprint", "next:"]
        assert "PRIVATE" not in "".join(lines)


def policy_fingerprint() -> str:
    from keepstep.checkpoint.trust.envelope import fingerprint

    return fingerprint(trusted_public_key())


class TestPin:
    @pytest.mark.parametrize("named", ["2", folder(2)])
    def test_pin_and_its_undo(self, root: Path, named: str) -> None:
        record = good("pin", root, named, "--reason", "for the paper", "--yes")
        assert (record["kind"], record["checkpoint"], record["step"]) == ("pin", folder(2), 2)
        pin = read_pin(PosixRoot(root), folder(2))
        assert pin is not None and (pin.reason, pin.step) == ("for the paper", 2)
        assert ckpt("pin", root, named, "--yes").exit_code == 2
        undo = shlex.split(record["undo"])
        assert undo[:2] == ["keepstep", "ckpt"]
        back = good(*undo[2:], "--yes")
        assert read_pin(PosixRoot(root), folder(2)) is None
        good(*shlex.split(back["undo"])[2:], "--yes")
        again = read_pin(PosixRoot(root), folder(2))
        assert again is not None and again.reason == "for the paper"

    def test_dry_run_and_no_answer_change_nothing(self, root: Path) -> None:
        before = sorted(path for path in root.rglob("*"))
        result = ckpt("pin", root, "2", "--dry-run", "-o", "table")
        assert result.stdout.startswith(f"would pin {folder(2)}\nundo: keepstep ckpt pin ")
        asked = ckpt("pin", root, "2")
        assert asked.exit_code == 2 and f"this would pin {folder(2)}; give --yes" in asked.stderr
        good("pin", root, "--allow-rollback", "1", "--reason", "x", "--dry-run")
        assert sorted(path for path in root.rglob("*")) == before

    def test_what_is_not_there(self, root: Path) -> None:
        missing = ckpt("pin", root, "9", "--yes")
        assert missing.exit_code == 6 and "holds no checkpoint '9'; newest steps: 1, 2, 3, 4" in missing.stderr
        assert "is not committed" in ckpt("pin", root, "4", "--yes").stderr
        assert ckpt("pin", root, "2", "--unpin", "--yes").exit_code == 6

    @pytest.mark.parametrize(
        "args",
        [
            [],
            ["2", "--allow-rollback", "1"],
            ["--unpin", "--revoke", "x"],
            ["2", "--from", "x"],
            ["--allow-rollback", "1"],
            ["--allow-rollback", "1", "--reason", "r", "--from", "job7:abc"],
            ["--allow-rollback", "1", "--reason", "r", "--trust-identity", "a"],
        ],
    )
    def test_bad_usage(self, root: Path, args: list[str]) -> None:
        assert ckpt("pin", root, *args, "--yes").exit_code == 2


class TestRollback:
    def newest(self, root: Path) -> Mark:
        found = list_checkpoints(PosixRoot(root), trusted_key=trusted_public_key())
        entry = next(entry for entry in found if entry.candidate)
        assert entry.manifest is not None
        return Mark(at=position_of(entry.manifest, entry.name.text))

    def judge(self, root: Path, step: int, mark: Mark) -> str:
        found = list_checkpoints(PosixRoot(root), trusted_key=trusted_public_key())
        entry = next(entry for entry in found if entry.name.step == step)
        return judge(entry, found, mark, permits(root), set()).action

    def test_the_permit_a_restore_obeys(self, root: Path) -> None:
        mark = self.newest(root)
        file_marks(PosixRoot(root), "job7").put(mark)
        assert (self.judge(root, 3, mark), self.judge(root, 1, mark)) == ("restore", "refuse")
        record = good("pin", root, "--allow-rollback", "1", "--reason", "loss spike", "--yes")
        assert (record["from"], record["checkpoint"]) == (folder(3), folder(1))
        (permit,) = permits(root)
        assert (permit.from_digest, permit.to_step, permit.reason) == (mark.at.digest, 1, "loss spike")
        assert [self.judge(root, step, mark) for step in (3, 2, 1)] == ["skip", "skip", "restore"]
        good(*shlex.split(record["undo"])[2:], "--yes")
        assert permits(root) == [] and self.judge(root, 1, mark) == "refuse"

    def test_what_a_refusal_prints_is_enough(self, root: Path) -> None:
        """On a host without the mark, and with the newest checkpoint gone."""
        from keepstep.checkpoint.trust.rollback import how_to_allow

        mark = self.newest(root)
        shutil.rmtree(root / folder(3))
        assert self.judge(root, 2, mark) == "refuse"
        found = list_checkpoints(PosixRoot(root), trusted_key=trusted_public_key())
        manifest = next(entry.manifest for entry in found if entry.name.step == 2)
        assert manifest is not None
        words = shlex.split(how_to_allow(str(root), position_of(manifest, folder(2)), mark))
        good(*words[2:], "--yes")
        assert self.judge(root, 2, mark) == "restore"

    def test_without_a_mark_the_newest_in_the_root_is_meant(self, root: Path) -> None:
        result = ckpt("pin", root, "--allow-rollback", folder(1), "--reason", "x", "--yes", "-o", "json")
        assert f"is meant: {folder(3)}" in result.stderr
        assert permits(root)[0].from_checkpoint == folder(3)
        again = ckpt("pin", root, "--allow-rollback", "3", "--reason", "x", "--yes")
        assert again.exit_code == 2 and "is the newest known checkpoint" in again.stderr

    def test_a_stale_mark_of_this_host_is_not_meant(self, root: Path) -> None:
        newest = self.newest(root)
        older = list_checkpoints(PosixRoot(root), trusted_key=trusted_public_key())[2]
        assert older.manifest is not None and older.name.step == 2
        file_marks(PosixRoot(root), "job7").put(Mark(at=position_of(older.manifest, folder(2))))
        good("pin", root, "--allow-rollback", "1", "--reason", "x", "--yes")
        assert permits(root)[0].from_digest == newest.at.digest

    def test_an_external_signer_signs_it(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = good("keygen", "--out", "ops.pem")
        sign = ["--ckpt-signer", f"openssl dgst -sha256 -sign {other['private_key']}", "--ckpt-signer-cert", "ops.pub"]
        refused = ckpt("pin", root, "--allow-rollback", "1", "--reason", "x", "--yes", *sign)
        assert refused.exit_code == 1 and "signed by key" in refused.stderr  # the checkpoint itself is by another key
        own = Path("home/keys/ckpt-p256.pub")
        both = ["--trust-key", str(own), "--trust-key", "ops.pub"]
        good("pin", root, "--allow-rollback", "1", "--reason", "x", "--yes", *sign, *both)
        monkeypatch.setenv("KEEPSTEP_TRUST_KEY", f"{own}:ops.pub")
        assert len(permits(root)) == 1

    def test_a_key_that_ranks_do_not_trust_is_refused_before_anything_is_written(self, root: Path) -> None:
        own = Path("home/keys/ckpt-p256.pub")
        good("keygen", "--out", "ops.pem")
        sign = ["--ckpt-signer", "openssl dgst -sha256 -sign ops.pem", "--ckpt-signer-cert", "ops.pub"]
        refused = ckpt("pin", root, "--allow-rollback", "1", "--reason", "x", "--yes", *sign, "--trust-key", own)
        assert refused.exit_code == 2 and "its own trust policy does not accept" in refused.stderr
        assert PosixRoot(root).record_names("rollback") == frozenset()

    def test_revoking_what_is_not_there(self, root: Path) -> None:
        for name in ("x", "../../x"):
            assert ckpt("pin", root, "--revoke", name, "--yes").exit_code == 6
