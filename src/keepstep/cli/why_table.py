"""A verdict on a terminal, for somebody who was woken by it: whose fault, where, what to do, and only then why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from keepstep.attribution.wording import ACTION_WORDS, CLASS_WORDS
from keepstep.cli.runs import harmless

ROWS = 12
"""Lines of evidence in a table; -o wide and -o json have all."""
TEXT = 110
"""Characters of a line of a log in a table."""

_MARKS = {"supports": ("+", "green"), "contradicts": ("-", "yellow"), "symptom": (".", "dim")}
_STYLES = {"certain": "bold red", "probable": "bold red", "possible": "bold yellow", "unknown": "bold"}

Fields = dict[str, Any]


def show(fields: Fields, console: Console, *, wide: bool) -> None:
    """Print a verdict that has the fields of keepstep.verdict/1 and what `why` adds."""
    calm = bool(fields["no_current_fault"])
    tier = str(fields["tier"])
    head = "no current fault" if calm else str(fields["class"])
    verdict = Text(head, style="bold green" if calm else _STYLES.get(tier, "bold"))
    verdict.append(f"  {tier} ({fields['confidence']:.2f})", style="default")
    _row(console, "VERDICT", verdict)
    _row(console, "", Text(harmless(str(fields["summary"]))))
    action = str(fields["action"])
    _row(console, "DO", Text(f"{action}: {ACTION_WORDS.get(action, '')}"))  # type: ignore[call-overload]
    where = entity_words(fields["entity"])
    if where:
        _row(console, "AT FAULT", Text(harmless(where)))
    if fields["first_cause"] is not None:
        _row(console, "FIRST CAUSE", _event_line(fields["first_cause"], wide))
    _evidence(fields["evidence"], console, wide)
    for number, other in enumerate(fields["alternatives"]):
        words = CLASS_WORDS.get(other["class"], "")
        text = f"{other['class']:<10} {other['confidence']:.2f}  {other['why_not']}"
        _row(console, "" if number else "OR ELSE", Text(harmless(text if not wide else f"{text} [{words}]")))
    for number, other in enumerate(_others(fields)):
        span = f"{other['begin'][:19]} to {other['end'][:19]}".replace("T", " ")
        text = f"{span}  {other['class']}/{other['action']}  {other['summary']}"
        _row(console, "" if number else "ALSO", Text(harmless(text)))
    for number, text in enumerate(fields["missing"]):
        _row(console, "" if number else "MISSING", Text(harmless(text)))
    _inputs(fields, console, wide)


def _others(fields: Fields) -> list[Fields]:
    """The incidents that the verdict's first cause is not of."""
    at = str((fields["first_cause"] or {}).get("time") or "")
    return [one for one in fields.get("incidents", []) if not one["begin"] <= at <= one["end"]]


def entity_words(entity: Fields) -> str:
    """'node gpu-07, GPU 0000:3b:00.0, rank 12'."""
    shown = []
    for name in ("node", "gpu", "nic", "rank", "job"):
        value = entity.get(name)
        if value is not None:
            text = str(value)
            label = "GPU" if name == "gpu" else name
            shown.append(text if text.startswith("GPU") else f"{label} {text}")
    return ", ".join(shown)


def place_in_text(event: Fields) -> str:
    """'dmesg:12'; the last part of the path alone, which is what tells files apart on one screen."""
    evidence = event.get("evidence") or {}
    path = str(evidence.get("path") or "")
    line = evidence.get("line") or 0
    name = path.rsplit("/", 1)[-1]
    return f"{name}:{line}" if line else name


def when(event: Fields) -> str:
    """A time to the second, '-' where none is known."""
    time = event.get("time")
    return str(time)[:19].replace("T", " ") if time else "-"


def _row(console: Console, label: str, text: Text) -> None:
    line = Text(f"{label:<12}", style="bold")
    line.append_text(text)
    console.print(line, soft_wrap=True)


def _event_line(event: Fields, wide: bool) -> Text:
    text = str((event.get("evidence") or {}).get("text") or event.get("signature") or "")
    text = harmless(" ".join(text.split()))
    if not wide and len(text) > TEXT:
        text = text[: TEXT - 1] + "…"
    where = place_in_text(event)
    return Text(f"{when(event)}  {where + '  ' if where else ''}{text}")


def _evidence(found: Sequence[Fields], console: Console, wide: bool) -> None:
    shown = list(found)
    if not wide and len(shown) > ROWS:
        # What weighs most, in its place in time; of what weighs nothing the earliest.
        order = sorted(range(len(shown)), key=lambda i: (-abs(shown[i]["weight"]), i))[:ROWS]
        shown = [found[i] for i in sorted(order)]
    for number, one in enumerate(shown):
        mark, style = _MARKS[one["bearing"]]
        line = Text(f"{mark} ", style=style)
        weight = f"{one['weight']:+.1f}" if one["weight"] else "    "
        times = f" x{one['count']}" if one.get("count", 1) > 1 else ""
        line.append(f"{weight:>5} {one['signature']}{times}  ", style="default")
        line.append_text(_event_line(one, wide))
        if one["note"]:
            line.append(f"  [{harmless(one['note'])}]", style="dim")
        _row(console, "" if number else "EVIDENCE", line)
    if len(shown) < len(found):
        _row(console, "", Text(f"and {len(found) - len(shown)} more; -o wide shows all", style="dim"))


def _inputs(fields: Fields, console: Console, wide: bool) -> None:
    used = [u for u in fields.get("used", []) if wide or u["events"]]
    rest = len(fields.get("used", [])) - len(used)
    parts = [f"{_name(u)} ({u['read_as']}, {u['events']} event{'s' if u['events'] != 1 else ''})" for u in used]
    if rest:
        parts.append(f"{rest} more in which nothing was recognised")
    for number, part in enumerate(parts if wide else parts[:ROWS]):
        _row(console, "" if number else "READ", Text(harmless(part)))
    for number, part in enumerate(fields.get("unreadable", [])):
        _row(console, "" if number else "NOT READ", Text(harmless(part)))


def _name(used: Fields) -> str:
    title = f" {used['title']}" if used["title"] else ""
    return f"{used['path'].rsplit('/', 1)[-1]}{title}"


def show_terms(scores: Fields, console: Console) -> None:
    """Every term of the sums, and what they add up to: what `--explain` prints."""
    classes = list(scores["sums"])
    console.print()
    _row(console, "TERMS", Text("natural log-odds that each sign adds to a class"))
    header = "".join(f"{c[:9]:>10}" for c in classes)
    _line(console, f"{'':<44}{header}")
    _line(console, f"{'before evidence':<44}" + "".join(f"{scores['priors'][c]:>+10.2f}" for c in classes))
    for term in scores["terms"]:
        values = "".join(f"{term['adds'].get(c, 0.0):>+10.2f}" if term["adds"].get(c) else f"{'':>10}" for c in classes)
        note = f"  x{term['share']:.2f}, {term['note']}" if term["note"] else ""
        _line(console, f"{term['signature'][:43]:<44}{values}{note}")
    _line(console, f"{'sum':<44}" + "".join(f"{scores['sums'][c]:>+10.2f}" for c in classes))
    _line(console, f"{'probability':<44}" + "".join(f"{scores['chances'][c]:>10.3f}" for c in classes))
    if scores["action_note"]:
        _row(console, "ACTION", Text(scores["action_note"]))


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
