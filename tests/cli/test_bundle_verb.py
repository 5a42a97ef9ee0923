"""`keepstep bundle`: an archive that can be shown to others."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner, Result

from keepstep.cli.main import main

PLANTED = {
    "host": "gpu-leaf-17",
    "user": "jdoe-secretive",
    "ip": "10.77.88.99",
    "token": "hf_abcdefghijklmnop1234",
    "password": "hunter2-hunter3",
    "email": "jane.doe@uni-example.edu",
    "folder": "moonshot-project",
    "bucket": "acme-secret-lab",
}
LOG = """\
2031-03-03T04:05:06+00:00 gpu-leaf-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus.
gpu-leaf-17:4410:4490 [3] NCCL INFO Using network IB
connect to 10.77.88.99:29500 failed; gpu-leaf-17 is slow
File "/home/jdoe-secretive/moonshot-project/train.py", line 88, in step
export HF_TOKEN=hf_abcdefghijklmnop1234 DB_PASSWORD=hunter2-hunter3
mail jane.doe@uni-example.edu, owner=jdoe-secretive
saving to s3://acme-secret-lab/run/index.json
"""


def bundle(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bundle", *arguments])


def opened(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    if path.name.endswith(".zst"):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        return {name.partition("/")[2]: file.read() for name, file in files.items() if file is not None}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "gpu-leaf-17-logs"
    folder.mkdir()
    (folder / "gpu-leaf-17.log").write_text(LOG)
    (folder / "dump.pickle").write_bytes(b"\x80\x02gpu-leaf-17")
    return folder


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tar"])
def test_no_planted_name_is_in_the_archive(logs: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out{suffix}"
    done = bundle(str(logs), "-o", str(target))
    assert done.exit_code == 0, done.output
    members = opened(target)
    whole = b"\n".join([*members.values(), *(n.encode() for n in members)]).lower()
    assert [kind for kind, name in PLANTED.items() if name.lower().encode() in whole] == []


def test_it_holds_the_page_the_verdict_the_files_and_what_was_replaced(logs: Path, tmp_path: Path) -> None:
    bundle(str(logs), "-o", str(tmp_path / "out.tar"))
    members = opened(tmp_path / "out.tar")
    assert [n for n in members if n.startswith("files/")] == ["files/001-host-1.log"]
    assert members["narrative.md"].startswith(b"# What happened") and b"Xid" in members["narrative.md"]
    verdict = json.loads(members["verdict.json"])
    assert (verdict["class"], verdict["entity"]["node"]) == ("hardware", "host-1")
    manifest = json.loads(members["manifest.json"])
    assert manifest["replaced"]["token"] + manifest["replaced"]["secret"] >= 2
    assert {m["name"] for m in manifest["members"]} == set(members) - {"manifest.json"}
    assert any("pickle" in what for what in manifest["left_out"])


def test_the_rest_of_a_line_stays(logs: Path, tmp_path: Path) -> None:
    bundle(str(logs), "-o", str(tmp_path / "out.tar"))
    text = opened(tmp_path / "out.tar")["files/001-host-1.log"].decode()
    assert "host-1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus." in text
    assert 'train.py", line 88, in step' in text


def test_a_long_file_loses_its_middle_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "long.log").write_text("begin\n" + "x\n" * 5_000 + "the end\n")
    bundle(str(tmp_path / "long.log"), "-o", str(tmp_path / "out.tar"), "--max-file-mb", "0.001")
    members = opened(tmp_path / "out.tar")
    text = members["files/001-long.log"].decode()
    assert text.startswith("begin") and text.endswith("the end\n") and "characters left out" in text
    assert json.loads(members["manifest.json"])["files"][0]["characters_left_out"] > 8_000


def test_what_is_there_is_not_replaced_unasked(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tar").write_text("mine")
    assert bundle(str(logs), "-o", str(tmp_path / "out.tar")).exit_code == 2
    assert (tmp_path / "out.tar").read_text() == "mine"
    assert bundle(str(logs), "-o", str(tmp_path / "out.tar"), "--force").exit_code == 0


def test_a_dry_run_writes_nothing(logs: Path, tmp_path: Path) -> None:
    done = bundle(str(logs), "-o", str(tmp_path / "out.tar"), "--dry-run")
    assert done.exit_code == 0 and "verdict.json" in done.stderr
    assert not (tmp_path / "out.tar").exists()


def test_other_suffixes_are_refused(logs: Path, tmp_path: Path) -> None:
    assert bundle(str(logs), "-o", str(tmp_path / "out.zip")).exit_code == 2
