"""Flags of ft_launcher: taken for ours where they mean the same, else refused with what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.ft_flags import FT_FLAGS, SWITCHES, FtFlag, spellings
from tests.cli.plans import plan, run

pytestmark = pytest.mark.usefixtures("shell")

FT_LAUNCHER = """
    term-timeout workers-stop-timeout ft-cfg-path ft-ignore-missing-cfg
    ft-workload-check-interval ft-initial-rank-heartbeat-timeout ft-rank-heartbeat-timeout ft-rank-section-timeouts
    ft-rank-out-of-section-timeout ft-safety-factor ft-skip-section-response ft-rank-termination-signal ft-log-level
    ft-restart-check-interval ft-node-health-check-interval ft-node-health-check-endpoint ft-enable-nic-monitor
    ft-enable-nic-healthcheck ft-pci-topo-file ft-link-down-path-template ft-link-state-path-template
    ft-enable-dist-storage-healthcheck ft-storage-health-check-path ft-segment-health-check-dir
    ft-restart-policy ft-rdzv-impl ft-segment ft-max-no-progress-cycles ft-min-progress-iterations
    ft-checkpoint-iteration-file ft-no-restart-exit-code ft-gpu-memory-reclaim-timeout ft-gpu-memory-tolerance-mb
    ft-gpu-memory-poll-interval ft-check-remaining-processes ft-install-exception-hook ft-numa-bind-strict
    ft-cycle-info-dir ft-cycle-info-job-id ft-per-cycle-applog-prefix ft-nvrx-logfile ft-enable-log-server
    ft-log-server-port ft-log-aggregator-count ft-log-leaf-max-queue-chunks ft-log-server-log-prefix
    ft-log-server-graceful-shutdown-timeout ft-attribution-endpoint ft-attribution-startup-timeout
    ft-attribution-llm-api-key-file ft-attribution-llm-base-url ft-attribution-llm-model
    ft-attribution-analysis-backend ft-attribution-stop-action ft-attribution-log-level ft-attribution-export-url
"""
"""Every flag of ft_launcher 0.7.0 besides torchrun's."""

MAPPED: list[tuple[str, str, str, object]] = [
    ("term-timeout", "60", "preempt_notice_s", 60.0),
    ("workers-stop-timeout", "7", "stop_grace_s", 7.0),
    ("ft-initial-rank-heartbeat-timeout", "600", "start_hang_s", 600.0),
    ("ft-initial-rank-heartbeat-timeout", "null", "start_hang_s", 1800.0),
    ("ft-rank-heartbeat-timeout", "45", "monitor_hang", "45"),
    ("ft-rank-heartbeat-timeout", "none", "monitor_hang", "auto"),
    ("ft-rank-section-timeouts", "setup:1800,step:3.5", "section_timeouts_s", {"setup": 1800.0, "step": 3.5}),
    ("ft-rank-section-timeouts", "null", "section_timeouts_s", {}),
    ("ft-rank-out-of-section-timeout", "90", "out_of_section_s", 90.0),
    ("ft-rank-out-of-section-timeout", "", "out_of_section_s", None),
    ("ft-max-no-progress-cycles", "5", "max_no_progress_cycles", 5),
    ("ft-min-progress-iterations", "9", "min_progress_iterations", 9),
    ("ft-checkpoint-iteration-file", "/x/it", "checkpoint_iteration_file", "/x/it"),
    ("ft-no-restart-exit-code", "94", "no_restart_exit_code", 94),
    ("ft-gpu-memory-reclaim-timeout", "5.5", "gpu_memory_reclaim_timeout_s", 5.5),
    ("ft-gpu-memory-tolerance-mb", "9", "gpu_memory_tolerance_mb", 9.0),
    ("ft-gpu-memory-poll-interval", "1", "gpu_memory_poll_interval_s", 1.0),
    ("ft-per-cycle-applog-prefix", "/logs/job.log", "log_prefix", "/logs/job"),
    ("ft-log-server-port", "50051", "log_port", 50051),
    ("ft-attribution-stop-action", "NO-RESTART", "stop_on_attribution", "no-restart"),
    ("ft-restart-policy", "any-failed", "max_restarts", 10),
]

REFUSED = [row for row in FT_FLAGS if row.ours is None]


def test_every_flag_of_ft_launcher_is_in_the_table() -> None:
    assert sorted(row.name for row in FT_FLAGS) == sorted(FT_LAUNCHER.split())
    assert {row.name for row in FT_FLAGS if row.ours} == {name for name, *_ in MAPPED} - {"ft-restart-policy"}


@pytest.mark.parametrize(("name", "value", "field", "expected"), MAPPED)
def test_what_means_the_same_is_taken_in_every_spelling(name: str, value: str, field: str, expected: object) -> None:
    for spelling in spellings(name):
        assert plan(spelling, value)[field] == expected
        assert plan(f"{spelling}={value}")[field] == expected


def test_both_spellings_are_known() -> None:
    assert spellings("ft-log-level") == ["--ft-log-level", "--ft_log_level", "--ft-log_level"]
    assert spellings("term-timeout") == ["--term-timeout", "--term_timeout"]


def test_the_origin_is_a_flag() -> None:
    assert plan("--ft-rank-heartbeat-timeout", "45")["origins"]["hang_timeout"] == "flag"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_the_others_are_refused_with_what_to_use_instead(row: FtFlag, shell: Path) -> None:
    value = [] if row.name in SWITCHES else ["5"]
    for spelling in spellings(row.name):
        result = run(spelling, *value, "train.py")
        assert result.exit_code == 2
        assert f"--{row.name}" in result.stderr
        assert row.instead and " ".join(row.instead.split()) in result.stderr
    assert not (shell / "home").exists()


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--ft-no-restart-exit-code", "0"], ["--ft-no-restart-exit-code 0", "--no-restart-exit-code", "1<=x<=255"]),
        (["--ft-rank-section-timeouts", "setup"], ["--ft-rank-section-timeouts setup", "NAME:SECONDS"]),
        (["--ft-rank-section-timeouts", "setup:x"], ["--section-timeout 'setup=x'"]),
        (["--ft-rank-heartbeat-timeout", "soon"], ["--hang-timeout 'soon'"]),
        (["--workers-stop-timeout", "x"], ["--workers-stop-timeout x", "number of seconds"]),
        (["--ft-restart-policy", "min-healthy"], ["--ft-restart-policy min-healthy", "only 'any-failed'"]),
        (
            ["--ft-max-no-progress-cycles", "5", "--max-no-progress-cycles", "5"],
            ["--ft-max-no-progress-cycles 5", "keep one"],
        ),
    ],
)
def test_mistakes_name_both_flags(args: list[str], parts: list[str]) -> None:
    result = run(*args, "train.py")
    assert result.exit_code == 2
    for part in parts:
        assert part in result.stderr


def test_they_are_not_in_the_help() -> None:
    assert "--ft-" not in run("--help").stdout


def test_the_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "torchrun-flags.md").read_text()
    for row in FT_FLAGS:
        where = f"`--{row.ours}`" if row.ours else f"only `{row.only}`: {row.instead}" if row.only else row.instead
        assert f"| `--{row.name}` | {where} |" in page
