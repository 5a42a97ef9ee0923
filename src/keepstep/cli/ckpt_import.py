"""`keepstep ckpt import`: a checkpoint of torch.distributed.checkpoint becomes one of ours, without unpickling anything."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from keepstep.checkpoint.storage.source import StoreOptions, open_root
from keepstep.checkpoint.trust.policy import load_signer
from keepstep.cli.ckpt_common import ROOT_HELP, root_argument
from keepstep.cli.output import emit, output_option
from keepstep.cli.trust_flags import signer_options, trust_options
from keepstep.records.errors import ConfigError

_STEP = re.compile(r"(?:step|iter|iteration|global_step)[-_=]?0*([0-9]{1,18})", re.IGNORECASE)


@click.command("import", epilog=ROOT_HELP)
@click.argument("dcp_dir", metavar="DCP_DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@root_argument
@click.option("--run-id", default="import", show_default=True, help="Run that the checkpoint is filed under.")
@click.option(
    "--step", type=click.IntRange(0), help="Training step; default: the number in DCP_DIR's name (step-1200)."
)
@click.option("--world", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Files to split it into.")
@click.option("--as", "wrap", metavar="NAME", help="Put the whole state under NAME (a bare model.state_dict()).")
@click.option(
    "--digit-keys", type=click.Choice(["int", "str"]), help='What keys like "7" were, where the state is silent.'
)
@click.option("--no-crc", is_flag=True, help="Do not compare CRC-32 (torch can be told not to write it).")
@click.option("--unsigned", is_flag=True, help="Do not sign the checkpoint.")
@signer_options
@output_option
def import_command(
    dcp_dir: Path,
    root: str,
    store: StoreOptions,
    run_id: str,
    step: int | None,
    world: int,
    wrap: str | None,
    digit_keys: Any,
    no_crc: bool,
    output: str,
    **flags: Any,
) -> None:
    """Make a committed, signed checkpoint under ROOT from the folder DCP_DIR that torch.distributed.checkpoint wrote.

    Nothing is unpickled: names in the files other than those DCP itself writes are refused. The checkpoint loads with
    Checkpointer(...).restore() under the same state names. It holds no random state of ranks; restore says so.

    JSON is `keepstep.import/1`: checkpoint, step, world, tensors, size_bytes, seconds, signed, notes.
    """
    from keepstep.checkpoint.format.layout import FolderName, check_run_id
    from keepstep.checkpoint.torch.dcpimport import ImportOptions, import_dcp

    found = _STEP.search(dcp_dir.resolve().name)
    if step is None and found is None:
        raise ConfigError(f"{dcp_dir}: its name tells no step; give --step N")
    number = step if step is not None else int(found[1]) if found else 0
    name = FolderName(number, 0, 1, 0, check_run_id(run_id))
    target = open_root(root, store)
    signer = load_signer(trust_options(flags))
    begin_s = time.monotonic()
    options = ImportOptions(world=world, wrap=wrap, digit_keys=digit_keys, check_crc=not no_crc)
    done = import_dcp(dcp_dir, target, name, signer, options)
    seconds = time.monotonic() - begin_s
    place = f"{target.where}/{done.folder}"
    record = {
        "schema": "keepstep.import/1",
        "checkpoint": place,
        "step": number,
        "world": world,
        "tensors": done.tensors,
        "size_bytes": done.size_bytes,
        "seconds": round(seconds, 3),
        "signed": signer is not None,
        "notes": list(done.notes),
    }
    lines = [
        f"imported step {number}: {done.tensors} tensors, {done.size_bytes / 1e9:.3f} GB in {seconds:.1f} s",
        *(f"note: {note}" for note in done.notes),
        place,
    ]
    emit(
        record,
        output,
        table=lambda console, _wide: console.print("\n".join(lines), markup=False, soft_wrap=True),
        name=lambda _record: place,
    )
