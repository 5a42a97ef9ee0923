"""What a terminal would show of a line: colours, overwritten progress bars, backspaces and NUL bytes taken away."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b\ufeff]")
"""Characters that make a line worth cleaning."""
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    r"|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"  # OSC: window titles, links
    r"|[PX^_][^\x1b]{0,4096}\x1b\\"  # DCS and the like
    r"|[ -/]*[0-~])"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_CARET_ESCAPE = re.compile(r"\^\[\[[0-9;]*[mK]|#033\[[0-9;]*[mK]")
"""Escapes as `cat -v` and rsyslog write them."""
_BACKSPACES = re.compile(r"[^\x08]\x08")
_DIGITS = re.compile(r"[\d.:,#█▏▎▍▌▋▊▉━╸ ]+")
MAX_STATES = 1000
"""Distinct states that are kept of one line that was overwritten."""


def clean(raw: str) -> list[str]:
    """The texts that a line leaves on a terminal, usually one.

    A state of a progress bar that the next one overwrote is gone; other text before a carriage return is kept, as a text of its
    own, because a log line that was written over a progress bar is told apart by nothing else.
    """
    if CONTROL.search(raw) is None:
        return [_CARET_ESCAPE.sub("", raw) if "33[" in raw or "^[[" in raw else raw]
    text = _ESCAPE.sub("", raw)
    states = text.split("\r") if "\r" in text else [text]
    kept: list[str] = []
    shape = ""
    for state in map(_plain, states):
        if not state.strip():
            continue
        before, shape = shape, _DIGITS.sub("#", state)[:24]
        if kept and shape == before:
            kept[-1] = state
        elif len(kept) < MAX_STATES:
            kept.append(state)
        else:
            kept[-1] = state
    return kept or [""]


def _plain(text: str) -> str:
    for _ in range(64):
        if "\x08" not in text:
            break
        text, done = _BACKSPACES.subn("", text)
        if not done:
            break
    return CONTROL.sub("", text)
