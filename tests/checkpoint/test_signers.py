"""What signs: a file key, an external command, with and without certificates; and that the reference tool agrees."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.checkpoint.authority import (
    IDENTITY,
    ISSUER,
    Authority,
    new_authority,
    new_key,
    pem,
    private_pem,
    write,
)
from tests.checkpoint.test_manifest import reference_tool
from tests.checkpoint.test_trust_policy import signed

from keepstep.checkpoint.format.layout import MARKER_SIGNED, FolderName
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.envelope import fingerprint
from keepstep.checkpoint.trust.keys import key_path, public_pem, signing_key
from keepstep.checkpoint.trust.policy import TrustOptions, TrustPolicy, check_manifest, load_policy, load_signer
from keepstep.checkpoint.trust.signers import (
    CommandSigner,
    FileSigner,
    Signer,
    SigningError,
    certificate_path,
    command_signer,
    local_signer,
)
from keepstep.records.errors import ConfigError, StorageError


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture
def openssl(tmp_path: Path) -> TrustOptions:
    """Settings of a job whose key only `openssl` opens."""
    key = new_key()
    private = write(tmp_path / "hsm.pem", private_pem(key))
    public = write(tmp_path / "hsm.pub", public_pem(key.public_key()))
    return TrustOptions(ckpt_signer=f"openssl dgst -sha256 -sign {shlex.quote(private)}", ckpt_signer_cert=public)


def committed(root: Path, signer: Signer | None) -> Path:
    name = FolderName(12, 3, 1, 0, "job7")
    place = PosixRoot(root)
    folder = place.make_folder(name)
    files = [place.put_file(folder, text, [text.encode() * 50]) for text in ("b.bin", "a.bin")]
    facts = writer_facts(name, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    commit(place, folder, files, facts, signer)
    return root / folder


def python_signer(program: str, signer: FileSigner, timeout_s: float = 20.0) -> CommandSigner:
    """A command that runs `program`, whose signatures are expected to be `signer`'s."""
    return CommandSigner((sys.executable, "-c", program), signer.public_key, timeout_s=timeout_s)


