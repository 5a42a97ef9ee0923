"""The manifest is an OMS v1.0 bundle: the reference tool accepts ours, we accept its, and nobody accepts a forged one."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.support import flip_bit, report_of, save_steps

from keepstep.checkpoint.format.layout import MARKER_SIGNED, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.restore.verify import read_manifest, verify_checkpoint
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import open_root
from keepstep.checkpoint.storage.writer import write_file
from keepstep.checkpoint.trust.keys import key_path, public_key_path, signing_key, trusted_public_key
from keepstep.checkpoint.trust.manifest import Facts, UnsignedError, UntrustedKeyError, parse_manifest, sign_statement
from keepstep.records.errors import VerificationError

NAME = FolderName(12, 3, 1, 0, "job7")


def facts() -> Facts:
    return writer_facts(
        NAME, world=1, parent="ab" * 32, restored_step=0, restored_from=None, scope=None, life_started_ns=5
    )


def committed(root: Path, *, signed: bool = True) -> Path:
    place = PosixRoot(root)
    folder = root / place.make_folder(NAME)
    files = [write_file(folder / name, [name.encode() * 50]) for name in ("b.bin", "a.bin")]
    commit(place, folder.name, files, facts(), signing_key() if signed else None)
    return folder


def reference_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the model_signing command line; a process of its own, because importing it warns."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def reference_verify(folder: Path) -> subprocess.CompletedProcess[str]:
    signature = folder / MARKER_SIGNED
    return reference_tool("verify", "key", folder, "--signature", signature, "--public_key", public_key_path())


def test_reference_tool_verifies_what_we_wrote(root: Path) -> None:
    (folder,) = save_steps(root, [7], world_size=2)
    done = reference_verify(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    flip_bit(folder / "rank-00001-of-00002.safetensors", -1)
    done = reference_verify(folder)
    assert done.returncode != 0
    assert "rank-00001-of-00002.safetensors" in done.stdout + done.stderr


def test_we_verify_what_the_reference_tool_signed(tmp_path: Path) -> None:
    signing_key()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "config.json").write_bytes(b"{}")
    done = reference_tool("sign", "key", folder, "--signature", folder / MARKER_SIGNED, "--private_key", key_path())
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(folder)
    assert report.ok and report.signed, report.errors
    assert [file.name for file in report.files] == ["config.json", "weights.bin"]
    flip_bit(folder / "weights.bin", 5)
    assert report_of(folder).errors[0].startswith("weights.bin: SHA-256 is ")


def test_manifest_says_what_was_committed(root: Path) -> None:
    folder = committed(root)
    manifest = read_manifest(open_root(folder.parent), folder.name, trusted_key=trusted_public_key())
    assert [(file.name, file.size_bytes) for file in manifest.files] == [("a.bin", 250), ("b.bin", 250)]
    assert manifest.signed
    assert manifest.facts is not None
    assert (manifest.facts.run, manifest.facts.step, manifest.facts.cycle, manifest.facts.attempt) == ("job7", 12, 3, 1)
    assert manifest.facts.parent == "ab" * 32
    assert manifest.digest == hashlib.sha256((folder / MARKER_SIGNED).read_bytes()).hexdigest()
    raw = [hashlib.sha256(name.encode() * 50).digest() for name in ("a.bin", "b.bin")]
    assert manifest.root_digest == hashlib.sha256(b"".join(raw)).hexdigest()
    # Nothing but the listed files and the marker, and no rubbish of the commit beside it.
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "b.bin", MARKER_SIGNED]
    assert list((root / ".keepstep").iterdir()) == []


def test_unsigned_is_accepted_only_where_asked_for(root: Path) -> None:
    folder = committed(root, signed=False)
    assert (folder / MARKER_UNSIGNED).is_file() and not (folder / MARKER_SIGNED).exists()
    with pytest.raises(UnsignedError, match="not signed"):
        read_manifest(open_root(folder.parent), folder.name, trusted_key=trusted_public_key())
    assert not read_manifest(open_root(folder.parent), folder.name, trusted_key=None, allow_unsigned=True).signed
    flip_bit(folder / "a.bin", 3)
    report = verify_checkpoint(open_root(folder.parent), folder.name, trusted_key=None, allow_unsigned=True)
    assert not report.ok and any(error.startswith("a.bin: SHA-256 is ") for error in report.errors)


def test_key_of_somebody_else_is_not_trusted(root: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = committed(root)
    bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    forged = sign_statement(statement, ec.generate_private_key(ec.SECP256R1()))
    (folder / MARKER_SIGNED).write_bytes(forged)
    with pytest.raises(UntrustedKeyError, match=r"signed by key [0-9a-f]{16}, trusted is [0-9a-f]{16}"):
        read_manifest(open_root(folder.parent), folder.name, trusted_key=trusted_public_key())
    # Claiming to be our key does not help.
    lie = json.loads(forged)
    lie["verificationMaterial"] = bundle["verificationMaterial"]
    (folder / MARKER_SIGNED).write_text(json.dumps(lie))
    with pytest.raises(VerificationError, match="signature does not match") as caught:
        read_manifest(open_root(folder.parent), folder.name, trusted_key=trusted_public_key())
    assert not isinstance(caught.value, UntrustedKeyError)


def test_manifest_copied_from_another_checkpoint_is_refused(root: Path) -> None:
    first, second = save_steps(root, [1, 2])
    (second / MARKER_SIGNED).write_bytes((first / MARKER_SIGNED).read_bytes())
    assert report_of(second).errors[0].startswith(f"{MARKER_SIGNED}: speaks of run job7 step 1 ")


Edit = Callable[[dict[str, Any]], Any]


def _set(path: str, value: Any) -> Edit:
    def edit(statement: dict[str, Any]) -> None:
        at: Any = statement
        *parents, last = path.split(".")
        for part in parents:
            at = at[int(part) if part.isdecimal() else part]
        at[int(last) if last.isdecimal() else last] = value

    return edit


HOSTILE: dict[str, Edit] = {
    "no type": _set("_type", "other"),
    "other predicate": _set("predicateType", "https://example.org/other"),
    "two subjects": lambda s: s["subject"].append(s["subject"][0]),
    "no subject": _set("subject", []),
    "wrong root": _set("subject.0.digest.sha256", "00" * 32),
    "shards": _set("predicate.serialization.method", "shards"),
    "blake": _set("predicate.serialization.hash_type", "blake3"),
    "traversal": _set("predicate.resources.0.name", "../a.bin"),
    "absolute": _set("predicate.resources.0.name", "/etc/passwd"),
    "nested": _set("predicate.resources.0.name", "x/a.bin"),
    "hidden": _set("predicate.resources.0.name", ".a"),
    "empty name": _set("predicate.resources.0.name", ""),
    "nul": _set("predicate.resources.0.name", "a\0b"),
    "manifest lists itself": _set("predicate.resources.0.name", MARKER_SIGNED),
    "weak digest": _set("predicate.resources.0.algorithm", "md5"),
    "short digest": _set("predicate.resources.0.digest", "abcd"),
    "digest not hex": _set("predicate.resources.0.digest", "zz" * 32),
    "upper-case digest": _set("predicate.resources.0.digest", "AB" * 32),
    "unsorted": lambda s: s["predicate"]["resources"].reverse(),
    "twice": lambda s: s["predicate"]["resources"].insert(0, s["predicate"]["resources"][0]),
    "size is a text": _set("predicate.resources.0.size", "250"),
    "step is a float": _set("predicate.keepstep.step", 1.5),
    "no world": lambda s: s["predicate"]["keepstep"].pop("world"),
    "resources missing": lambda s: s["predicate"].pop("resources"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_statements_are_refused_even_when_signed(root: Path, name: str) -> None:
    folder = committed(root)
    bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    HOSTILE[name](statement)
    data = sign_statement(json.dumps(statement).encode(), signing_key())
    with pytest.raises(VerificationError, match=rf"^{MARKER_SIGNED}: "):
        parse_manifest(data, MARKER_SIGNED, trusted_key=trusted_public_key())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\x80\x04\x95\x1c",
        b"[" * 200_000,
        b"null",
        b"{}",
        b'{"mediaType": 1}',
        b'{"mediaType":"x","verificationMaterial":{},"dsseEnvelope":{"payload":"","payloadType":"","signatures":[]}}',
    ],
    ids=range(8),
)
def test_markers_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(VerificationError):
        parse_manifest(data, MARKER_SIGNED, trusted_key=trusted_public_key())


def test_bundle_is_not_accepted_under_the_unsigned_name(root: Path) -> None:
    folder = committed(root)
    data = (folder / MARKER_SIGNED).read_bytes()
    with pytest.raises(VerificationError):
        parse_manifest(data, MARKER_UNSIGNED, trusted_key=None, allow_unsigned=True)


def test_no_signature_no_trust(root: Path) -> None:
    folder = committed(root)
    bundle = json.loads((folder / MARKER_SIGNED).read_bytes())
    for signatures in ([], [{"sig": ""}], [{"sig": "!"}], bundle["dsseEnvelope"]["signatures"] * 2):
        bundle["dsseEnvelope"]["signatures"] = signatures
        with pytest.raises(VerificationError):
            parse_manifest(json.dumps(bundle).encode(), MARKER_SIGNED, trusted_key=trusted_public_key())
