"""Tracebacks in a job's log: whose exception, where, on which rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.exceptions import (
    ExceptionTable,
    exception_signature,
    exception_table,
    raised_by,
    shipped_exceptions,
    whose,
)
from keepstep.catalog.load import shipped
from keepstep.records.errors import ConfigError
from keepstep.records.event import Event
from keepstep.sources.documents import split
from keepstep.sources.joblog.exceptions import read_exceptions


def found(text: str) -> list[Event]:
    return [e for d in split("job.log", text) for e in read_exceptions(d, shipped())]


PLAIN = """\
Traceback (most recent call last):
  File "/w/train.py", line 210, in <module>
    main()
  File "/w/train.py", line 155, in main
    x = batch["mask"]
        ~~~~~^^^^^^^^
KeyError: 'mask'
"""


def test_type_message_and_innermost_frame_of_the_users_code() -> None:
    (event,) = found(PLAIN)
    assert event.signature == "python.user_exception"
    assert event.attrs["type"] == "KeyError"
    assert event.attrs["message"] == "'mask'"
    assert event.attrs["user_frame"] == "/w/train.py:155 main"


def test_frames_of_libraries_are_passed_over_for_the_users_frame() -> None:
    text = PLAIN.replace(
        "KeyError: 'mask'",
        '  File "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward\nTypeError: bad operand',
    )
    (event,) = found(text)
    assert event.attrs["user_frame"] == "/w/train.py:155 main"
    assert event.attrs["innermost"].endswith("linear.py:125 forward")


def test_lines_of_several_ranks_in_any_mixture_are_told_apart() -> None:
    one = [f"[rank1]: {line}" for line in PLAIN.splitlines()]
    two = [f"[rank2]: {line}" for line in PLAIN.replace("KeyError: 'mask'", "ValueError: two").splitlines()]
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    events = found("\n".join(mixed))
    assert {(e.rank, e.attrs["type"]) for e in events} == {(1, "KeyError"), (2, "ValueError")}


def test_a_logger_that_puts_its_header_before_every_line() -> None:
    text = "\n".join(f"ERROR 03-17 executor.py:670 {line}" for line in PLAIN.splitlines())
    (event,) = found(text)
    assert (event.attrs["type"], event.attrs["user_frame"]) == ("KeyError", "/w/train.py:155 main")


def test_a_logger_that_puts_its_header_before_the_first_line_alone() -> None:
    for head in ("[rank7]: ", "2031-03-02T11:02:31Z [rank7]: "):
        (event,) = found(head + PLAIN + "[rank2]: step 4 loss 2.0\n")
        assert (event.rank, event.attrs["user_frame"]) == (7, "/w/train.py:155 main")
    # Another rank's line comes between: what follows is nobody's, and the other's own traceback stays its own.
    begun = PLAIN.splitlines(keepends=True)[0]
    other = "".join(
        f"[rank2]: {line}" for line in PLAIN.replace("KeyError: 'mask'", "IndexError: 3").splitlines(keepends=True)
    )
    assert [(e.rank, e.attrs["type"]) for e in found("[rank7]: " + begun + other) if e.rank is not None] == [
        (2, "IndexError")
    ]


def test_of_a_direct_cause_the_cause_is_what_happened() -> None:
    text = (
        PLAIN
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + PLAIN.replace("KeyError: 'mask'", "RuntimeError: step failed")
    )
    (event,) = found(text)
    assert (event.attrs["type"], event.attrs["raised_as"]) == ("KeyError", "RuntimeError")


def test_during_handling_the_last_counts() -> None:
    text = (
        PLAIN.replace("KeyError: 'mask'", "StopIteration")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + PLAIN.replace("KeyError: 'mask'", "ValueError: empty shard")
    )
    (event,) = found(text)
    assert event.attrs["type"] == "ValueError"


def test_a_lost_connection_while_handling_does_not_hide_the_programs_error() -> None:
    text = (
        PLAIN
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + PLAIN.replace("KeyError: 'mask'", "ConnectionResetError: [Errno 104] Connection reset by peer")
    )
    (event,) = found(text)
    assert event.attrs["type"] == "KeyError"


def test_two_tracebacks_one_after_the_other_are_two() -> None:
    assert [e.attrs["type"] for e in found(PLAIN + PLAIN.replace("KeyError: 'mask'", "TypeError: t"))] == [
        "KeyError",
        "TypeError",
    ]


def test_exceptions_of_a_group_are_read_through_their_margin() -> None:
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/w/a.py", line 3, in <module>
  |     run()
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/b.py", line 9, in fetch
    |     raise ValueError("bad shard")
    | ValueError: bad shard
    +------------------------------------
"""
    assert ("ValueError", "/w/b.py:9 fetch") in {(e.attrs["type"], e.attrs.get("user_frame")) for e in found(text)}


