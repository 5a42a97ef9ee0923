"""`keepstep ckpt pin`: keep a checkpoint whatever the retention policy says, or allow going back to it."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from keepstep.checkpoint.format.layout import FolderName, parse_folder_name
from keepstep.checkpoint.keeping.pins import delete_pin, new_pin, read_pin, write_pin
from keepstep.checkpoint.storage.source import Root, StoreOptions, open_deleter
from keepstep.checkpoint.trust.marks import WHOLE_ROOT, look_up_mark
from keepstep.checkpoint.trust.permits import RECORD_KIND, Permit, parse_permit, sign_permit
from keepstep.checkpoint.trust.policy import (
    TrustOptions,
    TrustPolicy,
    check_manifest,
    check_signer_is_trusted,
    load_policy,
    load_signer,
)
from keepstep.checkpoint.trust.rollback import Position, is_newer, position_of
from keepstep.checkpoint.trust.signers import local_signer
from keepstep.cli.acting import confirm, who
from keepstep.cli.ckpt_common import ROOT_HELP, open_existing, root_argument
from keepstep.cli.output import NotFoundError, emit, note, output_option
from keepstep.cli.store_flags import shown_flags
from keepstep.cli.trust_flags import policy_options, signer_options, trust_options
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError, VerificationError

_FROM = re.compile(r"(?P<checkpoint>[^:]+):(?P<digest>[0-9a-f]{64})")
_RECORD_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,229}")


class Action(NamedTuple):
    """What is about to be done: its record, one sentence, and the function that does it."""

    record: dict[str, Any]
    said: str
    perform: Callable[[], object]


class _Place(NamedTuple):
    """A root as the user named it."""

    text: str
    options: StoreOptions
    root: Root

    @property
    def command(self) -> str:
        """How another command on it begins."""
        return shlex.join(["keepstep", "ckpt", "pin", self.text, *shown_flags(self.options)])


@click.command("pin", epilog=ROOT_HELP)
@root_argument
@click.argument("checkpoint", metavar="[CHECKPOINT|STEP]", required=False)
@click.option("--unpin", is_flag=True, help="Release the pin; takes the right to delete in ROOT.")
@click.option("--allow-rollback", default=None, metavar="CHECKPOINT|STEP", help="Go back to it at the next restore.")
@click.option("--from", "origin", default=None, metavar="CHECKPOINT:DIGEST",
              help="The newest checkpoint, as a refused restore names it [default: what this host knows].")  # fmt: skip
@click.option("--revoke", default=None, metavar="ID", help="Take back a rollback that was allowed.")
@click.option("--reason", default="", help="Why; needed for --allow-rollback.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@policy_options
@signer_options
@output_option
def pin(
    root: str,
    store: StoreOptions,
    checkpoint: str | None,
    unpin: bool,
    allow_rollback: str | None,
    origin: str | None,
    revoke: str | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    output: str,
    **flags: Any,
) -> None:
    """Keep CHECKPOINT (its folder's name, or its step) in ROOT: no retention policy deletes it.

    With --allow-rollback a signed record lets the next restore go back to a checkpoint, past newer ones; training then goes on
    from there, and what lies beyond is passed over for good. The record is void as soon as there is newer progress, and is
    used once. JSON is `keepstep.action/1`.
    """
    if sum((checkpoint is not None, allow_rollback is not None, revoke is not None)) != 1:
        raise ConfigError("give one of CHECKPOINT, --allow-rollback CHECKPOINT, --revoke ID")
    if (unpin and checkpoint is None) or (origin is not None and allow_rollback is None):
        raise ConfigError("--unpin goes with CHECKPOINT, --from with --allow-rollback")
    place = _Place(root, store, open_existing(root, store))
    if checkpoint is not None:
        name = find_checkpoint(place.root, checkpoint)
        action = _unpinning(place, name, reason) if unpin else _pinning(place, name, reason)
    elif revoke is not None:
        action = _revoking(place, revoke, reason)
    else:
        assert allow_rollback is not None
        action = _allowing(place, allow_rollback, origin, reason, trust_options(flags))
    record = action.record | {"schema": "keepstep.action/1", "root": root, "by": who(), "dry_run": dry_run}
    if not dry_run:
        confirm(action.said, yes)
        action.perform()
    text = f"{'would' if dry_run else record['id'] + ':'} {action.said}\nundo: {record['undo'] or 'none needed'}"
    emit(
        record,
        output,
        table=lambda console, _: console.print(text, markup=False, soft_wrap=True),
        name=lambda r: str(r["id"]),
    )


# ---- pins


def _pinning(place: _Place, name: FolderName, reason: str) -> Action:
    known = read_pin(place.root, name.text)
    if known is not None:
        raise ConfigError(
            f"{name.text} is pinned already, by {known.by or 'unknown'}: {known.reason or 'no reason given'}"
        )
    record = new_pin(name, reason=reason, by=who(), now_ns=time.time_ns())
    undo = f"{place.command} {name.text} --unpin"
    fields = _fields("pin", f"pins/{name.text}", name, reason, undo)
    return Action(fields, f"pin {name.text}", lambda: write_pin(place.root, record))


def _unpinning(place: _Place, name: FolderName, reason: str) -> Action:
    known = read_pin(place.root, name.text)
    if known is None:
        raise NotFoundError(f"{name.text} in {place.root.where} is not pinned")
    because = f" --reason {shlex.quote(known.reason)}" if known.reason else ""
    undo = f"{place.command} {name.text}{because}"
    fields = _fields("unpin", f"pins/{name.text}", name, reason, undo)
    return Action(fields, f"unpin {name.text}", lambda: delete_pin(open_deleter(place.text, place.options), name.text))


def _fields(kind: str, id_: str, name: FolderName, reason: str, undo: str | None) -> dict[str, Any]:
    return {"id": id_, "kind": kind, "checkpoint": name.text, "step": name.step, "reason": reason, "undo": undo}


def find_checkpoint(place: Root, text: str) -> FolderName:
    """The committed checkpoint that `text` means: a folder's name, or a step that only one has.

    Raises NotFoundError, or ConfigError when several have that step.
    """
    names = sorted(name for folder in place.folders() if (name := parse_folder_name(folder)) is not None)
    wanted = [name for name in names if name.text == text or (text.isdecimal() and name.step == int(text))]
    committed = [name for name in wanted if place.marker(name.text) is not None]
    if len(committed) == 1:
        return committed[0]
    if committed:
        raise ConfigError(f"step {text} in {place.where}: name one of {', '.join(name.text for name in committed)}")
    if wanted:
        raise NotFoundError(f"{wanted[0].text} in {place.where} is not committed")
    steps = ", ".join(str(name.step) for name in names[-8:]) or "none"
    raise NotFoundError(f"{place.where} holds no checkpoint {text!r}; newest steps: {steps}")


# ---- rollback


def _allowing(place: _Place, wanted: str, origin: str | None, reason: str, options: TrustOptions) -> Action:
    if not reason.strip():
        raise ConfigError("--allow-rollback needs --reason TEXT: it stays in the signed record")
    policy = load_policy(options)
    target = _position(place.root, find_checkpoint(place.root, wanted), policy)
    known = _parse_origin(origin) if origin is not None else _known_newest(place.root, target, policy)
    if known[2] == target.digest:
        raise ConfigError(f"{target.checkpoint} is the newest known checkpoint: a restore takes it without permission")
    now_ns = time.time_ns()
    permit = Permit(
        from_checkpoint=known[0],
        from_step=known[1],
        from_digest=known[2],
        to_checkpoint=target.checkpoint,
        to_step=target.step,
        to_digest=target.digest,
        reason=reason,
        by=who(),
        created_at=rfc3339(now_ns),
        created_ns=now_ns,
        nonce=secrets.token_hex(8),
    )
    name = f"{target.checkpoint}.{permit.nonce}"
    undo = f"{place.command} --revoke {name}"

    def perform() -> None:
        signer = load_signer(options) or local_signer()
        check_signer_is_trusted(signer, policy)
        data = sign_permit(permit, signer)
        parse_permit(data, name, policy)
        place.root.put_record(RECORD_KIND, name, data)

    record = {"id": name, "kind": "allow_rollback", "checkpoint": target.checkpoint, "step": target.step}
    record |= {"from": permit.from_checkpoint, "from_digest": permit.from_digest, "reason": reason, "undo": undo}
    said = f"allow going back from {permit.from_checkpoint} to {target.checkpoint} at the next restore"
    return Action(record, said, perform)


def _position(place: Root, name: FolderName, policy: TrustPolicy) -> Position:
    """Of a checkpoint whose signature is checked. Raises VerificationError."""
    marker = place.marker(name.text)
    if marker is None:
        raise VerificationError(f"{name.text}: is not committed")
    return position_of(check_manifest(marker[1], marker[0], policy), name.text)


def _parse_origin(text: str) -> tuple[str, int, str]:
    match = _FROM.fullmatch(text)
    name = parse_folder_name(match["checkpoint"]) if match else None
    if match is None or name is None:
        raise ConfigError(f"--from {text!r}: give CHECKPOINT:DIGEST as the refused restore printed it")
    return name.text, name.step, match["digest"]


def _known_newest(root: Root, target: Position, policy: TrustPolicy) -> tuple[str, int, str]:
    """The mark on this host or the newest checkpoint of the run in the root that verifies, whichever is newer."""
    newest = target
    marks = [mark.at for scope in (target.run, WHOLE_ROOT) if (mark := look_up_mark(root, scope)) is not None]
    for position in marks + _verified(root, target.run, policy):
        if is_newer(position, newest):
            newest = position
    if newest not in marks:
        note(f"this host has no mark of that; the newest checkpoint in {root.where} is meant: {newest.checkpoint}")
    return newest.checkpoint, newest.step, newest.digest


def _verified(root: Root, run: str, policy: TrustPolicy) -> list[Position]:
    """Checkpoints of `run` whose markers verify."""
    found = []
    for folder in root.folders():
        name = parse_folder_name(folder)
        if name is None or name.run_id != run:
            continue
        with contextlib.suppress(VerificationError):
            found.append(_position(root, name, policy))
    return found


def _revoking(place: _Place, name: str, reason: str) -> Action:
    if not _RECORD_ID.fullmatch(name) or name not in place.root.record_names(RECORD_KIND):
        raise NotFoundError(f"{place.root.where} holds no rollback record {name!r}")
    record = {"id": name, "kind": "revoke_rollback", "reason": reason, "undo": None}
    said = f"take back rollback record {name}"
    return Action(record, said, lambda: open_deleter(place.text, place.options).delete_record(RECORD_KIND, name))
