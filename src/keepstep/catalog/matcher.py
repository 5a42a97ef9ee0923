"""Which signatures a line matches: all patterns at once, in linear time (RE2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import re2

from keepstep.catalog.coded import resolve
from keepstep.catalog.signature import Signature


class Match(NamedTuple):
    """A signature that a line has, the named groups of its pattern that took part, and what was decoded from them."""

    signature: Signature
    groups: dict[str, str]


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = 256 << 20
    return options


class Matcher:
    """All patterns of some signatures, compiled."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._by_id = {s.id: s for s in signatures}
        self._patterns = [(s, re2.compile(p)) for s in self._by_id.values() for p in s.pattern]
        self._set = re2.Set.SearchSet(_options())
        for _, pattern in self._patterns:
            self._set.Add(pattern.pattern)
        self._set.Compile()

    def match_line(self, line: str) -> list[Match]:
        """All signatures of a line, in the order of the catalog; one with several patterns at most once."""
        found: dict[str, Match] = {}
        for index in sorted(self._set.Match(line) or []):
            signature, pattern = self._patterns[index]
            match = None if signature.id in found else pattern.search(line)
            if match is not None:
                groups = {k: v for k, v in match.groupdict().items() if v is not None}
                found[signature.id] = Match(*resolve(signature, groups, self._by_id))
        return list(found.values())