def test_a_framed_traceback_is_read() -> None:
    text = """\
╭─────────────────── Traceback (most recent call last) ───────────────────╮
│ /home/u/run.py:12 in main                                               │
│                                                                         │
│   10 │   cfg = load()                                                   │
│ ❱ 12 │   train(cfg["lr"])                                               │
╰─────────────────────────────────────────────────────────────────────────╯
KeyError: 'lr'
"""
    (event,) = found(text)
    assert (event.attrs["type"], event.attrs["user_frame"]) == ("KeyError", "/home/u/run.py:12 main")


def test_a_traceback_cut_off_by_the_end_of_the_log_gives_nothing() -> None:
    assert found(PLAIN.rpartition("KeyError")[0]) == []


@pytest.mark.parametrize(
    ("line", "signature"),
    [
        ("[rank3]: ValueError: label 9 out of range", "python.user_exception"),
        ("rank=6 | AssertionError: expected 4096 tokens, got 4097", "python.user_exception"),
        ("2031-02-14 ERROR app.errors.ShardError: x", "python.exception"),
        ("RuntimeError: something odd", "python.exception"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "python.peer_lost"),
        ("ModuleNotFoundError: No module named 'apex'", "python.import_failed"),
    ],
)
def test_a_line_that_names_an_exception_without_a_traceback(line: str, signature: str) -> None:
    assert [e.signature for e in found(line)] == [signature]


@pytest.mark.parametrize("line", ["except ValueError: pass", "    raise TypeError: no", "see KeyError: in the docs"])
def test_words_about_exceptions_are_none(line: str) -> None:
    assert found(line) == []


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/w/train.py", "user"),
        ("train.py", "user"),
        ("/v/lib/python3.11/site-packages/transformers/trainer.py", "library"),
        ("/usr/lib/python3.10/runpy.py", "library"),
        ("<frozen importlib._bootstrap>", "library"),
        ("/app/torch/distributed/elastic/utils/store.py", "launcher"),
        ("/opt/venv/bin/torchrun", "launcher"),
        ("/w/my_torch_project/model.py", "user"),
    ],
)
def test_whose_a_file_is(path: str, owner: str) -> None:
    assert whose(path) == owner


@pytest.mark.parametrize(
    ("name", "message", "owner", "signature"),
    [
        ("KeyError", "'x'", "user", "python.user_exception"),
        ("RuntimeError", "odd", "user", "python.user_runtime_error"),
        ("RuntimeError", "CUDA error: device-side assert triggered", "user", "python.exception"),
        ("torch.OutOfMemoryError", "CUDA out of memory.", "user", "python.exception"),
        ("OSError", "[Errno 116] Stale file handle", "user", "python.exception"),
        ("ConnectionResetError", "[Errno 104]", "user", "python.peer_lost"),
        ("FileNotFoundError", "[Errno 2] No such file: 'c.yaml'", "user", "python.file_missing"),
        ("AttributeError", "x", "launcher", "python.launcher_exception"),
        ("RuntimeError", "x", "launcher", "python.exception"),
        ("ValueError", "x", "library", "python.library_exception"),
        ("MemoryError", "", "library", "python.host_memory"),
    ],
)
def test_the_table_judges_by_type_message_and_owner(name: str, message: str, owner: str, signature: str) -> None:
    assert exception_signature(name, message, owner) == signature  # type: ignore[arg-type]


def test_every_signature_of_the_table_is_in_the_catalog() -> None:
    table = shipped_exceptions()
    assert isinstance(table, ExceptionTable)
    assert {r.signature for r in table.rule} <= {s.id for s in shipped()}


def test_a_table_with_a_bad_pattern_is_refused_by_name() -> None:
    text = 'version = "1"\nlibrary = []\nlauncher = []\ncommunication = []\n[[rule]]\nsignature = "x"\nmessage = "("\n'
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        exception_table(text, "mine.toml")


@given(st.lists(st.sampled_from(["/w/a.py", "/v/lib/python3.11/site-packages/x/y.py", "/v/bin/torchrun"]), max_size=6))
def test_one_frame_of_the_user_makes_it_the_users(paths: list[str]) -> None:
    assert (raised_by(paths) == "user") == ("/w/a.py" in paths)
