"""Flags about object stores and busy saves: checked before anything starts, and found again by ranks and by `keepstep ckpt`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from keepstep.checkpoint.storage.source import StoreOptions, store_environment, store_options
from keepstep.cli.main import main
from keepstep.launcher.config import RunConfig
from keepstep.launcher.ranks.environment import cycle_environment
from keepstep.records.errors import ConfigError
from keepstep.trainer.tiers import busy_policy
from tests.cli.plans import plan, run

pytestmark = pytest.mark.usefixtures("shell")


def ckpt(*args: str) -> Result:
    return CliRunner().invoke(main, ["ckpt", *args])


def rank_environment(*flags: str) -> dict[str, str]:
    config = msgspec.convert(plan(*flags), RunConfig)
    return cycle_environment(config, None, 0, Path("/nowhere"), None, None)


def test_ranks_find_what_the_flags_say() -> None:
    flags = ["--store-endpoint", "https://s3.local:9000", "--store_region", "eu-1", "--kms-key", "alias/ckpt"]
    flags += ["--store-allow-http", "--on-busy", "skip"]
    env = rank_environment(*flags)
    expected = StoreOptions(endpoint="https://s3.local:9000", region="eu-1", kms_key="alias/ckpt", allow_http=True)
    assert store_options(None, env) == expected
    assert store_options(StoreOptions(region="us-2", parallel=3), env) == msgspec.structs.replace(
        expected, region="us-2", parallel=3
    )
    assert busy_policy(None, env) == "skip" and busy_policy("wait", env) == "wait"
    assert "KEEPSTEP_STORE_REGION=eu-1  [keepstep]" in run(*flags, "--dry-run", "train.py").stdout


def test_without_flags_the_variables_of_the_shell_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [name for name in rank_environment() if "STORE" in name and name.startswith("KEEPSTEP")]
    assert busy_policy(None, {}) == "wait" and store_options(None, {}) == StoreOptions()
    monkeypatch.setenv("KEEPSTEP_STORE_REGION", "eu-1")
    monkeypatch.setenv("KEEPSTEP_ON_BUSY", "skip")
    env = rank_environment("--store-endpoint", "https://h")
    assert store_options(None, env) == StoreOptions(endpoint="https://h", region="eu-1")
    assert busy_policy(None, env) == "skip"
    assert store_options(None, store_environment(StoreOptions(allow_http=True))).allow_http


def test_the_configuration_file_has_the_same_names(shell: Path) -> None:
    (shell / "job.toml").write_text('on-busy = "skip"\nkms-key = "k"\nstore-endpoint = "https://h"\n')
    config = msgspec.convert(plan("--config", "job.toml", "--kms-key", "other"), RunConfig)
    assert (config.on_busy, config.kms_key, config.store_endpoint) == ("skip", "other", "https://h")
    (shell / "job.toml").write_text('\nstore-endpoint = "h"\n')
    assert "job.toml:2: --store-endpoint 'h': give https://HOST" in run("--config", "job.toml", "train.py").stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on-busy", "drop"], "'drop' is not one of"),
        (["--store-endpoint", "s3.local"], "--store-endpoint 's3.local': give https://HOST"),
        (["--store-endpoint", "https://me:word@h"], "without user and password"),
        (["--store-endpoint", "http://h"], "has no TLS; use https://, or --store-allow-http"),
    ],
)
def test_mistakes_show_before_anything_starts(flags: list[str], message: str) -> None:
    result = run(*flags, "--dry-run", "train.py")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_ckpt_verbs_take_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    result = ckpt("ls", "s3://bucket/ckpt", "--store-endpoint", "http://h")
    assert result.exit_code == 2 and "--store-allow-http" in result.stderr
    monkeypatch.setenv("KEEPSTEP_STORE_ENDPOINT", "http://h")
    result = ckpt("ls", "s3://bucket/ckpt")
    assert result.exit_code == 2 and "'http://h' has no TLS" in result.stderr


def test_bad_variables() -> None:
    with pytest.raises(ConfigError, match="KEEPSTEP_STORE_ALLOW_HTTP='yes': give 1 or 0"):
        store_options(None, {"KEEPSTEP_STORE_ALLOW_HTTP": "yes"})
    with pytest.raises(ConfigError, match="KEEPSTEP_ON_BUSY='drop' is not one of wait, skip"):
        busy_policy(None, {"KEEPSTEP_ON_BUSY": "drop"})
