"""`keepstep ckpt`: verbs for checkpoints, a table like that of the top level; a verb's module is loaded when it is used."""

from __future__ import annotations

import click

from keepstep.cli.main import LazyGroup, Verb

VERBS: dict[str, Verb] = {
    "ls": Verb("keepstep.cli.ckpt_ls:ls", "List the checkpoints of a root.", "checkpoint"),
    "verify": Verb("keepstep.cli.ckpt_verify:verify", "Compare every byte with the signed manifests.", "checkpoint"),
    "prune": Verb("keepstep.cli.ckpt_prune:prune_verb", "Delete what no retention rule keeps.", "checkpoint"),
    "suspect": Verb(
        "keepstep.cli.ckpt_doubt:suspect", "Keep what is from before a suspected corruption.", "checkpoint"
    ),
    "release": Verb(
        "keepstep.cli.ckpt_doubt:release_verb", "Let what a suspicion or quarantine kept be deleted.", "checkpoint"
    ),
    "import": Verb(
        "keepstep.cli.ckpt_import:import_command", "Make a checkpoint from torch's distributed one.", "checkpoint"
    ),
    "export": Verb(
        "keepstep.cli.ckpt_export:export_command",
        "Write one for torch's distributed checkpoint, or safetensors.",
        "checkpoint",
    ),
    "interval": Verb("keepstep.cli.ckpt_interval:interval", "Say how long to train between checkpoints, and why."),
    "pin": Verb("keepstep.cli.ckpt_pin:pin", "Keep a checkpoint for good, or allow going back to it.", "checkpoint"),
    "keygen": Verb("keepstep.cli.ckpt_keygen:keygen", "Make a key that signs checkpoints.", "checkpoint"),
}


@click.group(
    "ckpt",
    cls=LazyGroup,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`keepstep ckpt VERB --help` explains a verb.",
)
def ckpt() -> None:
    """Look at checkpoints, keep them, sign them."""
