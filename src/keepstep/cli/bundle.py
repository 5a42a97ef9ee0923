"""`keepstep bundle PATH... -o FILE.tar.zst`: what was read, the verdict and a page about it, without names and secrets."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import click

from keepstep.attribution.narrative import narrative
from keepstep.attribution.redact import Redactor
from keepstep.cli.catalog_flags import catalog_option
from keepstep.cli.ckpt_common import format_bytes
from keepstep.cli.output import note
from keepstep.cli.why import judged
from keepstep.cli.why_inputs import asked
from keepstep.records.codec import to_pretty_json
from keepstep.records.errors import ConfigError, StorageError

SUFFIXES = (".tar.zst", ".tar.gz", ".tar")
MB = 1_000_000


class Text(NamedTuple):
    """A file as text. `cut`: what was left out of its middle, in characters."""

    path: str
    text: str
    cut: int


@click.command()
@click.argument("paths", nargs=-1)
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="*.tar.zst, *.tar.gz, *.tar."
)
@click.option("--run", help="The run that an incident is of; alone: its last failed cycle.")
@click.option("--cycle", type=click.IntRange(min=0), metavar="N", help="Of a run folder: this cycle.")
@click.option(
    "--max-file-mb",
    type=click.FloatRange(min=0.001),
    default=20.0,
    show_default=True,
    help="Longer files lose their middle.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--dry-run", is_flag=True, help="Say what would be in it; write nothing.")
@catalog_option
def bundle(
    paths: tuple[str, ...],
    catalog_files: tuple[Path, ...],
    output: Path,
    run: str | None,
    cycle: int | None,
    max_file_mb: float,
    force: bool,
    dry_run: bool,
) -> None:
    """Pack PATH..., a run folder or an incident, with the verdict and one page about it, to be shown to others.

    Names of hosts and users, addresses, paths and secrets are replaced; the same name is the same pseudonym throughout.
    manifest.json in it counts what was replaced. Look through it before you send it: a name that stands alone in a sentence,
    and nowhere in a place that tells what it is, stays.
    """
    if not output.name.endswith(SUFFIXES):
        raise ConfigError(f"-o {output}: the name must end in {', '.join(SUFFIXES)}")
    if output.exists() and not force:
        raise ConfigError(f"{output} is there already; --force replaces it")
    question = asked(paths, run, cycle)
    fields = judged(question, None, None, True, catalog_files) if question.recorded is None else question.recorded
    texts, left_out = read_texts(question.paths, round(max_file_mb * MB))
    members = contents(fields, texts, left_out)
    for name, data in members:
        note(f"{name}  {format_bytes(len(data))}")
    for what in left_out:
        note(f"left out: {what}")
    if not dry_run:
        write_archive(output, members)


def read_texts(paths: Sequence[str], limit: int) -> tuple[list[Text], list[str]]:
    """Every file as text, and those left out with the reason: what is not text cannot be redacted."""
    from keepstep.sources.decoding import open_stream, to_text, what_binary

    found, left_out = [], []
    for path in files_of(paths):
        try:
            with path.open("rb") as file:
                data = b"".join(open_stream(file).blocks)
        except OSError as error:
            left_out.append(f"{path}: {error.strerror}")
            continue
        binary = what_binary(data[:4096])
        if binary is not None:
            left_out.append(f"{path}: {binary}, which cannot be redacted")
            continue
        found.append(shortened(str(path), to_text(data), limit))
    return found, left_out


def files_of(paths: Sequence[str]) -> Iterator[Path]:
    """Files, and those below folders, in a fixed order; standard input is not among them."""
    for name in paths:
        top = Path(name)
        if top.is_dir():
            yield from sorted(p for p in top.rglob("*") if p.is_file())
        elif name != "-":
            yield top


def shortened(path: str, text: str, limit: int) -> Text:
    """A text of at most `limit` characters: a third from its begin, the rest from its end, where failures stand."""
    if len(text) <= limit:
        return Text(path, text, 0)
    head, tail = limit // 3, limit - limit // 3
    cut = len(text) - limit
    return Text(path, f"{text[:head]}\n... {cut} characters left out ...\n{text[-tail:]}", cut)


def contents(fields: dict[str, Any], texts: Sequence[Text], left_out: Sequence[str]) -> list[tuple[str, bytes]]:
    """Names and bytes of the archive's members, redacted; the last is the manifest."""
    page, verdict = narrative(fields), to_pretty_json(fields).decode()
    redactor = Redactor(hosts=sorted(nodes_of(fields)))
    for words in (*(t.text for t in texts), *(t.path for t in texts), *left_out, page, verdict):
        redactor.learn(words)
    members = [
        ("narrative.md", redactor.redact(page).encode()),
        ("verdict.json", to_pretty_json(redactor.value(fields))),
    ]
    listed = []
    for number, text in enumerate(texts, 1):
        name = f"files/{number:03d}-{_safe(redactor, text.path)}"
        data = redactor.redact(text.text).encode(errors="replace")
        members.append((name, data))
        listed.append({"name": name, "characters_left_out": text.cut})
    left = [redactor.redact(what) for what in left_out]
    manifest = {
        "schema": "keepstep.bundle/1",
        "made_by": "keepstep bundle",
        "members": [{"name": n, "size_bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in members],
        "files": listed,
        "left_out": left,
        "replaced": dict(sorted(redactor.counts.items())),
    }
    return [*members, ("manifest.json", to_pretty_json(manifest))]


def nodes_of(fields: dict[str, Any]) -> set[str]:
    """Nodes that the verdict and its events name."""
    events = [fields.get("entity") or {}, fields.get("first_cause") or {}, *fields.get("evidence", [])]
    events += [one["entity"] for one in fields.get("incidents", [])]
    return {str(e["node"]) for e in events if e.get("node")}


def _safe(redactor: Redactor, path: str) -> str:
    """The last part of a path as the name of a member."""
    name = redactor.redact(PurePosixPath(path).name)
    shown = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")[:80] or "file"
    return shown.removesuffix(".gz").removesuffix(".zst")


def write_archive(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    """Write a tar archive, compressed as its name says, whole or not at all. Raises StorageError."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz" if path.name.endswith(".gz") else "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(f"keepstep-bundle/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))
    packed = stream.getvalue()
    if path.name.endswith(".zst"):
        import zstandard

        packed = zstandard.ZstdCompressor(level=10).compress(packed)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(packed)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
