"""Element types: their size, and how the safetensors layout spells them."""

from __future__ import annotations

NATIVE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Codes that every safetensors reader knows, with bytes an element."""

AS_BYTES: dict[str, int] = {"C128": 16, "C64": 8, "C32": 4, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
"""Codes stored as U8, with bytes an element; the true type is in the index."""

ITEM_BYTES: dict[str, int] = {**NATIVE_BYTES, **AS_BYTES}
