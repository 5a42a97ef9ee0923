"""Formats of -o, the YAML writer and the way durations read."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.output import FORMATS, emit, format_duration_s, format_share, make_console, output_option, to_yaml


@click.command()
@click.option("--many", is_flag=True)
@output_option
def show(many: bool, output: str) -> None:
    record = {"schema": "keepstep.thing/1", "id": "a", "size_bytes": 3}
    value: Any = [record, {**record, "id": "b"}] if many else record
    emit(
        value,
        output,
        table=lambda console, wide: console.print(f"[red]table[/red] wide={wide}"),
        name=lambda r: str(r["id"]),
    )


def output_of(*args: str) -> str:
    result = CliRunner().invoke(show, args)
    assert result.exit_code == 0
    return result.stdout


class TestFormats:
    def test_frozen(self) -> None:
        assert FORMATS == ("table", "json", "jsonl", "yaml", "wide", "name")

    def test_without_a_terminal_the_default_is_json(self) -> None:
        assert json.loads(output_of()) == {"schema": "keepstep.thing/1", "id": "a", "size_bytes": 3}
        assert output_of() == output_of("-o", "json")

    def test_on_a_terminal_the_default_is_a_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal:
            def isatty(self) -> bool:
                return True

        asked: list[str] = []
        choose = click.Command("x", params=[p for p in show.params if p.name == "output"], callback=None)
        monkeypatch.setattr(sys, "stdout", Terminal())
        with choose.make_context("x", []) as ctx:
            asked.append(ctx.params["output"])
        assert asked == ["table"]

    def test_json_of_a_sequence_is_an_array(self) -> None:
        assert [r["id"] for r in json.loads(output_of("--many"))] == ["a", "b"]

    def test_jsonl_is_a_line_a_record(self) -> None:
        assert [json.loads(line)["id"] for line in output_of("--many", "-o", "jsonl").splitlines()] == ["a", "b"]
        assert len(output_of("-o", "jsonl").splitlines()) == 1

    def test_name(self) -> None:
        assert output_of("--many", "--output", "name") == "a\nb\n"

    def test_yaml(self) -> None:
        assert output_of("-o", "yaml") == "id: a\nschema: keepstep.thing/1\nsize_bytes: 3\n"

    def test_tables_have_no_colour_without_a_terminal(self) -> None:
        assert output_of("-o", "table") == "table wide=False\n"
        assert output_of("-o", "wide") == "table wide=True\n"

    def test_an_unknown_format_is_a_usage_error_that_names_the_valid_ones(self) -> None:
        result = CliRunner().invoke(show, ["-o", "xml"])
        assert result.exit_code == 2
        assert all(repr(name) in result.stderr for name in FORMATS)

    def test_no_color_is_honoured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert make_console().color_system is not None
        assert not make_console().no_color
        monkeypatch.setenv("NO_COLOR", "1")
        assert make_console().no_color


class TestYaml:
    def test_nesting(self) -> None:
        value = {"a": [1, {"b": None, "c": [[], [2, 3]]}], "d": {}, "e": {"f": True}}
        assert to_yaml(value) == (
            "a:\n  - 1\n  - b: null\n    c:\n      - []\n      - - 2\n        - 3\nd: {}\ne:\n  f: true\n"
        )

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("plain-word", "plain-word"),
            ("keepstep.goodput/1", "keepstep.goodput/1"),
            ("no", '"no"'),
            ("Null", '"Null"'),
            ("y", '"y"'),
            ("1e3", '"1e3"'),
            ("2026-01-01", '"2026-01-01"'),
            ("", '""'),
            ("a: b", '"a: b"'),
            ("- x", '"- x"'),
            ("a\n", '"a\\n"'),
            ("tab\t\u0007\u0085", '"tab\\t\\u0007\\U00000085"'),
            ("größe\U0001f600", '"größe\U0001f600"'),
            (1e-05, "1.0e-05"),
            (2.5e-07, "2.5e-07"),
            (0.5, "0.5"),
            (12, "12"),
            (False, "false"),
            (None, "null"),
            ([], "[]"),
        ],
    )
    def test_scalars_keep_their_type(self, value: Any, text: str) -> None:
        assert to_yaml(value) == text + "\n"

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
        )
    )
    def test_each_line_is_printable_and_scalars_are_never_lost(self, value: Any) -> None:
        text = to_yaml(value)
        assert text.endswith("\n")
        assert all(char.isprintable() or char == "\n" for char in text)
        assert text.count("null") >= json.dumps(value).count("null") - json.dumps(value).count('"')


class TestDurations:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, "-"),
            (0.0, "0 ms"),
            (0.042, "42 ms"),
            (0.9996, "1.0 s"),
            (12.34, "12.3 s"),
            (59.96, "1m 00s"),
            (245, "4m 05s"),
            (3599.7, "1h 00m"),
            (11520, "3h 12m"),
            (2 * 86400 + 4 * 3600, "2d 04h"),
            (-3, "-3.0 s"),
        ],
    )
    def test_duration(self, seconds: float | None, text: str) -> None:
        assert format_duration_s(seconds) == text

    def test_share(self) -> None:
        assert (format_share(1, 8), format_share(None, 8), format_share(1, 0)) == ("12.5 %", "-", "-")
