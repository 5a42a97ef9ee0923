"""Flags of `keepstep run` about trust: checked before anything starts, and found again by ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint.trust.keys import public_pem
from keepstep.checkpoint.trust.policy import TrustOptions, options_from_environment, policy_from_environment
from keepstep.launcher.config import RunConfig
from keepstep.launcher.ranks.environment import cycle_environment
from tests.checkpoint.authority import IDENTITY, ISSUER, new_authority, new_key, pem, write
from tests.cli.plans import plan, run

pytestmark = pytest.mark.usefixtures("shell")


def rank_environment(*flags: str) -> dict[str, str]:
    import msgspec

    config = msgspec.convert(plan(*flags), RunConfig)
    return cycle_environment(config, None, 0, Path("/nowhere"), None, None)


def test_ranks_find_what_the_flags_say(shell: Path) -> None:
    write(shell / "a.pub", public_pem(new_key().public_key()))
    write(shell / "root.pem", pem(new_authority().root))
    flags = [
        *("--trust-key", "a.pub", "--trust_identity", IDENTITY, "--trust-issuer", ISSUER, "--trust-root", "root.pem"),
        *("--ckpt-signer", "openssl dgst -sign 'my key'", "--ckpt-signer-cert", "a.pub"),
    ]
    env = rank_environment(*flags)
    assert options_from_environment(env) == TrustOptions(
        trust_key=(str(shell / "a.pub"),),
        trust_identity=(IDENTITY,),
        trust_issuer=(ISSUER,),
        trust_root=(str(shell / "root.pem"),),
        ckpt_signer="openssl dgst -sign 'my key'",
        ckpt_signer_cert=str(shell / "a.pub"),
    )
    policy = policy_from_environment(env)
    assert len(policy.keys) == 1 and policy.identities == ((IDENTITY, ISSUER),)
    assert f"KEEPSTEP_TRUST_IDENTITY={IDENTITY}  [keepstep]" in run(*flags, "--dry-run", "train.py").stdout


def test_flags_go_before_variables_and_open_ones_stay(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.pub", "b.pub"):
        write(shell / name, public_pem(new_key().public_key()))
    monkeypatch.setenv("KEEPSTEP_TRUST_KEY", str(shell / "a.pub"))
    assert options_from_environment(rank_environment()).trust_key == (str(shell / "a.pub"),)
    assert options_from_environment(rank_environment("--trust-key", "b.pub")).trust_key == (str(shell / "b.pub"),)


def test_unsigned() -> None:
    assert options_from_environment(rank_environment("--unsigned")).unsigned
    assert rank_environment().get("KEEPSTEP_UNSIGNED") is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trust-key", "nowhere.pub"], "--trust-key 'nowhere.pub': no such file"),
        (["--trust-key", "train.py"], "train.py is not a PEM public key"),
        (["--trust-root", "train.py"], "nobody is trusted by a root alone"),
        (["--trust-identity", "a@b"], "--trust-identity 'a@b' has no --trust-issuer"),
        (["--trust-identity", "a@b", "--trust-issuer", "u"], "needs --trust-root PEM"),
        (["--trust-identity", "a b", "--trust-issuer", "u"], "without spaces"),
        (["--ckpt-signer", "true"], "needs --ckpt-signer-cert"),
        (["--ckpt-signer", "true", "--ckpt-signer-cert", "train.py"], "neither a PEM public key nor"),
    ],
)
def test_mistakes_show_before_anything_starts(flags: list[str], message: str) -> None:
    result = run(*flags, "--dry-run", "train.py")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_a_contradiction_with_the_environment(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_TRUST_KEY", write(shell / "a.pub", public_pem(new_key().public_key())))
    result = run("--unsigned", "--dry-run", "train.py")
    assert result.exit_code == 2 and "--unsigned and --trust-key contradict each other" in result.stderr


def test_a_missing_key_of_ours_is_not_made_by_asking(shell: Path) -> None:
    plan("--unsigned")
    plan()
    assert not (shell / "home" / "keys").exists()
