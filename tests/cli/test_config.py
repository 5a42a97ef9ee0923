"""--config FILE and `keepstep config`: strict reading, precedence, where each value is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.config_file import NOT_IN_FILES, read_config
from keepstep.cli.main import main
from keepstep.cli.run import run as run_command
from tests.cli.plans import plan, run

pytestmark = pytest.mark.usefixtures("shell")

GOOD = """\
nnodes = "2:4"
rdzv-id = "job7"
max_restarts = 3
hang-timeout = 600
preload = ["torch", "mine"]
rdzv-endpoint = ["h1", "h2:5"]
no-zygote = true
tee = 3
inject = ["kill@step=3"]
stop-grace = 2.5

[section-timeout]
data = 5
"a b" = 7.5

[rdzv-conf]
join_timeout = 900
"""


def config(*args: str) -> Result:
    return CliRunner().invoke(main, ["config", *args])


class TestReading:
    def test_every_kind_of_value(self, shell: Path) -> None:
        (shell / "c.toml").write_text(GOOD)
        found = plan("--config", "c.toml")
        expected = {
            "nnodes": 4,
            "min_nodes": 2,
            "run_id": "job7",
            "max_restarts": 3,
            "monitor_hang": "600",
            "preload": ["torch", "mine"],
            "endpoints": ["h1:29400", "h2:5"],
            "zygote": False,
            "tee": "3",
            "stop_grace_s": 2.5,
            "section_timeouts_s": {"data": 5.0, "a b": 7.5},
            "join_timeout_s": 900.0,
        }
        assert {k: found[k] for k in expected} == expected
        assert [i["kind"] for i in found["inject"]] == ["kill"]
        origins = found["origins"]
        assert {origins[k] for k in ("nnodes", "no_zygote", "section_timeout", "rdzv_conf")} == {"file"}
        assert (origins["config"], origins["role"]) == ("flag", "default")

    def test_flag_over_variable_over_file(self, shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (shell / "c.toml").write_text("max-restarts = 3\nmodule = true\n")
        # The file counts wherever --config stands.
        assert plan("--max-restarts", "7", "--config", "c.toml")["max_restarts"] == 7
        monkeypatch.setenv("PET_MAX_RESTARTS", "5")
        monkeypatch.setenv("PET_MODULE", "0")
        found = plan("--config", "c.toml")
        assert (found["max_restarts"], found["origins"]["max_restarts"]) == (5, "PET_MAX_RESTARTS")
        assert (found["mode"], found["origins"]["module"]) == ("script", "PET_MODULE")

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('nnode = "2"', ["c.toml:1: nnode", "nearest: nnodes"]),
            ("\n\nspares = '1'", ["c.toml:3: spares = '1'", "whole number"]),
            ("spares = true", ["c.toml:1: spares = True", "whole number"]),
            ("spares = -1", ["c.toml:1: spares = -1", "x>=0"]),
            ("max-restarts = 1\nmax_restarts = 2", ["max_restarts: given twice"]),
            ("hang-timeout = 'soon'", ["c.toml:1: --hang-timeout 'soon'", "auto, off"]),
            ("no-zygote = 1", ["no-zygote = 1", "true or false"]),
            ("stop-grace = 'x'", ["stop-grace = 'x'", "number of seconds"]),
            ("stop-grace = nan", ["stop-grace = nan", "number of seconds"]),
            ("stop-grace = true", ["stop-grace = True", "not true or false"]),
            ("role = 2020-01-01", ["role = 2020-01-01", "a string or a number"]),
            ("role = {a = 1}", ["role = {'a': 1}"]),
            ("inject = 'kill@step=1'", ["inject = 'kill@step=1'", "array of strings"]),
            ("inject = ['kil@step=1']", ["unknown kind"]),
            ("section-timeout = {data = 0}", ["--section-timeout 'data=0'"]),
            ("start-method = 'thread'", ["start-method = 'thread'", "forkserver"]),
            ("[rdzv-conf]\njoin_timeuot = 3", ["c.toml:1: --rdzv-conf 'join_timeuot=3'", "nearest: join_timeout"]),
            ("ft-segment = 3", ["ft-segment", "command line only"]),
            ("dry-run = true", ["c.toml:1: dry-run", "command line only"]),
            ("config = 'x'", ["c.toml:1: config", "command line only"]),
            ("script = 'x'", ["c.toml:1: script", "no such setting"]),
            ("nnodes = 2\nnnodes = 3", ["'c.toml': not TOML", "overwrite a value"]),
            ("= 3", ["'c.toml': not TOML", "line 1"]),
            ("a = 1\nb = 2\nc = 3", ["c.toml:1: a", "(and 2 more: keepstep config check c.toml)"]),
        ],
    )
    def test_mistakes_are_named(self, text: str, parts: list[str], shell: Path) -> None:
        (shell / "c.toml").write_text(text)
        for result in (run("--config", "c.toml", "train.py"), config("show", "c.toml")):
            assert (result.exit_code, result.stdout) == (2, "")
            for part in parts:
                assert part in result.stderr
        assert config("check", "c.toml").exit_code == 2
        assert not (shell / "home").exists()

    @pytest.mark.parametrize(
        ("name", "content"), [("gone.toml", None), ("bytes.toml", b"\xff\xfe"), ("folder", "folder")]
    )
    def test_a_file_that_cannot_be_read(self, name: str, content: bytes | str | None, shell: Path) -> None:
        if isinstance(content, bytes):
            (shell / name).write_bytes(content)
        elif content:
            (shell / name).mkdir()
        result = run("--config", name, "train.py")
        assert (result.exit_code, f"--config '{name}': " in result.stderr) == (2, True)

    def test_every_flag_may_be_in_the_file(self) -> None:
        names = {p.name for p in run_command.params if isinstance(p, click.Option) and p.expose_value} - NOT_IN_FILES
        values: dict[str, Any] = {
            p.name: p.to_info_dict() for p in run_command.params if p.name in names and p.name is not None
        }
        assert len(values) > 50
        ctx = click.Context(run_command)
        path = Path("all.toml")
        path.write_text("".join(f"{name} = [[]]\n" for name in sorted(values)))
        read, problems = read_config(ctx, path)
        # Every one is known, and every one refuses a value of no sense.
        assert (read, len(problems)) == ({}, len(values))
        assert not any("no such setting" in problem for problem in problems)

    @given(st.dictionaries(st.text("abc-_", min_size=1, max_size=8), st.integers(0, 9), max_size=4))
    def test_nothing_that_is_no_flag_is_taken(self, table: dict[str, int]) -> None:
        path = Path("any.toml")
        path.write_text("".join(f"{key} = {value}\n" for key, value in table.items()))
        read, problems = read_config(click.Context(run_command), path)
        assert (read, len(problems)) == ({}, len(table))


class TestVerbs:
    def test_check(self, shell: Path) -> None:
        (shell / "c.toml").write_text(GOOD)
        result = config("check", "c.toml", "-o", "json")
        assert json.loads(result.stdout) == {
            "schema": "keepstep.config_check/1",
            "source": "c.toml",
            "settings": 12,
        }

    def test_check_names_every_mistake(self, shell: Path) -> None:
        (shell / "c.toml").write_text("a = 1\nspares = 'x'\nmax-restarts = -2\n")
        result = config("check", "c.toml")
        assert result.exit_code == 2
        for part in ("c.toml:1: a", "c.toml:2: spares", "c.toml:3: max-restarts"):
            assert part in result.stderr

    def test_show_a_file(self, shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (shell / "c.toml").write_text("nnodes = 2\nhang-timeout = 9\n[rdzv-conf]\nlease = 3\n")
        monkeypatch.setenv("PET_MAX_RESTARTS", "5")
        record = json.loads(config("show", "c.toml", "-o", "json").stdout)
        assert record["schema"] == "keepstep.config/1"
        settings = {s["name"]: (s["value"], s["flag"], s["origin"]) for s in record["settings"]}
        assert settings["nnodes"] == (2, "--nnodes", "file")
        assert settings["monitor_hang"] == ("9", "--hang-timeout", "file")
        assert settings["max_restarts"] == (5, "--max-restarts", "PET_MAX_RESTARTS")
        assert settings["lease_s"] == (3.0, "--rdzv-conf", "file")
        assert settings["join_timeout_s"] == (600.0, "--rdzv-conf", "default")
        assert settings["spares"] == (0, "--spares", "default")
        # No id is given: each run gets one of its own.
        assert "run_id" not in settings and "run_dir" not in settings

    def test_show_a_run(self, shell: Path) -> None:
        (shell / "broken.py").write_text("def f(:\n")
        assert run("--rdzv-id", "mine", "--max-restarts", "4", "broken.py").exit_code == 42
        for what in ("mine", str(shell / "home" / "runs" / "mine")):
            record = json.loads(config("show", what, "-o", "json").stdout)
            settings = {s["name"]: (s["value"], s["origin"]) for s in record["settings"]}
            assert settings["max_restarts"] == (4, "flag")
            assert settings["run_id"] == ("mine", "flag")
            assert settings["stop_grace_s"] == (15.0, "default")
        table = config("show", "mine", "-o", "table").stdout
        assert "max_restarts" in table and "--max-restarts" in table

    def test_a_run_that_is_not_there(self) -> None:
        result = config("show", "nowhere")
        assert (result.exit_code, "no run 'nowhere'" in result.stderr) == (6, True)

    def test_a_run_whose_record_is_broken(self, shell: Path) -> None:
        (shell / "r" / "journal").mkdir(parents=True)
        assert "r/run.json: missing" in config("show", "r").stderr
        (shell / "r" / "run.json").write_text("{")
        result = config("show", "r")
        assert (result.exit_code, "r/run.json: cannot be read" in result.stderr) == (1, True)
