"""The bytes of a case: its text, and the words that say how it was written down."""

from __future__ import annotations

import base64
import binascii
import codecs
import gzip
import re

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|([\\abefnrtv0]))")
_SINGLE = {b"\\": b"\\", b"a": b"\a", b"b": b"\b", b"e": b"\x1b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_SINGLE |= {b"v": b"\v", b"0": b"\0"}

_PLAIN = frozenset({"", "text", "plain", "raw", "none", "as-is"})
_ESCAPED = frozenset(
    {"escaped", "escapes", "escape", "unicode-escape", "string-escape", "c-escapes", "backslash", "python"}
)
_PACKED = frozenset({"gzip", "gz", "zstd", "zst"})
KNOWN = "a Python codec (utf-8, latin-1, utf-16, ...), escaped, crlf, base64, hex, gzip, zstd, joined by +"


def encoded(text: str, encoding: str) -> bytes:
    """The bytes that `text` stands for. `encoding` is words joined by + , / or blanks: "utf-8", "latin-1+escaped", "base64+gzip".

    base64 and hex give the bytes themselves; that they are packed besides (gzip) is for the reader to find out. Without them
    gzip and zstd pack the text. Raises ValueError naming a word that is not known, or text that is not what the words say.
    """
    words = [w for w in re.split(r"[+,/\s;()]+", encoding.strip().lower().replace("_", "-")) if w not in _PLAIN]
    unknown = [w for w in words if not _known(w)]
    if unknown:
        raise ValueError(f"encoding {encoding!r}: no meaning for {', '.join(unknown)}; known are {KNOWN}")
    try:
        if "base64" in words or "b64" in words:
            return base64.b64decode("".join(text.split()), validate=True)
        if "hex" in words:
            return bytes.fromhex(text)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"encoding {encoding!r}: the text is not that: {error}") from error
    if "crlf" in words:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    codec = next((w for w in words if _codec(w)), "utf-8")
    if _ESCAPED & set(words):
        data = unescaped(text, codec)
    else:
        # Bytes that are no UTF-8 come as lone surrogates, where the file of cases was written so.
        data = text.encode(codec, errors="surrogateescape" if codec.startswith("utf-8") else "strict")
    if "gzip" in words or "gz" in words:
        return gzip.compress(data, mtime=0)
    if "zstd" in words or "zst" in words:
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    return data


def unescaped(text: str, codec: str) -> bytes:
    """Text in which backslash escapes spell bytes (\\xff, \\033, \\e, \\n) or characters (\\u2588), the rest in `codec`."""

    def spelled(match: re.Match[bytes]) -> bytes:
        byte, short, long, octal, single = match.groups()
        if byte or octal:
            return bytes([int(byte, 16) if byte else int(octal, 8) & 0xFF])
        if short or long:
            return chr(int(short or long, 16)).encode(codec, errors="replace")
        return _SINGLE[single]

    if codec.replace("-", "").startswith(("utf16", "utf32")):
        # Escapes are ASCII, which these codecs do not keep.
        return unescaped(text, "utf-8").decode(errors="replace").encode(codec)
    return _ESCAPE.sub(spelled, text.encode(codec, errors="surrogateescape" if codec == "utf-8" else "strict"))


def _codec(word: str) -> bool:
    if word in _ESCAPED | _PACKED | {"base64", "b64", "hex", "crlf"}:
        return False
    try:
        return bool(codecs.lookup(word)._is_text_encoding)
    except LookupError:
        return False


def _known(word: str) -> bool:
    return word in _ESCAPED | _PACKED | {"base64", "b64", "hex", "crlf"} or _codec(word)
