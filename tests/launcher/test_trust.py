"""The job token, the keys made from it, the pinned connection and the proofs: what is accepted and what is refused."""

from __future__ import annotations

import ctypes
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher import trust
from keepstep.records.errors import ConfigError

TOKEN = b"a token for tests, never in use"
OTHER = b"another token, as if of another job"

tokens = st.binary(min_size=16, max_size=80)
words = st.text(st.characters(), max_size=12)
"""Any code points, lone surrogates among them: file names bring those."""


def write(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


class TestTokenFile:
    @pytest.mark.parametrize("mode", [0o600, 0o400])
    def test_white_space_around_it_does_not_count(self, tmp_path: Path, mode: int) -> None:
        assert trust.find_token(write(tmp_path / "t", b"\n " + TOKEN + b"\r\n", mode)) == TOKEN

    def test_it_wins_over_the_variable_which_is_gone_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(trust.ENV_TOKEN, OTHER.decode())
        assert trust.find_token(write(tmp_path / "t", TOKEN)) == TOKEN
        assert trust.ENV_TOKEN not in os.environ

    def test_a_pipe_serves_too(self) -> None:
        reading, writing = os.pipe()
        os.write(writing, TOKEN)
        os.close(writing)
        assert trust.find_token(f"/dev/fd/{reading}") == TOKEN
        os.close(reading)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
    def test_readable_by_others_is_refused_with_the_command_to_run(self, tmp_path: Path, mode: int) -> None:
        name = write(tmp_path / "my token", TOKEN, mode)
        with pytest.raises(ConfigError) as caught:
            trust.find_token(name)
        assert f"mode 0{mode:o}" in str(caught.value)
        command = str(caught.value).partition("run: ")[2]
        subprocess.run(command, shell=True, check=True)
        assert trust.find_token(name) == TOKEN

    def test_missing_and_folder_are_named(self, tmp_path: Path) -> None:
        for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(ConfigError, match=reason) as caught:
                trust.find_token(str(path))
            assert str(path) in str(caught.value)

    def test_a_name_that_no_file_can_have(self) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            trust.find_token("a\0b")

    @pytest.mark.parametrize("size", [0, 15, 4097, 1 << 16])
    def test_a_size_that_no_token_has(self, tmp_path: Path, size: int) -> None:
        with pytest.raises(ConfigError, match="bytes") as caught:
            trust.find_token(write(tmp_path / "t", b"s" * size + b"\n"))
        assert "--token-file" in str(caught.value)
        assert "sss" not in str(caught.value)

    @pytest.mark.parametrize("size", [16, 4096])
    def test_the_limits_are_inside(self, tmp_path: Path, size: int) -> None:
        assert trust.find_token(write(tmp_path / "t", b"s" * size)) == b"s" * size


SHOW = """
import ctypes, os, subprocess, sys
from keepstep.launcher.trust import find_token
from keepstep.records.errors import ConfigError
shown = lambda: open("/proc/self/environ", "rb").read()
before = shown().count(b"secret")
if len(sys.argv) > 1:
    os.environ["KEEPSTEP_JOB_TOKEN"] = sys.argv[1]
try:
    token = find_token(None).decode()
except ConfigError as error:
    token = f"refused: {error}"
child = subprocess.run(["env"], capture_output=True, check=True).stdout
block = shown()
print(before, token, block.count(b"secret"), child.count(b"secret"), "KEEPSTEP_JOB_TOKEN" in os.environ,
      ctypes.CDLL(None).getenv(b"KEEPSTEP_JOB_TOKEN"), block.count(b"BEFORE=kept") + block.count(b"ZAFTER=kept"),
      sep="|", flush=True)
sys.stdin.read()
"""


def shown_by(value: str, *arguments: str) -> tuple[list[str], list[bytes]]:
    """What a process that was started with `value` says of its environment, and the entries that others see of it."""
    env = {"BEFORE": "kept", trust.ENV_TOKEN: value, "ZAFTER": "kept", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", SHOW, *arguments]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().rstrip("\n").split("|")
        seen = Path(f"/proc/{process.pid}/environ").read_bytes()
        process.communicate("")
    return said, [entry for entry in seen.split(b"\0") if entry and not entry.startswith(b"PATH=")]


WIPED = [b"BEFORE=kept", b"KEEPSTEP_JOB_TOKEN=", b"ZAFTER=kept"]


class TestVariable:
    def test_it_leaves_no_trace_in_the_environment(self) -> None:
        said, seen = shown_by("secret-of-this-job")
        assert said == ["1", "secret-of-this-job", "0", "0", "False", "0", "2"]
        assert seen == WIPED

    def test_nor_does_the_value_from_before_it_was_set_again(self) -> None:
        said, seen = shown_by("secret-of-this-job", "secret-that-came-later")
        assert said == ["1", "secret-that-came-later", "0", "0", "False", "0", "2"]
        assert seen == WIPED

    def test_nor_one_that_is_refused(self) -> None:
        said, seen = shown_by("secret")
        assert said[0] == "1"
        assert said[1].startswith("refused: KEEPSTEP_JOB_TOKEN: the job token has 6 bytes, at least 16")
        assert "secret" not in said[1]
        assert said[2:] == ["0", "0", "False", "0", "2"]
        assert seen == WIPED

    def test_a_copy_made_by_setenv_is_wiped_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(trust.ENV_TOKEN, TOKEN.decode())
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        pointer = libc.getenv(trust.ENV_TOKEN.encode())
        assert ctypes.string_at(pointer) == TOKEN
        assert trust.find_token(None) == TOKEN
        assert ctypes.string_at(pointer, len(TOKEN)) == bytes(len(TOKEN))

    def test_empty_is_refused_and_unset_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(trust.ENV_TOKEN, "")
        with pytest.raises(ConfigError, match="0 bytes"):
            trust.find_token(None)
        assert trust.find_token(None) is None


class TestRequired:
    @pytest.mark.parametrize(
        "endpoint", ["127.0.0.1:1", "127.9.9.9:29500", "localhost:1", "[::1]:29500", "::1", "[::ffff:127.0.0.1]:1"]
    )
    def test_not_on_this_host_alone(self, endpoint: str) -> None:
        trust.require_token(None, [endpoint])

    @pytest.mark.parametrize(
        "endpoint",
        ["10.0.0.1:29500", "node-1:29500", "[fd00::1]:29500", "0.0.0.0:1", "localhost.example:1", ":29500", "[::]:1"],
    )
    def test_over_a_network(self, endpoint: str) -> None:
        with pytest.raises(ConfigError) as caught:
            trust.require_token(None, ["127.0.0.1:29500", endpoint])
        for part in (f"({endpoint})", "keepstep coordinator --new-token", "--token-file", "KEEPSTEP_JOB_TOKEN"):
            assert part in str(caught.value)
        trust.require_token(TOKEN, [endpoint])

    def test_not_without_endpoints(self) -> None:
        trust.require_token(None, [])

    def test_a_new_token_is_good_and_new(self, tmp_path: Path) -> None:
        made = trust.make_token()
        assert trust.find_token(write(tmp_path / "t", made.encode() + b"\n")) == made.encode()
        assert len(made) == 43
        assert made != trust.make_token()


class TestKeys:
    def test_derivation_of_the_standard(self) -> None:
        """RFC 5869, appendix A.3: no salt, no info."""
        expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
        assert trust.derive(b"\x0b" * 22, b"", 42).hex() == expected

    @given(tokens, st.binary(max_size=60), st.integers(1, 100))
    def test_derivation_of_another_implementation(self, token: bytes, info: bytes, size: int) -> None:
        assert trust.derive(token, info, size) == HKDF(hashes.SHA256(), size, None, info).derive(token)

    @given(tokens)
    def test_scalars_are_private_keys_of_the_curve(self, token: bytes) -> None:
        scalar = trust._scalar(token)
        assert 1 <= scalar < trust.P256_ORDER
        assert trust.coordinator_key(token).private_numbers().private_value == scalar

    def test_the_ends_of_the_range_map_into_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for derived in (0, trust.P256_ORDER - 2, trust.P256_ORDER - 1, 2**384 - 1):
            with monkeypatch.context() as patch:
                patch.setattr(trust, "derive", lambda *_, derived=derived: derived.to_bytes(48, "big"))
                key = trust.coordinator_key(TOKEN)
                assert 1 <= key.private_numbers().private_value < trust.P256_ORDER

    def test_the_order_is_that_of_the_curve(self) -> None:
        """(n - 1)G is -G: same x, other y."""
        last = ec.derive_private_key(trust.P256_ORDER - 1, ec.SECP256R1()).public_key().public_numbers()
        first = ec.derive_private_key(1, ec.SECP256R1()).public_key().public_numbers()
        assert (last.x, last.y != first.y) == (first.x, True)

    def test_the_pin_is_the_same_everywhere_and_for_good(self) -> None:
        """Another process, and a frozen value: launchers of two versions must agree."""
        code = f"from keepstep.launcher.trust import public_pin; print(public_pin({TOKEN!r}).hex())"
        elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert elsewhere.stdout.strip() == trust.public_pin(TOKEN).hex() == PIN
        assert trust.public_pin(OTHER).hex() != PIN


PIN = "cd74887908ca44bf5d8879c85d38d43c08827cf2427141c00de6dd0f16ce3e26"


def connect(server: ssl.SSLContext, talk: Callable[[ssl.SSLSocket], None]) -> bytes:
    """A TLS connection over a socket pair: `talk` has the client's end. What the server got after the handshake."""
    got: list[bytes] = []
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as end:
                got.append(end.recv(100))
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with trust.client_context().wrap_socket(ours, server_hostname="node-7") as end:
            talk(end)
    finally:
        ours.close()
        thread.join()
    return b"".join(got)


def only_tls_1_2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


class TestConnection:
    def test_the_right_token_passes(self) -> None:
        def talk(end: ssl.SSLSocket) -> None:
            trust.check_pin(end, TOKEN)
            assert end.version() == "TLSv1.3"
            end.sendall(b"hello")

        assert connect(trust.server_context(TOKEN), talk) == b"hello"

    def test_a_wrong_token_is_refused_and_both_pins_are_named(self) -> None:
        def talk(end: ssl.SSLSocket) -> None:
            with pytest.raises(trust.PinError) as caught:
                trust.check_pin(end, TOKEN)
            assert trust.public_pin(TOKEN).hex()[:16] in str(caught.value)
            assert trust.public_pin(OTHER).hex()[:16] in str(caught.value)
            assert "same token" in str(caught.value)
            assert TOKEN.decode() not in str(caught.value)

        connect(trust.server_context(OTHER), talk)

    def test_each_coordinator_shows_another_certificate_with_the_same_key(self) -> None:
        shown: list[bytes | None] = []

        def talk(end: ssl.SSLSocket) -> None:
            trust.check_pin(end, TOKEN)
            shown.append(end.getpeercert(binary_form=True))

        for _ in range(2):
            connect(trust.server_context(TOKEN), talk)
        assert shown[0] != shown[1]

    def test_older_tls_is_refused_by_the_client(self) -> None:
        with pytest.raises(OSError):
            connect(only_tls_1_2(trust.server_context(TOKEN)), lambda end: None)

    def test_older_tls_is_refused_by_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        old = only_tls_1_2(trust.client_context())
        monkeypatch.setattr(trust, "client_context", lambda: old)
        with pytest.raises(OSError):
            connect(trust.server_context(TOKEN), lambda end: None)

    def test_before_the_handshake_there_is_nothing_to_trust(self) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = trust.client_context().wrap_bio(incoming, outgoing, server_hostname="node-7")
        with pytest.raises(trust.PinError, match=r"has pin \(none\)"):
            trust.check_pin(end, TOKEN)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """One text cut into three fields in two ways: what an ambiguous encoding would confuse."""
    text = draw(st.text(st.characters(), max_size=9))
    ends = st.lists(st.integers(0, len(text)), min_size=2, max_size=2).map(sorted)
    (a, b), (c, d) = draw(ends), draw(ends)
    return [text[:a], text[a:b], text[b:]], [text[:c], text[c:d], text[d:]]


class TestProof:
    @given(tokens, words.filter(bool), words, words)
    def test_what_was_proved_is_accepted(self, token: bytes, nonce: str, run_id: str, node: str) -> None:
        assert trust.proven(token, nonce, run_id, node, trust.prove(token, nonce, run_id, node))

    @given(tokens, tokens, words.filter(bool))
    def test_only_by_the_same_token(self, token: bytes, other: bytes, nonce: str) -> None:
        assert trust.proven(token, nonce, "run", "n1", trust.prove(other, nonce, "run", "n1")) == (token == other)

    @given(two_cuts())
    @settings(max_examples=300)
    def test_only_for_the_same_fields(self, cuts: tuple[list[str], list[str]]) -> None:
        (nonce, run_id, node), other = cuts
        proof = trust.prove(TOKEN, *other)
        assert trust.proven(TOKEN, nonce, run_id, node, proof) == ([nonce, run_id, node] == other and nonce != "")

    @given(words)
    def test_nothing_else_is_a_proof(self, proof: str) -> None:
        assert not trust.proven(TOKEN, "nonce", "run", "n1", proof)

    def test_not_for_an_empty_nonce(self) -> None:
        assert not trust.proven(TOKEN, "", "run", "n1", trust.prove(TOKEN, "", "run", "n1"))


GUARDIAN = """
import sys
before = set(sys.modules)
sys.modules["cryptography"] = None
from keepstep.launcher import trust
print(trust.prove_fence(bytes.fromhex(sys.argv[1]), "n1", 77, "boot"))
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - sys.stdlib_module_names - {"keepstep", "cryptography"} | loaded & {"ssl"}))
"""


class TestFence:
    @given(st.none() | tokens, words, words, st.integers(0, 1 << 22), words)
    def test_what_was_proved_is_accepted(
        self, token: bytes | None, run_id: str, node: str, pid: int, boot_id: str
    ) -> None:
        key = trust.fence_key(token, run_id)
        proof = trust.prove_fence(key, node, pid, boot_id)
        assert trust.fence_proven(key, node, pid, boot_id, proof)
        assert not trust.fence_proven(key, node, pid + 1, boot_id, proof)
        assert not trust.fence_proven(key, node + "x", pid, boot_id, proof)
        assert not trust.fence_proven(key, node, pid, boot_id + "x", proof)
        assert not trust.fence_proven(trust.fence_key(token, run_id + "x"), node, pid, boot_id, proof)
        assert not trust.fence_proven(key, node, pid, boot_id, "\udc80" + proof)

    def test_its_key_is_good_for_nothing_else(self) -> None:
        key = trust.fence_key(TOKEN, "run")
        assert key not in (trust.fence_key(None, "run"), trust.fence_key(OTHER, "run"))
        assert not trust.proven(TOKEN, "n1", "77", "boot", trust.prove_fence(key, "n1", 77, "boot"))

    def test_the_guardian_needs_the_standard_library_only(self) -> None:
        key = trust.fence_key(TOKEN, "run")
        command = [sys.executable, "-c", GUARDIAN, key.hex()]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        assert trust.fence_proven(key, "n1", 77, "boot", said[0])
        assert said[1] == "[]"
