"""Texts without what names people, machines and secrets, so that they can be shown to others. Pure; the same name is the same
pseudonym everywhere in one archive.

Two passes. The first looks for names where their place tells what they are (before a colon in a syslog line, after `user=`); the
second replaces each of them wherever it stands, and what is a secret by its form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Replace = Callable[[re.Match[str]], str]

# Quantifiers are bounded: a line of a megabyte must not take a square of it.
_HOST = r"[A-Za-z](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?(?:\.[A-Za-z0-9-]{1,63}){0,8}"
_STAMP = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*)"

HOST_PLACES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(p, re.MULTILINE)
    for p in (
        rf"^(?:<\d+>)?{_STAMP} (?P<name>{_HOST}) [\w./-]+(?:\[\d+\])?: ",  # syslog
        rf"^(?P<name>{_HOST}):\d{{1,9}}:\d{{1,9}} \[\d+\] ",  # NCCL
        rf"(?:addr|remote)=\[?(?P<name>{_HOST})\]?:\d+",  # c10d sockets
        rf"\[(?P<name>{_HOST})\]:\d+",
        rf"(?i:\b_?(?:host|hostname|node|node_?name|master_addr|nodeset|server|instance|kubernetes_node|nodelist|slurmd_nodename|batchhost)"
        rf"[\"']?\s*[=:]\s*[\"']?)(?P<name>{_HOST})(?![\w(])",
        rf"(?:srun|slurmstepd|slurmd): (?:error: )?(?P<name>{_HOST}): task",
        rf"\bJOB \d+(?:\.\S+)? ON (?P<name>{_HOST}) ",
        rf"(?i:\bnodes?[ /])(?P<name>{_HOST}\d)\b",
        r"(?P<name>\b[a-z0-9][a-z0-9-]{0,62}(?:\.[a-z0-9-]{1,63}){0,8}\.(?:internal|local|lan|corp|intra|cluster|svc|compute|hpc|com|net|org|edu|gov|io|ai)\b)",
        rf"(?i:\bssh (?:-\S{{1,40}} ){{0,8}}(?:\d+ )?)(?:[\w.-]{{1,64}}@)?(?P<name>{_HOST})",
        rf"\b[a-z_][\w.-]{{0,63}}@(?P<name>{_HOST})[:#$ ~]",
    )
)
"""Where a name can only be that of a host."""

USER_PLACES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(p, re.MULTILINE)
    for p in (
        r"/(?:home|Users)/(?P<name>[A-Za-z_][\w.-]{0,63})",
        r"(?i:\b(?:user|username|logname|owner|submitted_by|author)[\"']?\s*[=:]\s*[\"']?)(?P<name>[A-Za-z_][\w.-]*)",
        r"(?i:\bUserId=)(?P<name>[A-Za-z_][\w.-]*)\(\d+\)",
        r"\b(?P<name>[a-z_][\w.-]{0,63})@[A-Za-z][\w.-]{0,253}[:#$ ~]",
    )
)
"""Where a name can only be that of a person or an account."""

KEPT_NAMES = frozenset(
    {"localhost", "kernel", "unknown", "none", "null", "true", "false", "default", "root", "nobody", "systemd", "all", "node"}
    | {"host", "master", "worker", "python", "python3", "torch", "nccl", "rank", "job", "step", "error", "warning", "info"}
    | {"github.com", "pytorch.org", "docs.nvidia.com", "nvidia.com", "readthedocs.io", "self", "and", "the", "is", "has", "not"}
    | {"of", "on", "in", "to", "for", "from", "was", "ready", "notready", "pytorch", "cuda", "gpu", "cpu", "ip", "status"}
)  # fmt: skip
"""Words of the trade that stand in such places and name nobody."""

KEPT_ROOTS = (
    "/dev/",
    "/proc/",
    "/sys/",
    "/usr/lib/",
    "/usr/bin/",
    "/usr/local/cuda",
    "/var/log/",
    "/lib/modules/",
    "/bin/",
    "/run/",
)
"""Paths that are alike on every machine and tell nothing of a site."""

_SECRETS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("private_key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,20000}?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
        ("token", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{4,}"),  # JWT
        (
            "token",
            r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|npm_|pypi-|ya29\.|dop_v1_)[A-Za-z0-9_.-]{10,}",
        ),
        ("token", r"\b(?:AKIA|ASIA|AROA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{35}"),
        ("token", r"(?i:\bbearer\s+|\bbasic\s+)[A-Za-z0-9._~+/=-]{8,}"),
        ("credentials", r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
        ("signature", r"(?i:(?<=signature=)|(?<=[?&]sig=)|(?<=x-amz-security-token=))[A-Za-z0-9%/+=_-]{8,}"),
        (
            "email",
            r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,8}\.[A-Za-z]{2,24}\b",
        ),
    )
)
"""Secrets and addresses that their form gives away, whatever stands around them."""

_KEYED = re.compile(
    r"(?i)(?<![\w.-])(?P<key>[\"']?[\w.-]{0,64}?(?:passw(?:or)?d|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential|auth)"
    r"[\w.-]{0,64}[\"']?\s*[=:]\s*)(?P<quote>[\"']?)(?P<value>[^\s\"',;&]{4,})"
)
_COUNT = re.compile(r"\d{1,13}(?:\.\d{1,6})?[\]}]*\Z")
_HARMLESS_VALUE = re.compile(r"(?i)(?:true|false|none|null|\d{1,6}|<[\w -]+>|\*+|\[redacted.*)\Z")
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w]|\.\d)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9a-fA-F:]{0,39}::|(?:[0-9a-fA-F]{1,4}:){7})(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%[\w.-]+)?(?![\w:])"
)
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_PATH = re.compile(r"(?<![\w/.:])(?:/[\w.@+=-]+){2,}/?|(?<![\w/.])~[\w-]*(?:/[\w.@+=-]+)+")
_BUCKET = re.compile(r"\b(?P<scheme>s3|gs|az|abfss?|hdfs|oci)://(?P<rest>[^\s\"')]+)")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|torch|lib/python3\.\d+)/.*")


_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SEPARATOR = re.compile(r"([._-])")
LONGEST_NAME = 21
"""Parts of a token, separators counted, that are tried as one name: eleven words."""


class Redactor:
    """Pseudonyms of one archive. `counts`: how often each rule replaced something."""

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._made: Counter[str] = Counter()
        self._names: dict[tuple[str, str], str] = {}
        self._known: dict[str, str] = {}
        for kind, found in (("host", hosts), ("user", users)):
            for name in found:
                self._learn(kind, name)

    def learn(self, text: str) -> None:
        """First pass: the names of hosts and users that a text gives away by their place."""
        for kind, places in (("user", USER_PLACES), ("host", HOST_PLACES)):
            for place in places:
                for match in place.finditer(text):
                    self._learn(kind, match["name"])

    def redact(self, text: str) -> str:
        """Second pass: the text with pseudonyms. Learn all texts of an archive before the first is redacted."""
        for rule, pattern in _SECRETS:
            text = pattern.sub(self._fixed(rule), text)
        text = _KEYED.sub(self._keyed, text)
        text = _BUCKET.sub(self._bucket, text)
        text = _PATH.sub(self._path, text)
        for rule, pattern in (("mac", _MAC), ("ip", _IPV4), ("ip", _IPV6)):
            text = pattern.sub(self._named(rule), text)
        return _TOKEN.sub(self._token, text) if self._known else text

    def value(self, given: Any, key: str = "") -> Any:
        """A JSON value with all its texts redacted; one whose key names a secret is none any more."""
        if isinstance(given, dict):
            return {name: self.value(inner, str(name)) for name, inner in given.items()}
        if isinstance(given, list):
            return [self.value(inner, key) for inner in given]
        if not isinstance(given, str):
            return given
        return self.redact(f"{key}={given}").partition("=")[2] if _KEYED.match(f"{key}={given}") else self.redact(given)

    def _learn(self, kind: str, name: str) -> None:
        name = name.strip(".-_").lower()
        if len(name) < 2 or name in KEPT_NAMES or name.isdigit() or name in self._known:
            return
        self._known[name] = kind
        short = name.partition(".")[0]
        if kind == "host" and short != name:
            self._learn(kind, short)

    def _pseudonym(self, kind: str, value: str) -> str:
        key = (kind, value)
        if key not in self._names:
            self._made[kind] += 1
            self._names[key] = f"{kind}-{self._made[kind]}"
        self.counts[kind] += 1
        return self._names[key]

    def _token(self, match: re.Match[str]) -> str:
        """A run of letters, digits and separators, with the known names in it replaced, the longest first."""
        parts = _SEPARATOR.split(match[0])
        found: list[str] = []
        begin = 0
        while begin < len(parts):
            for end in range(min(len(parts), begin + LONGEST_NAME), begin, -1):
                kind = self._known.get("".join(parts[begin:end]).lower())
                if kind is not None:
                    found.append(self._name(kind, "".join(parts[begin:end]).lower()))
                    begin = end
                    break
            else:
                found.append(parts[begin])
                begin += 1
        return "".join(found)

    def _name(self, kind: str, name: str) -> str:
        short = name.partition(".")[0]
        # A host with and without its domain is one.
        return self._pseudonym(kind, short if kind == "host" and short in self._known else name)

    def _named(self, rule: str) -> Replace:
        def replace(match: re.Match[str]) -> str:
            value = match[0]
            if value in ("127.0.0.1", "0.0.0.0", "::1", "::", "255.255.255.255"):
                return value
            return self._pseudonym(rule, value.lower())

        return replace

    def _fixed(self, rule: str) -> Replace:
        def replace(_match: re.Match[str]) -> str:
            self.counts[rule] += 1
            return f"[redacted {rule}]"

        return replace

    def _keyed(self, match: re.Match[str]) -> str:
        key, value = match["key"].lower(), match["value"]
        # "tokens": 8388608 counts what a model read.
        counted = "token" in key and not match["quote"] and bool(_COUNT.match(value))
        if counted or _HARMLESS_VALUE.match(value):
            return match[0]
        self.counts["secret"] += 1
        return f"{match['key']}{match['quote']}[redacted secret]"

    def _bucket(self, match: re.Match[str]) -> str:
        return f"{match['scheme']}://{self._pseudonym('bucket', match['rest'].partition('/')[0])}/{self._tail(match['rest'])}"

    def _path(self, match: re.Match[str]) -> str:
        path = match[0]
        if path.startswith(KEPT_ROOTS):
            return path
        library = _LIBRARY.search(path)
        if library is not None and library.start() > 0:
            return f"/{self._pseudonym('path', path[: library.start()])}{library[0]}"
        folder, _, name = path.rstrip("/").rpartition("/")
        return f"/{self._pseudonym('path', folder)}/{name}" if folder else path

    def _tail(self, path: str) -> str:
        """The last part of a path, which tells what kind of file it was."""
        _, slash, name = path.rstrip("/").rpartition("/")
        return name if slash else ""
