"""Environment of ranks: torchrun's variables, NCCL's defaults, and that the user's own go before them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from keepstep.launcher.config import RunConfig
from keepstep.launcher.messages import StartCycle
from keepstep.launcher.ranks.environment import NCCL_DEFAULTS, OTHER_NAMES, cycle_environment, planned_defaults

DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_IB_RETRY_CNT": "7",
}


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCH", "NCCL_")):
            monkeypatch.delenv(name)


def rank_environment(run_dir: Path, cycle: int = 2) -> dict[str, str]:
    config = RunConfig(run_id="r", run_dir=str(run_dir), node="left", script="x.py", nproc=2)
    start = StartCycle(
        epoch=1,
        cycle=cycle,
        attempt=0,
        first_rank=4,
        node_index=2,
        nnodes=3,
        world_size=6,
        master_addr="h",
        master_port=1,
        agent_store=True,
    )
    return cycle_environment(config, start, 1, run_dir / "s", run_dir / "info.json", run_dir / "error.json")


def test_defaults_are_pinned(tmp_path: Path) -> None:
    env = rank_environment(tmp_path)
    assert {name: env[name] for name in DEFAULTS} == DEFAULTS
    assert NCCL_DEFAULTS == DEFAULTS
    assert env["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "error.json")
    prefix = str(tmp_path / "nodes" / "left" / "nccl" / "cycle-0002-rank_")
    assert env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == prefix


@pytest.mark.parametrize("name", [*DEFAULTS, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"])
def test_the_users_value_wins(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    env = rank_environment(tmp_path)
    assert env[name] == "mine"
    assert {n for n, value in env.items() if value == "mine"} == {name}


@pytest.mark.parametrize(("name", "other"), [(n, o) for n, others in OTHER_NAMES.items() for o in others])
def test_the_users_value_under_another_name_wins(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(other, "mine")
    env = rank_environment(tmp_path)
    assert (env[other], name in env) == ("mine", False)


def test_torch_can_make_its_pipe_and_write_its_dump_there(tmp_path: Path) -> None:
    """What torch's ProcessGroupNCCL does with the two names: unlink and mkfifo of the one, a file at the other."""
    env = rank_environment(tmp_path)
    pipe = Path(env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "5.pipe")
    os.mkfifo(pipe)
    Path(env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + "5").write_bytes(b"dump")
    assert sorted(p.name for p in pipe.parent.iterdir()) == ["cycle-0002-rank_5", "cycle-0002-rank_5.pipe"]


def test_no_pipe_where_there_can_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would end the process. A file system without pipes is stood in for by a mkfifo that fails as there."""

    def refuse(path: object, mode: int = 0o666) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "mkfifo", refuse)
    env = rank_environment(tmp_path)
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in env
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in env


def test_no_dump_paths_where_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = rank_environment(tmp_path / "file")
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in env
    assert env["RANK"] == "5"


def test_torch_knows_the_names() -> None:
    """Names that torch reads are in its header files; those it does not are misspelt here."""
    torch = pytest.importorskip("torch")
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = "".join((folder / name).read_text() for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp"))
    known = set(re.findall(r"\b(?:TORCH_|NCCL_)[A-Z_]+\b", text))
    ours = {n for n in (*DEFAULTS, *OTHER_NAMES["TORCH_NCCL_TRACE_BUFFER_SIZE"]) if n.startswith("TORCH")}
    assert ours <= known
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in known


def test_the_plan_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "14")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    config = RunConfig(run_id="r", run_dir=str(tmp_path), node="left", script="x.py")
    planned = {name: (value, by) for name, value, by in planned_defaults(config)}
    env = rank_environment(tmp_path / "other", cycle=0)
    for name, (value, _) in planned.items():
        if name != "TORCHELASTIC_ERROR_FILE":
            assert env[name].replace("/other", "") == value
    assert planned["NCCL_IB_TIMEOUT"] == ("14", "this shell")
    assert planned["TORCH_FR_BUFFER_SIZE"] == ("50", "this shell")
    assert planned["NCCL_IB_RETRY_CNT"] == ("7", "keepstep")
    assert not (tmp_path / "nodes").exists()