class TestCommands:
    def test_openssl_signs(self, root: Path, openssl: TrustOptions) -> None:
        folder = committed(root, load_signer(openssl))
        manifest = check_manifest((folder / MARKER_SIGNED).read_bytes(), MARKER_SIGNED, load_policy(openssl))
        assert manifest.signed and not key_path().exists()

    def test_base64_with_line_breaks_is_taken_too(self, tmp_path: Path) -> None:
        key = new_key()
        private = write(tmp_path / "hsm.pem", private_pem(key))
        script = tmp_path / "sign"
        script.write_text(f"#!/bin/sh\nopenssl dgst -sha256 -sign {private} | base64 -w 20\n")
        script.chmod(0o700)
        public = write(tmp_path / "hsm.pub", public_pem(key.public_key()))
        data = signed(command_signer(str(script), public))
        assert check_manifest(data, MARKER_SIGNED, TrustPolicy(keys=(key.public_key(),))).signed

    def test_large_statements_and_programs_that_read_late(self) -> None:
        """64 MiB do not fit into a pipe; what is written to stderr meanwhile must not block either."""
        signer = FileSigner(new_key())
        program = "import sys, hashlib; sys.stderr.write('x' * 300000); print(hashlib.sha256(sys.stdin.buffer.read()))"
        with pytest.raises(SigningError, match="are no signature of the expected key"):
            python_signer(program, signer).sign(b"m" * (64 << 20))

    def test_no_shell_is_involved(self, tmp_path: Path) -> None:
        public = write(tmp_path / "k.pub", public_pem(new_key().public_key()))
        signer = command_signer(f"echo '$(touch {tmp_path}/pwned)' ; touch {tmp_path}/pwned", public)
        with pytest.raises(SigningError):
            signer.sign(b"x")
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize(
        ("program", "message"),
        [
            ("import sys; sys.exit('the key is locked')", "ended with exit 1: the key is locked"),
            ("pass", "returned 0 bytes that are no signature"),
            ("print('MEUCIQ==')", "returned 9 bytes that are no signature"),
            ("import os; os.kill(os.getpid(), 9)", "ended with SIGKILL"),
            ("import os\nwhile True: os.write(1, b'x' * 4096)", "wrote more than 65536 bytes"),
        ],
    )
    def test_failures_say_what_the_program_said(self, program: str, message: str) -> None:
        with pytest.raises(SigningError, match=message):
            python_signer(program, FileSigner(new_key())).sign(b"x")
        assert issubclass(SigningError, StorageError)  # the save fails, training goes on

    def test_a_program_that_hangs_is_stopped_with_its_children(self, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        program = (
            "import subprocess, sys, time\n"
            f"p = subprocess.Popen(['sleep', '600']); open({str(pid_file)!r}, 'w').write(str(p.pid))\n"
            "sys.stderr.write('asking the module'); sys.stderr.flush(); time.sleep(600)"
        )
        begin = time.monotonic()
        with pytest.raises(SigningError, match=r"took longer than 2 s and was stopped: asking the module"):
            python_signer(program, FileSigner(new_key()), timeout_s=2.0).sign(b"x")
        assert time.monotonic() - begin < 10
        assert _is_gone(int(pid_file.read_text()))

    def test_a_child_left_behind_delays_nothing(self) -> None:
        program = "import subprocess; subprocess.Popen(['sleep', '600'])"
        begin = time.monotonic()
        with pytest.raises(SigningError, match="no signature"):
            python_signer(program, FileSigner(new_key()), timeout_s=60.0).sign(b"x")
        assert time.monotonic() - begin < 20

    def test_another_key_than_the_one_announced(self, openssl: TrustOptions, tmp_path: Path) -> None:
        other = write(tmp_path / "other.pub", public_pem(new_key().public_key()))
        with pytest.raises(SigningError, match="no signature of the expected key"):
            command_signer(openssl.ckpt_signer or "", other).sign(b"x")

    def test_a_failed_signature_publishes_nothing(self, root: Path) -> None:
        with pytest.raises(StorageError):
            committed(root, python_signer("pass", FileSigner(new_key())))
        assert [path.name for path in root.rglob("manifest*")] == []

    def test_bad_settings(self, tmp_path: Path) -> None:
        public = write(tmp_path / "k.pub", public_pem(new_key().public_key()))
        with pytest.raises(ConfigError, match="--ckpt-signer 'no-such-program x': there is no such program"):
            command_signer("no-such-program x", public)
        with pytest.raises(ConfigError, match=r"--ckpt-signer .*: No closing quotation"):
            command_signer("openssl 'x", public)
        with pytest.raises(ConfigError, match="neither a PEM public key nor a PEM certificate chain"):
            command_signer("true", write(tmp_path / "bad", b"-----BEGIN CERTIFICATE-----\nx\n"))
        with pytest.raises(StorageError, match=r"cannot read .*nowhere"):
            command_signer("true", tmp_path / "nowhere")


def _is_gone(pid: int) -> bool:
    """Whether a process has ended (its parent, some init, may not have collected it yet)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class TestCertificates:
    def test_beside_the_local_key(self, authority: Authority) -> None:
        key = signing_key()
        certificate_path().write_bytes(pem(authority.leaf(key), authority.middle))
        signer = local_signer()
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))
        assert check_manifest(signed(signer), MARKER_SIGNED, policy).identity == IDENTITY
        # Whoever trusts the bare key goes on doing so.
        assert check_manifest(signed(signer), MARKER_SIGNED, TrustPolicy(keys=(key.public_key(),))).signed

    def test_of_another_key_is_refused(self, authority: Authority) -> None:
        signing_key()
        certificate_path().write_bytes(pem(authority.leaf(new_key())))
        with pytest.raises(ConfigError, match=r"ckpt-p256.crt: its first certificate is not of the key in"):
            local_signer()
        certificate_path().write_bytes(public_pem(signing_key().public_key()))
        with pytest.raises(ConfigError, match="holds no certificate"):
            local_signer()

    def test_of_an_external_signer(self, authority: Authority, tmp_path: Path) -> None:
        key = new_key()
        private = write(tmp_path / "hsm.pem", private_pem(key))
        chain = write(tmp_path / "hsm.crt", pem(authority.leaf(key), authority.middle))
        signer = command_signer(f"openssl dgst -sha256 -sign {private}", chain)
        assert len(signer.certificates) == 2
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))
        manifest = check_manifest(signed(signer), MARKER_SIGNED, policy)
        assert (manifest.identity, manifest.key_sha256) == (IDENTITY, fingerprint(key.public_key()))


class TestReferenceTool:
    """Both ways with the released model_signing."""

    def test_it_verifies_an_external_signers_certificate(
        self, root: Path, authority: Authority, tmp_path: Path
    ) -> None:
        key = new_key()
        private = write(tmp_path / "hsm.pem", private_pem(key))
        chain = write(tmp_path / "hsm.crt", pem(authority.leaf(key), authority.middle))
        folder = committed(root, command_signer(f"openssl dgst -sha256 -sign {private}", chain))
        trusted = write(tmp_path / "root.pem", pem(authority.root))
        done = self.verify(folder, trusted)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_it_verifies_an_external_signers_key_and_refuses_a_foreign_root(
        self, root: Path, openssl: TrustOptions, tmp_path: Path, authority: Authority
    ) -> None:
        folder = committed(root, load_signer(openssl))
        done = reference_tool(
            "verify",
            "key",
            folder,
            "--signature",
            folder / MARKER_SIGNED,
            "--public_key",
            openssl.ckpt_signer_cert or "",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        folder = committed(tmp_path / "other", authority.signer())
        assert self.verify(folder, write(tmp_path / "foreign.pem", pem(new_authority().root))).returncode != 0

    def test_we_verify_what_it_signed_with_a_certificate(self, authority: Authority, tmp_path: Path) -> None:
        folder, key = tmp_path / "model", new_key()
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"w" * 1000)
        files = {"key": private_pem(key), "leaf": pem(authority.leaf(key)), "chain": pem(authority.middle)}
        paths = {name: write(tmp_path / name, data) for name, data in files.items()}
        done = reference_tool(
            *("sign", "certificate", folder, "--signature", folder / MARKER_SIGNED, "--private_key", paths["key"]),
            *("--signing_certificate", paths["leaf"], "--certificate_chain", paths["chain"]),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        data = (folder / MARKER_SIGNED).read_bytes()
        policy = TrustPolicy(identities=((IDENTITY, ISSUER),), roots=(authority.root,))
        manifest = check_manifest(data, MARKER_SIGNED, policy)
        assert (manifest.identity, [file.name for file in manifest.files]) == (IDENTITY, ["weights.bin"])
        assert check_manifest(data, MARKER_SIGNED, TrustPolicy(keys=(key.public_key(),))).signed

    def verify(self, folder: Path, trusted: str) -> subprocess.CompletedProcess[str]:
        signature = folder / MARKER_SIGNED
        return reference_tool("verify", "certificate", folder, "--signature", signature, "--certificate_chain", trusted)
