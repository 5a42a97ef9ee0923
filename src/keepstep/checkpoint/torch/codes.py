"""Element types of torch and numpy, as the codes of checkpoint.format.dtypes."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.records.errors import ConfigError

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex128: "C128",
    torch.complex64: "C64",
    torch.complex32: "C32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
NUMPY_CODES = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL", "c16": "C128", "c8": "C64",
}  # fmt: skip
NUMPY_TYPES = {code: text for text, code in NUMPY_CODES.items()}


def numpy_code(value: Any, path: str) -> str:
    """Code of a numpy array or scalar. Raises ConfigError naming `path` when it cannot be saved."""
    code = NUMPY_CODES.get(value.dtype.str.lstrip("<|="))
    if code is None or not value.dtype.isnative:
        raise ConfigError(f"state {path!r}: numpy type {value.dtype} cannot be saved")
    return code


def tensor_code(value: torch.Tensor, path: str) -> str:
    """Code of a tensor. Raises ConfigError naming `path` when it cannot be saved."""
    code = CODES.get(value.dtype)
    if code is None or value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise ConfigError(f"state {path!r}: a {value.layout} tensor of {value.dtype} on {value.device} cannot be saved")
    return code
