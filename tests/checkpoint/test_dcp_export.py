"""Exports: what torch and safetensors themselves read back is what was saved; damage never gets into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.checkpoint.dcp_support import load_dcp, same
from tests.checkpoint.support import FakeRun, Training, checkpointer, flip_bit, run_ranks

from keepstep.checkpoint.trust.keys import signing_key
from keepstep.cli.ckpt_export import export_command
from keepstep.records.errors import ConfigError, VerificationError
from keepstep.trainer.channel import MemoryChannel


class Tied(torch.nn.Module):
    """A model whose two ends share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def saved(root: Path, state: dict[str, Any], world_size: int = 1) -> Path:
    """Folder of `state`, committed at step 3 by `world_size` ranks that hold it alike."""
    channel = MemoryChannel()

    def body(rank: int) -> Path | None:
        ckpt = checkpointer(root, dict(state), FakeRun(channel, rank=rank, world_size=world_size), per_rank=[])
        ckpt.restore()
        ckpt.save(3)
        ckpt.close()
        return ckpt.newest_committed_path()

    results = run_ranks(world_size, body)
    assert isinstance(results[0], Path), results
    return results[0]


def export(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    """`keepstep ckpt export`; its record."""
    result = CliRunner().invoke(
        export_command, [str(folder), str(out), *options, "-o", "json"], catch_exceptions=False, standalone_mode=False
    )
    record: dict[str, Any] = json.loads(result.stdout)
    assert sorted(record["files"]) == sorted(path.name for path in out.iterdir())
    return record


def trained() -> dict[str, Any]:
    """Model, optimizer and plain values."""
    torch.manual_seed(2)
    part = Training()
    for _ in range(2):
        part.step()
    extra = {"lr": 0.5, "pair": (torch.ones(2), "x"), "wide": torch.randn(3, 4, dtype=torch.complex64), "big": 1 << 70}
    return {"model": part.model, "optim": part.optim, "extra": extra}


@pytest.mark.parametrize("world_size", [1, 3])
def test_torch_reads_the_export(root: Path, tmp_path: Path, world_size: int) -> None:
    state = trained()
    out = tmp_path / "dcp"
    record = export(saved(root, state, world_size), out, "--to", "dcp")
    assert any("rng" in note for note in record["notes"])
    plain = {"model": state["model"].state_dict(), "optim": state["optim"].state_dict(), "extra": state["extra"]}
    other = trained()
    with torch.no_grad():
        for tensor in other["model"].state_dict().values():
            tensor.zero_()
    read = {
        "model": other["model"].state_dict(),
        "optim": other["optim"].state_dict(),
        "extra": {"lr": 0, "pair": 0, "wide": torch.zeros(3, 4, dtype=torch.complex64), "big": 0},
    }
    load_dcp(read, out)
    same(plain, read)


def test_safetensors_reads_the_export(root: Path, tmp_path: Path) -> None:
    state = trained()
    out = tmp_path / "st"
    record = export(saved(root, state, 2), out, "--to", "safetensors", "--state", "model", "--shard-bytes", "200")
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    read: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(out / file)
        assert set(part) == {key for key, name in index["weight_map"].items() if name == file}
        assert sum(tensor.nbytes for tensor in part.values()) <= 200 or len(part) == 1
        read.update(part)
    same(dict(state["model"].state_dict()), {key: read[key] for key in state["model"].state_dict()})
    assert record["size_bytes"] == index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read.values())


def test_tied_weights_are_written_once(root: Path, tmp_path: Path) -> None:
    model = Tied()
    out = tmp_path / "st"
    export(saved(root, {"model": model}), out, "--to", "safetensors", "--state", "model")
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    (alias,) = index["metadata"]["aliases"].items()
    assert set(alias) == {"embed.weight", "head.weight"}
    read = load_file(out / "model-00001-of-00001.safetensors")
    assert alias[0] not in read and alias[0] not in index["weight_map"]
    assert torch.equal(read[alias[1]], model.embed.weight)
    whole = {"embed.weight": torch.zeros(50, 8), "head.weight": torch.zeros(50, 8)}
    dcp_out = tmp_path / "dcp"
    export(root, dcp_out, "--to", "dcp")  # of the root's newest
    load_dcp(
        read_into := {"model": {**whole, "middle.weight": torch.zeros(8, 8), "middle.bias": torch.zeros(8)}}, dcp_out
    )
    same(dict(model.state_dict()), read_into["model"])


def test_nothing_is_written_over(root: Path, tmp_path: Path) -> None:
    folder = saved(root, {"w": torch.ones(3)})
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    for form in ("dcp", "safetensors"):
        with pytest.raises(ConfigError, match="is there already"):
            export(folder, out, "--to", form)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_damage_leaves_no_export(root: Path, tmp_path: Path, form: str) -> None:
    folder = saved(root, {"w": torch.arange(50_000.0)})
    flip_bit(folder / "rank-00000-of-00001.safetensors", 100_000)
    with pytest.raises(VerificationError, match="rank-00000"):
        export(folder, tmp_path / "out", "--to", form)
    assert not (tmp_path / "out").exists()


def test_a_foreign_key_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(root, {"w": torch.ones(3)})
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="--trust-key"):
        export(folder, tmp_path / "out", "--to", "dcp")
    signing_key()
    with pytest.raises(VerificationError, match="key"):
        export(folder, tmp_path / "out", "--to", "dcp")


def test_bad_questions_are_answered(root: Path, tmp_path: Path) -> None:
    folder = saved(root, {"wide": torch.ones(3, dtype=torch.complex64), "n": 3})
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'wide' is C64.*--to dcp"):
        export(folder, out, "--to", "safetensors")
    with pytest.raises(ConfigError, match=r"--state model: .* holds n, wide"):
        export(folder, out, "--to", "safetensors", "--state", "model")
    with pytest.raises(ConfigError, match="no tensor in n"):
        export(folder, out, "--to", "safetensors", "--state", "n")
    with pytest.raises(ConfigError, match="--shard-bytes 'lots'"):
        export(folder, out, "--to", "safetensors", "--shard-bytes", "lots")
    with pytest.raises(ConfigError, match="--state goes with"):
        export(folder, out, "--to", "dcp", "--state", "n")
    assert not out.exists()
