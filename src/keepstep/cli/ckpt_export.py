"""`keepstep ckpt export`: a checkpoint of ours as files that other tools read."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from keepstep.checkpoint.restore.contents import Contents, choose, open_contents
from keepstep.checkpoint.storage.source import StoreOptions
from keepstep.cli.ckpt_common import ROOT_HELP, reader_policy, root_argument
from keepstep.cli.ckpt_verify import split_target
from keepstep.cli.output import emit, output_option
from keepstep.cli.trust_flags import policy_options
from keepstep.records.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,15})\s*([KMGT]I?B)?", re.IGNORECASE)


def _bytes(_context: click.Context, parameter: click.Parameter, text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS.get((match[2] or "").upper(), 0) if match else 0
    if size < 1:
        raise ConfigError(f"--shard-bytes {text!r}: give bytes, or a number with KB, MB, GB, MiB or GiB")
    return size


@click.command("export", epilog=f"{ROOT_HELP} Without the name of a checkpoint behind it, its newest one is taken.")
@root_argument
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
@click.option("--to", "form", type=click.Choice(["safetensors", "dcp"]), required=True, help="Form to write.")
@click.option("--state", metavar="NAME", help="safetensors: only the tensors of this state, under their names in it.")
@click.option("--shard-bytes", default="5GB", show_default=True, callback=_bytes, help="safetensors: size of a file.")
@policy_options
@output_option
def export_command(
    root: str,
    store: StoreOptions,
    out: Path,
    form: str,
    state: str | None,
    shard_bytes: int,
    output: str,
    **flags: Any,
) -> None:
    """Write a checkpoint (ROOT/CHECKPOINT, or the newest of ROOT) to the new folder OUT.

    dcp: what torch.distributed.checkpoint loads. safetensors: model-00001-of-0000N.safetensors and their index. The signature
    and every byte that is written are verified; OUT is removed again when anything differs, and is never written over.

    JSON is `keepstep.export/1`: checkpoint, to, out, files, tensors, size_bytes, seconds, notes.
    """
    if form == "dcp" and state is not None:
        raise ConfigError("--state goes with --to safetensors; a DCP checkpoint holds all states")
    policy = reader_policy(flags, needed=True)
    source, named = split_target(root, store)
    folder = named or choose(source, policy)
    begin_s = time.monotonic()
    with closing(open_contents(source, folder, policy)) as contents:
        done = _write(contents, out, form, state, shard_bytes)
    seconds = time.monotonic() - begin_s
    record = {
        "schema": "keepstep.export/1",
        "checkpoint": folder,
        "to": form,
        "out": str(out),
        "files": done.files,
        "tensors": done.tensors,
        "size_bytes": done.size_bytes,
        "seconds": round(seconds, 3),
        "notes": done.notes,
    }
    lines = [
        f"exported {done.tensors} tensors, {done.size_bytes / 1e9:.3f} GB to {len(done.files)} files in {seconds:.1f} s",
        *(f"note: {note}" for note in done.notes),
        str(out),
    ]
    emit(
        record,
        output,
        table=lambda console, _wide: console.print("\n".join(lines), markup=False, soft_wrap=True),
        name=lambda _record: str(out),
    )


def _write(contents: Contents, out: Path, form: str, state: str | None, shard_bytes: int) -> Any:
    """What was exported, an export.Exported. Raises ConfigError without torch, and what the export raises."""
    try:
        from keepstep.checkpoint.torch.export import export_dcp, export_safetensors
    except ModuleNotFoundError as error:
        raise ConfigError(f"export needs {error.name}: run it with the Python that trains") from error
    if form == "dcp":
        return export_dcp(contents, out)
    return export_safetensors(contents, out, state=state, shard_bytes=shard_bytes)
