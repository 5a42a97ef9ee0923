"""`keepstep run`: torchrun's flags as the installed torch has them, PET_* variables, mistakes, and what becomes of them."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.run import run as run_command
from tests.cli.plans import plan, run

pytestmark = pytest.mark.usefixtures("shell")


def torch_flags() -> list[argparse.Action]:
    """Options of the installed torch's own parser."""
    from torch.distributed.run import get_args_parser

    return [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]


def sample(action: argparse.Action) -> list[str]:
    """A value that the flag takes, [] for a switch."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [next(iter(action.choices))]
    if action.dest == "signals_to_handle":
        return ["SIGTERM,SIGINT"]
    if action.dest in ("rdzv_conf",):
        return ["timeout=60"]
    if action.dest in ("rdzv_backend",):
        return ["c10d"]
    return ["0.5" if action.type is float else "1"]


@pytest.fixture
def repository() -> Path:
    """Root of the source tree."""
    return Path(__file__).parents[2]


SPELLINGS = [(a, option) for a in torch_flags() for option in a.option_strings]


class TestTorchrunsFlags:
    @pytest.mark.parametrize(("action", "option"), SPELLINGS, ids=[o for _, o in SPELLINGS])
    def test_every_spelling_is_taken(self, action: argparse.Action, option: str) -> None:
        assert plan(option, *sample(action))["origins"][action.dest] == "flag"

    def test_defaults_are_torchruns_but_for_those_in_the_decision_record(self, repository: Path) -> None:
        from torch.distributed.run import get_args_parser

        theirs = vars(get_args_parser().parse_args(["train.py"]))
        with run_command.make_context("run", ["train.py"]) as ctx:
            ours = ctx.params
        record = (repository / "docs" / "decisions" / "0003-torchrun-defaults.md").read_text()
        rows = [row.strip("|").split("|") for row in record.splitlines() if row.startswith("| `--")]
        told = {
            row[0].strip().strip("`-").replace("-", "_"): tuple(c.strip().strip("`") for c in row[1:3]) for row in rows
        }
        assert all(row[3].strip() for row in rows)
        names = {action.dest for action in torch_flags()}
        differ = {n: (str(theirs[n]), str(ours[n])) for n in names if theirs[n] != ours[n]}
        assert differ == told

    @pytest.mark.parametrize(
        ("action", "option"),
        [(a, o) for a, o in SPELLINGS if a.nargs != 0 and o.startswith("--")],
        ids=[o for a, o in SPELLINGS if a.nargs != 0 and o.startswith("--")],
    )
    def test_with_an_equals_sign_too(self, action: argparse.Action, option: str) -> None:
        assert plan(f"{option}={sample(action)[0]}")["origins"][action.dest] == "flag"

    @pytest.mark.parametrize(
        "action", [a for a in torch_flags() if type(a).__name__ in ("env", "check_env")], ids=lambda a: str(a.dest)
    )
    def test_every_variable_is_read(self, action: argparse.Action, monkeypatch: pytest.MonkeyPatch) -> None:
        name = f"PET_{action.dest.upper()}"
        monkeypatch.setenv(name, (sample(action) or ["1"])[0])
        assert plan()["origins"][action.dest] == name

    def test_a_variable_that_torchrun_does_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_NUMA_BINDING", "node")
        assert plan()["origins"]["numa_binding"] == "default"

    @pytest.mark.parametrize(
        "args",
        [
            ("--numa-binding", "node"),
            ("--logs-specs", "x"),
            ("--event-log-handler", "console"),
            ("--duplicate-stdout-filters", "a,b"),
            ("--rdzv-conf", "close_timeout=3"),
        ],
    )
    def test_what_has_no_effect_is_said(self, args: tuple[str, str]) -> None:
        result = run(*args, "--dry-run", "train.py")
        assert result.exit_code == 0
        assert f"{args[0]}" in result.stderr
        assert "has no effect here; " in result.stderr

    def test_nothing_is_said_without_such_a_flag(self) -> None:
        assert run("--monitor-interval", "0.5", "--dry-run", "train.py").stderr == ""

    @pytest.mark.parametrize("option", ["-h", "--help"])
    def test_help(self, option: str) -> None:
        result = run(option)
        assert (result.exit_code, "--nproc-per-node" in result.stdout) == (0, True)

    def test_values_arrive(self) -> None:
        config = plan(
            *("--nnodes", "1", "--nproc_per_node", "3", "--rdzv-id", "job.7", "--max-restarts=4", "--role", "trainer"),
            *("--master-addr", "127.0.0.1", "--master_port", "1234", "-t", "3", "-r", "0:1,1:2", "--log-dir", "logs"),
            *("--local-ranks-filter", "0,2", "--rdzv-conf", "join_timeout=9,lease=2,read_timeout=3"),
        )
        expected = {
            "nnodes": 1,
            "nproc": 3,
            "run_id": "job.7",
            "max_restarts": 4,
            "role": "trainer",
            "master_addr": "127.0.0.1",
            "master_port": 1234,
            "tee": "3",
            "redirects": "0:1,1:2",
            "log_dir": "logs",
            "local_ranks_filter": [0, 2],
            "join_timeout_s": 9.0,
            "lease_s": 2.0,
        }
        assert {k: config[k] for k in expected} == expected

    @pytest.mark.parametrize(("text", "count"), [("2", 2), ("cpu", os.cpu_count()), ("3:3", None)])
    def test_ranks_on_this_node(self, text: str, count: int | None) -> None:
        if count is None:
            assert run("--nproc-per-node", text, "--dry-run", "train.py").exit_code == 2
        else:
            assert plan("--nproc-per-node", text)["nproc"] == count

    @pytest.mark.parametrize(
        ("flags", "mode"), [([], "script"), (["-m"], "module"), (["--module"], "module"), (["--no-python"], "exec")]
    )
    def test_what_the_script_is(self, flags: list[str], mode: str) -> None:
        config = plan(*flags, script=("what", "--lr", "1", "-m", "--nnodes", "9", "--", "x"))
        assert (config["mode"], config["script"]) == (mode, "what")
        assert config["args"] == ["--lr", "1", "-m", "--nnodes", "9", "--", "x"]
        assert config["nnodes"] == 1

    def test_a_double_dash_before_the_script(self) -> None:
        assert plan(script=("--", "train.py", "--x"))["args"] == ["--x"]

    def test_standalone_ignores_the_rendezvous(self) -> None:
        config = plan("--standalone", "--nnodes", "4", "--rdzv-id", "x", "--rdzv-endpoint", "far-away:1")
        assert config["nnodes"] == 1
        assert config["run_id"] != "x"


class TestPrecedence:
    def test_flag_over_variable_over_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = plan()
        assert (config["max_restarts"], config["origins"]["max_restarts"]) == (10, "default")
        monkeypatch.setenv("PET_MAX_RESTARTS", "5")
        config = plan()
        assert (config["max_restarts"], config["origins"]["max_restarts"]) == (5, "PET_MAX_RESTARTS")
        config = plan("--max_restarts", "7")
        assert (config["max_restarts"], config["origins"]["max_restarts"]) == (7, "flag")

    def test_a_flag_that_repeats_the_default_is_still_a_flag(self) -> None:
        assert plan("--max-restarts", "10")["origins"]["max_restarts"] == "flag"

    @pytest.mark.parametrize(
        ("value", "mode", "origin"), [("1", "module", "PET_MODULE"), ("0", "script", "PET_MODULE")]
    )
    def test_switches_by_variable(self, value: str, mode: str, origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_MODULE", value)
        config = plan()
        assert (config["mode"], config["origins"]["module"]) == (mode, origin)

    def test_the_switch_wins_over_its_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_MODULE", "0")
        assert plan("-m")["mode"] == "module"

    def test_our_own_flags_read_no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_STOP_GRACE", "99")
        assert plan()["stop_grace_s"] == 15.0

    def test_stop_grace_over_shutdown_timeout(self) -> None:
        assert plan("--shutdown-timeout", "3")["stop_grace_s"] == 3.0
        assert plan("--shutdown-timeout", "3", "--stop-grace", "4")["stop_grace_s"] == 4.0

    def test_torchruns_variable_for_the_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
        config = plan()
        assert (config["stop_grace_s"], config["origins"]["stop_grace"]) == (9.0, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        assert plan("--shutdown-timeout", "3")["stop_grace_s"] == 3.0
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
        result = run("--dry-run", "train.py")
        assert (result.exit_code, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'" in result.stderr) == (2, True)

    def test_run_json_holds_the_configuration_and_its_origins(
        self, shell: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (shell / "broken.py").write_text("def f(:\n")
        monkeypatch.setenv("PET_MAX_RESTARTS", "5")
        monkeypatch.setenv("PET_ROLE", "from-variable")
        result = run("--run-dir", "here", "--role", "from-flag", "broken.py")
        assert result.exit_code == 42
        config = json.loads((shell / "here" / "run.json").read_text())
        assert (config["max_restarts"], config["role"], config["nproc"]) == (5, "from-flag", 1)
        origins = {k: config["origins"][k] for k in ("max_restarts", "role", "nproc_per_node", "run_dir")}
        assert origins == {
            "max_restarts": "PET_MAX_RESTARTS",
            "role": "flag",
            "nproc_per_node": "default",
            "run_dir": "flag",
        }


class TestRunIdAndFolder:
    def test_without_an_id_each_run_has_its_own(self, shell: Path) -> None:
        first, second = plan(), plan()
        assert first["run_id"] != second["run_id"]
        assert first["run_dir"] == str(shell / "home" / "runs" / first["run_id"])

    def test_the_folders_name_is_the_id(self, shell: Path) -> None:
        config = plan("--run-dir", "some/place")
        assert (config["run_id"], config["run_dir"]) == ("place", str(shell / "some" / "place"))

    def test_the_schedulers_job_is_the_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        assert plan()["run_id"] == "4711"
        assert plan("--rdzv-id", "mine")["run_id"] == "mine"

    def test_node_names(self) -> None:
        host = socket.gethostname().partition(".")[0]
        assert plan()["node"] == host
        several = ("--nnodes", "2", "--rdzv-id", "x")
        assert plan(*several, "--node-rank", "1")["node"] == f"{host}-1"
        assert plan(*several, "--node-rank", "1", "--node-name", "left")["node"] == "left"


TWO = ["--nnodes", "2", "--rdzv-id", "x"]

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["--nnodes", "0"], ["--nnodes '0'", "N >= 1"]),
    (["--nnodes", "x"], ["--nnodes 'x'"]),
    (["--nnodes", "3:2"], ["--nnodes '3:2'", "MIN 3 is more than MAX 2"]),
    (["--nnodes", "0:2"], ["--nnodes '0:2'"]),
    (["--nnodes", "1:2:3"], ["--nnodes '1:2:3'"]),
    (["--nnodes", "1:2"], ["--nnodes 1:2", "--rdzv-id"]),
    (["--spares", "1"], ["--nnodes 1:1 --spares 1", "--rdzv-id"]),
    (["--spares", "-1"], ["--spares", "-1"]),
    (["--spares", "1", "--standalone"], ["--spares 1", "--standalone"]),
    (["--replica-size", "0"], ["--replica-size", "0"]),
    (["--replica-size", "4", "--nproc-per-node", "2"], ["--replica-size 4", "2 ranks", "--nproc-per-node"]),
    ([*TWO, "--nproc-per-node", "3", "--replica-size", "4"], ["--replica-size 4", "6 ranks"]),
    (["--nnodes", "1:2", "--rdzv-id", "x", "--replica-size", "2"], ["--replica-size 2", "1 nodes (at least)"]),
    (["--topology", "gone.toml"], ["--topology 'gone.toml'", "no such file"]),
    ([*TWO, "--rdzv-endpoint", "a:x"], ["--rdzv-endpoint 'a:x'", "HOST:PORT"]),
    ([*TWO, "--rdzv-endpoint", "a:0"], ["--rdzv-endpoint 'a:0'"]),
    ([*TWO, "--rdzv-endpoint", "a:70000"], ["--rdzv-endpoint 'a:70000'", "65535"]),
    ([*TWO, "--rdzv-endpoint", "a,,b"], ["--rdzv-endpoint 'a,,b'"]),
    ([*TWO, "--rdzv-endpoint", "fe80::1"], ["--rdzv-endpoint 'fe80::1'", "brackets"]),
    ([*TWO, "--rdzv-endpoint", "a,a:29400"], ["--rdzv-endpoint", "a:29400 is given twice"]),
    ([*TWO, "--master-addr", "a b"], ["--master-addr 'a b'"]),
    (["--local-addr", "10.0.0.1:5"], ["--local-addr '10.0.0.1:5'", "without a port"]),
    (["--max-no-progress-cycles", "-1"], ["--max-no-progress-cycles", "-1"]),
    (["--min-progress-iterations", "0"], ["--min-progress-iterations", "0"]),
    (["--no-restart-exit-code", "0"], ["--no-restart-exit-code", "0"]),
    (["--no-restart-exit-code", "256"], ["--no-restart-exit-code", "256"]),
    (["--gpu-memory-reclaim-timeout", "-1"], ["--gpu-memory-reclaim-timeout -1", "at least 0"]),
    (["--gpu-memory-tolerance-mb", "x"], ["--gpu-memory-tolerance-mb x", "megabytes"]),
    (["--gpu-memory-poll-interval", "0"], ["--gpu-memory-poll-interval 0", "above 0"]),
    (["--preempt-notice", "0"], ["--preempt-notice 0"]),
    (["--out-of-section-timeout", "inf"], ["--out-of-section-timeout inf"]),
    (["--start-timeout", "0"], ["--start-timeout 0"]),
    (["--node-check", "4"], ["--node-check", "4"]),
    (["--attribution-stop", "yes"], ["--attribution-stop", "'yes'"]),
    (["--log-port", "0"], ["--log-port", "0"]),
    (["--server", "http://x"], ["--server 'http://x'", "no keepstep server yet"]),
    (["--policy", "p.yaml"], ["--policy 'p.yaml'", "no policy files yet"]),
    (["--hang-timeout", "inf"], ["--hang-timeout 'inf'"]),
    (["--numa-binding", "left"], ["--numa-binding", "'left'"]),
    (["--nnodes", "2"], ["--nnodes 2", "--rdzv-id"]),
    (["--nproc-per-node", "0"], ["--nproc-per-node '0'"]),
    (["--nproc_per_node", "many"], ["--nproc-per-node 'many'"]),
    (["--rdzv-backend", "etcd"], ["--rdzv-backend 'etcd'", "c10d"]),
    (["--rdzv-id", "a/b"], ["--rdzv-id 'a/b'"]),
    (["--rdzv-id", ".."], ["--rdzv-id '..'"]),
    (["--rdzv-conf", "join_timeuot=3"], ["--rdzv-conf 'join_timeuot=3'", "nearest: join_timeout"]),
    (["--rdzv-conf", "store_type=file"], ["--rdzv-conf 'store_type=file'"]),
    (["--rdzv-conf", "lease=soon"], ["--rdzv-conf 'lease=soon'"]),
    (["--rdzv-conf", "lease=-1"], ["--rdzv-conf 'lease=-1'"]),
    (["--rdzv-conf", "lease=nan"], ["--rdzv-conf 'lease=nan'"]),
    (["--rdzv-conf", "lease"], ["--rdzv-conf 'lease'", "KEY=VALUE"]),
    (["--max-restarts", "-1"], ["--max-restarts", "-1"]),
    (["--max-restarts", "x"], ["--max-restarts", "'x'"]),
    (["--master-port", "70000"], ["--master-port", "70000"]),
    (["--monitor-interval", "x"], ["--monitor-interval", "'x'"]),
    (["--start-method", "thread"], ["--start-method", "'thread'"]),
    (["-t", "4"], ["--tee '4'"]),
    (["--redirects", "0:4"], ["--redirects '0:4'"]),
    (["--local-ranks-filter", "0,x"], ["--local-ranks-filter '0,x'"]),
    (["--hang-timeout", "soon"], ["--hang-timeout 'soon'", "auto, off"]),
    (["--hang-timeout", "0"], ["--hang-timeout '0'"]),
    (["--hang-timeout", "nan"], ["--hang-timeout 'nan'"]),
    (["--section-timeout", "data"], ["--section-timeout 'data'", "NAME=SECONDS"]),
    (["--section-timeout", "data=x"], ["--section-timeout 'data=x'"]),
    (["--section-timeout", "data=0"], ["--section-timeout 'data=0'"]),
    (["--section-timeout", "data=nan"], ["--section-timeout 'data=nan'"]),
    (["--section-timeout", "=5"], ["--section-timeout '=5'"]),
    (["--stop-grace", "-1"], ["--stop-grace", "-1"]),
    (["--stop-grace", "nan"], ["--stop-grace nan"]),
    (["--node-name", "../up"], ["--node-name '../up'"]),
    (["--inject", "kil@step=1"], ["--inject 'kil@step=1'", "unknown kind"]),
    (["--signals-to-handle", "SIGNONE"], ["--signals-to-handle", "SIGNONE"]),
    (["--no-such-flag"], ["--no-such-flag"]),
]


class TestMistakes:
    @pytest.mark.parametrize(("args", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
    def test_names_flag_and_value_and_exits_2(self, args: list[str], parts: list[str], shell: Path) -> None:
        result = run(*args, "train.py")
        assert (result.exit_code, result.stdout) == (2, "")
        for part in parts:
            assert part in result.stderr
        assert "Traceback" not in result.stderr
        assert sorted(os.listdir(shell)) == ["train.py"]

    def test_a_variables_value_is_checked_like_the_flags(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_NNODES", "many")
        result = run("train.py")
        assert (result.exit_code, "--nnodes 'many'" in result.stderr) == (2, True)

    def test_no_script(self) -> None:
        result = run("--nnodes", "1")
        assert (result.exit_code, "SCRIPT" in result.stderr) == (2, True)

    @pytest.mark.parametrize(("script", "what"), [("gone.py", "no such file"), ("folder", "is a folder")])
    def test_a_script_that_cannot_be_read(self, script: str, what: str, shell: Path) -> None:
        (shell / "folder").mkdir()
        result = run(script)
        assert result.exit_code == 2
        assert f"script '{script}': {what} (working directory {shell}); for a module use -m" in result.stderr
        assert not (shell / "home").exists()

    def test_a_script_that_does_not_compile_ends_with_42_before_any_rank(self, shell: Path) -> None:
        (shell / "broken.py").write_text("x = 1\ndef f(:\n")
        result = run("--run-dir", "here", "broken.py")
        assert result.exit_code == 42
        assert "broken.py does not compile; no rank was started" in result.stderr
        assert "line 2" in result.stderr
        verdict = json.loads((shell / "here" / "verdict.json").read_text())
        assert (verdict["outcome"], verdict["exit_code"], verdict["cause"]) == ("failed", 42, "code_bug")
        assert "SyntaxError" in verdict["traceback"]
        assert not list((shell / "here" / "cycles").iterdir())

    def test_a_verdict_of_an_earlier_life_is_set_aside(self, shell: Path) -> None:
        (shell / "broken.py").write_text("def f(:\n")
        for _ in range(3):
            # Processes of their own: the lead of a run ends with its process.
            command = [sys.executable, "-m", "keepstep.cli.main", "run", "--run-dir", "here", "broken.py"]
            assert subprocess.run(command, capture_output=True, check=False).returncode == 42
        names = sorted(p.name for p in (shell / "here").glob("verdict*"))
        assert names == ["verdict-0000.json", "verdict-0001.json", "verdict.json"]


class TestDryRun:
    def test_it_starts_nothing_and_writes_nothing(self, shell: Path) -> None:
        plan("--inject", "kill@step=1", "--run-dir", "here")
        assert sorted(os.listdir(shell)) == ["train.py"]

    def test_it_shows_every_rule_in_its_order(self) -> None:
        from keepstep.launcher.coordination.rules import RULES

        shown = run("--dry-run", "train.py").stdout.partition("restart rules")[2].partition("environment")[0]
        lines = shown.splitlines()[1:]
        assert [line.split(". ", 1)[1] for line in lines] == [text for text, _ in RULES]

    def test_it_needs_no_script_that_exists(self) -> None:
        assert plan(script=("not-there-yet.py",))["script"] == "not-there-yet.py"

    def test_injections_and_limits_as_understood(self) -> None:
        config = plan("--inject", "kill@step=3,rank=1", "--inject", "preempt@seconds=2", "--section-timeout", "data=5")
        assert [(i["kind"], i.get("step"), i.get("seconds")) for i in config["inject"]] == [
            ("kill", 3, None),
            ("preempt", None, 2.0),
        ]
        assert config["section_timeouts_s"] == {"data": 5.0}
