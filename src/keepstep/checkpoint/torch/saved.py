"""One `torch.save` record read as data: no torch, no unpickler. Values come back as they are, tensors as descriptions.

Two layouts: a zip archive of uncompressed members (`data.pkl`, `data/KEY` for each storage; since torch 1.6), and the
older stream of pickles followed by the storages. Names that a record may refer to are in `ITEM_NAMES`; any other refuses
the record before anything is built.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from typing import Any, Literal, NamedTuple

from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.records.errors import ConfigError, StorageError, VerificationError
from keepstep.records.pickles import Global, Persistent, Record, parse_pickle

DTYPES: dict[str, str] = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex128": "C128", "cdouble": "C128", "complex64": "C64", "cfloat": "C64", "complex32": "C32", "chalf": "C32",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""torch's names of element types to ours."""
DTYPE_NAMES = frozenset(f"torch.{name}" for name in DTYPES)
_STORAGES: dict[str, str] = {
    "torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
    "torch.ComplexDoubleStorage": "C128", "torch.ComplexFloatStorage": "C64",
    "torch.storage.UntypedStorage": "U8", "torch.UntypedStorage": "U8",
}  # fmt: skip
_NUMPY_CODES = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL", "c16": "C128", "c8": "C64",
}  # fmt: skip
_NUMPY_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_NUMPY_SCALAR = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_TENSOR_V2, _TENSOR_V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_BYTES = ("_codecs.encode", "__builtin__.bytes")
_BUILT = (
    "torch.Size", "collections.OrderedDict", "collections.Counter", "numpy.ndarray", "numpy.dtype", *_BYTES,
)  # fmt: skip
ITEM_NAMES = DTYPE_NAMES.union(
    _STORAGES, _NUMPY_RECONSTRUCT, _NUMPY_SCALAR, (_TENSOR_V2, _TENSOR_V3, _PARAMETER), _BUILT
)
"""Every name a record may refer to. None of them is looked up: they are words of the format."""

_WORDS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_MAX_DEPTH = 64
_NODES_PER_BYTE = 16
_NODES_AT_LEAST = 10_000
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


class Storage(NamedTuple):
    """Bytes of one storage: [begin, begin + size_bytes) of the file; the archive's CRC-32, None in the old layout."""

    begin: int
    size_bytes: int
    crc32: int | None


class SavedTensor(NamedTuple):
    """A tensor of a record: element type, shape, strides and offset in elements, and where its storage lies."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage


class SavedArray(NamedTuple):
    """A numpy array of a record, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class SavedScalar(NamedTuple):
    """A numpy scalar of a record."""

    dtype: str
    data: bytes


class SavedSize(NamedTuple):
    """A torch.Size of a record."""

    dims: tuple[int, ...]


class RangeFile(io.RawIOBase):
    """Bytes [begin, begin + length) of a descriptor, as a file."""

    def __init__(self, fd: int, begin: int, length: int) -> None:
        self._fd = fd
        self._begin = begin
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the begin")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        done = os.preadv(self._fd, [memoryview(buffer)[:count]], self._begin + self._at) if count else 0
        self._at += done
        return done


def read_exact(fd: int, view: memoryview, offset: int, what: str) -> None:
    """Fill `view` from `offset` of `fd`. Raises VerificationError when the file ends before, StorageError."""
    at = 0
    while at < len(view):
        try:
            count = os.preadv(fd, [view[at:]], offset + at)
        except OSError as error:
            raise StorageError(f"{what}: cannot read: {error.strerror or error}") from error
        if count == 0:
            raise VerificationError(f"{what}: ends at byte {offset + at}")
        at += count


def read_record(fd: int, begin: int, length: int, what: str) -> Any:
    """The value of the record at [begin, begin + length) of `fd`. `what` names it in messages.

    Tensors come back as SavedTensor, numpy arrays and scalars as SavedArray and SavedScalar, torch.Size as SavedSize.
    Raises VerificationError for what is no such record or refers to a name that is not allowed, ConfigError for a value
    that cannot be kept, StorageError.
    """
    head = bytearray(min(4, length))
    read_exact(fd, memoryview(head), begin, what)
    try:
        if bytes(head) == b"PK\x03\x04":
            return _read_zip(fd, begin, length, what)
        return _read_legacy(fd, begin, length, what)
    except (
        struct.error,
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:  # all that a damaged archive makes zipfile and the code here raise
        raise VerificationError(f"{what}: not a torch.save record: {error}") from None
    except OSError as error:
        raise StorageError(f"{what}: cannot read: {error.strerror or error}") from error


# ---- the zip layout


def _read_zip(fd: int, begin: int, length: int, what: str) -> Any:
    file = RangeFile(fd, begin, length)
    with zipfile.ZipFile(file) as archive:
        infos = {}
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 or name in infos:
                raise VerificationError(f"{what}: member {info.filename!r} is compressed, encrypted or there twice")
            infos[name] = info
        if "data.pkl" not in infos:
            raise VerificationError(f"{what}: has no data.pkl, so it is no torch.save record")
        if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
            raise ConfigError(f"{what}: was written on a big-endian machine, which is not read here")
        pickled = archive.read(infos["data.pkl"])  # compares its CRC-32
    storages = {
        name.removeprefix("data/"): _member(fd, begin, length, info, what)
        for name, info in infos.items()
        if name.startswith("data/")
    }
    tree, end = parse_pickle(memoryview(pickled), ITEM_NAMES, what)
    if end != len(pickled):
        raise VerificationError(f"{what}: {len(pickled) - end} bytes after the end of its pickle")
    return _Values(storages, len(pickled), what).convert(tree)


def _member(fd: int, begin: int, length: int, info: zipfile.ZipInfo, what: str) -> Storage:
    """Where the bytes of a member lie in the file: behind its local header, whose size only that header tells."""
    header = bytearray(30)
    if info.header_offset + 30 > length:
        raise VerificationError(f"{what}: member {info.filename!r} lies outside of the record")
    read_exact(fd, memoryview(header), begin + info.header_offset, what)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    at = info.header_offset + 30 + name_bytes + extra_bytes
    if header[:4] != b"PK\x03\x04" or at + info.file_size > length or info.file_size != info.compress_size:
        raise VerificationError(f"{what}: member {info.filename!r} lies outside of the record")
    return Storage(begin + at, info.file_size, info.CRC)


# ---- the old layout


def _read_legacy(fd: int, begin: int, length: int, what: str) -> Any:
    data = memoryview(bytearray(length))
    read_exact(fd, data, begin, what)
    at = 0
    parts = []
    for _ in range(5):  # magic number, protocol, system, the object, keys of its storages
        value, at = parse_pickle(data, ITEM_NAMES, what, begin=at)
        parts.append(value)
        if len(parts) == 1 and value != _LEGACY_MAGIC:
            raise VerificationError(f"{what}: not a torch.save record")
    _, protocol, system, tree, keys = parts
    if protocol != _LEGACY_PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise ConfigError(f"{what}: protocol {protocol!r} of torch.save, or a big-endian machine, is not read here")
    sizes = _legacy_item_bytes(tree)
    storages = {}
    for key in keys:
        (count,) = struct.unpack_from("<q", data, at)
        size = count * sizes.get(key, 1)
        at += 8
        if count < 0 or at + size > length:
            raise VerificationError(f"{what}: storage {key!r} lies outside of the record")
        storages[key] = Storage(begin + at, size, None)
        at += size
    return _Values(storages, length, what).convert(tree)


def _legacy_item_bytes(tree: Any) -> dict[str, int]:
    """Bytes an element of each storage that `tree` refers to."""
    found: dict[str, int] = {}
    todo, seen = [tree], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Persistent:
            kind, key = node.value[1], node.value[2]
            found[key] = ITEM_BYTES[_STORAGES[kind.name]]
        elif type(node) is Record:
            todo += [*node.args, node.state, *(value for _, value in node.items)]
        elif type(node) is dict:
            todo += node.values()
        elif type(node) in (list, tuple):
            todo += node
    return found


# ---- from the parsed stream to values


class _Values:
    """Turns parsed nodes into values.

    Shared parts are written out each time, so the number of nodes is bounded by the size of the stream: a few hundred bytes
    can share so often that nothing could hold them written out.
    """

    def __init__(self, storages: dict[str, Storage], stream_bytes: int, what: str) -> None:
        self._max_nodes = _NODES_AT_LEAST + _NODES_PER_BYTE * stream_bytes
        self._storages = storages
        self._what = what
        self._nodes = 0

    def convert(self, node: Any) -> Any:
        try:
            return self._value(node, 0)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise VerificationError(f"{self._what}: malformed value: {error!r}") from None

    def _value(self, node: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > self._max_nodes:
            raise VerificationError(f"{self._what}: values are nested deeper than {_MAX_DEPTH} levels, or too many")
        kind = type(node)
        if kind is list:
            return [self._value(item, depth + 1) for item in node]
        if kind is tuple:
            return tuple(self._value(item, depth + 1) for item in node)
        if kind is dict:
            return {self._key(key): self._value(item, depth + 1) for key, item in node.items()}
        if kind is Record:
            return self._record(node, depth)
        if kind in (Global, Persistent):
            name = node.name if kind is Global else "a storage"
            raise ConfigError(f"{self._what}: {name} as a value cannot be kept in a checkpoint")
        return node

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise ConfigError(f"{self._what}: key {key!r} cannot be kept; only str and int can be keys")
        return key

    def _record(self, node: Record, depth: int) -> Any:
        if node.kind == "collections.OrderedDict" and not node.args:
            ordered: OrderedDict[Any, Any] = OrderedDict()
            for key, item in node.items:
                ordered[self._key(key)] = self._value(item, depth + 1)
            meta = node.state.get("_metadata") if type(node.state) is dict else None
            if meta is not None:
                ordered._metadata = self._value(meta, depth + 1)  # type: ignore[attr-defined]
            return ordered
        if node.kind in _BYTES:
            return _raw(node)
        if node.kind == "collections.Counter":
            return Counter(self._value(node.args[0], depth + 1))
        if node.kind == "torch.Size":
            return SavedSize(_ints(node.args[0]))
        if node.kind in (_TENSOR_V2, _TENSOR_V3):
            return self._tensor(node)
        if node.kind == _PARAMETER:
            return self._value(node.args[0], depth + 1)
        if node.kind in _NUMPY_RECONSTRUCT:
            return self._array(node)
        if node.kind in _NUMPY_SCALAR:
            return SavedScalar(self._numpy_code(node.args[0]), _raw(node.args[1]))
        raise ConfigError(f"{self._what}: {node.kind} as a value cannot be kept in a checkpoint")

    def _tensor(self, node: Record) -> SavedTensor:
        reference, offset, size, stride = node.args[:4]
        if type(reference) is not Persistent or reference.value[0] != "storage":
            raise ValueError("a tensor without a storage")
        _, kind, key, _, count = reference.value[:5]
        if type(key) is not str or key not in self._storages:
            raise ValueError(f"storage {key!r} is not in the record")
        dtype = _STORAGES[kind.name] if node.kind == _TENSOR_V2 else DTYPES[node.args[6].name.removeprefix("torch.")]
        shape, steps, storage = _ints(size), _ints(stride), self._storages[key]
        if (
            len(shape) != len(steps)
            or len(shape) > 64
            or type(offset) is not int
            or offset < 0
            or type(count) is not int
        ):
            raise ValueError(f"a tensor of {shape} with strides {steps} at {offset}")
        last = offset + sum((dim - 1) * step for dim, step in zip(shape, steps, strict=True))
        if math.prod(shape) and (last + 1) * ITEM_BYTES[dtype] > storage.size_bytes:
            raise ValueError(f"a tensor of {shape} reaches beyond its storage of {storage.size_bytes} bytes")
        if math.prod(shape) * ITEM_BYTES[dtype] > most_bytes(storage.size_bytes):
            raise ValueError(f"a tensor of {shape} in {storage.size_bytes} bytes")
        return SavedTensor(dtype, shape, steps, offset, storage)

    def _array(self, node: Record) -> SavedArray:
        _, shape, dtype, fortran, data = node.state
        code, raw, dims = self._numpy_code(dtype), _raw(data), _ints(shape)
        if fortran and len(dims) > 1:
            raise ConfigError(f"{self._what}: a numpy array in column order cannot be kept; save a C-ordered copy")
        if len(raw) != math.prod(dims) * ITEM_BYTES[code]:
            raise ValueError(f"an array of {dims} with {len(raw)} bytes")
        return SavedArray(code, dims, raw)

    def _numpy_code(self, node: Any) -> str:
        text = node.args[0]
        code = _NUMPY_CODES.get(text)
        if node.kind != "numpy.dtype" or code is None or node.state[1] not in ("<", "|", "="):
            raise ConfigError(f"{self._what}: numpy type {text!r} cannot be kept in a checkpoint")
        return code


def _ints(node: Any) -> tuple[int, ...]:
    values = node.args[0] if type(node) is Record and node.kind == "torch.Size" else node
    if type(values) not in (tuple, list) or any(type(value) is not int or not 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"{values!r} where sizes should be")
    return tuple(values)


def _raw(node: Any) -> bytes:
    if type(node) is bytes:
        return node
    # Protocol 2 has no bytes of its own: they are a text to be encoded, and empty ones a call without arguments.
    if type(node) is Record and node.kind == "__builtin__.bytes" and not node.args:
        return b""
    if type(node) is Record and node.kind == "_codecs.encode" and node.args[1] == "latin1":
        return str(node.args[0]).encode("latin-1")
    raise ValueError("no bytes where some should be")


# ---- bytes of tensors


def most_bytes(stored_bytes: int) -> int:
    """Bytes that a tensor kept in `stored_bytes` may claim to have. An expanded one has more than are kept, but not without end."""
    return (1 << 20) + 1000 * stored_bytes


def load_storage(fd: int, storage: Storage, buffer: memoryview, what: str, *, check_crc: bool) -> None:
    """Read `storage` into `buffer` of its size and compare its CRC-32. Raises VerificationError or StorageError."""
    read_exact(fd, buffer, storage.begin, what)
    if check_crc and storage.crc32 is not None and zlib.crc32(buffer) != storage.crc32:
        raise VerificationError(
            f"{what}: CRC-32 of its bytes is not the one in the file, so it is damaged (--no-crc when it was written "
            "with torch's CRC-32 switched off)"
        )


def is_row_major(tensor: SavedTensor) -> bool:
    """True when the elements of `tensor` follow one another in its storage."""
    expected = 1
    for dim, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if dim not in (0, 1) and step != expected:
            return False
        expected *= max(dim, 1)
    return True


def row_major(tensor: SavedTensor, storage: memoryview) -> memoryview:
    """Bytes of `tensor` in row-major order out of those of its storage; a copy only when they do not lie so."""
    item = ITEM_BYTES[tensor.dtype]
    begin, size = tensor.offset * item, math.prod(tensor.shape) * item
    if is_row_major(tensor) or not size:
        return storage[begin : begin + size]
    word = min(item, 8)
    code = _WORDS[word]
    shape, stride = list(tensor.shape), [step * (item // word) for step in tensor.stride]
    if item > word:  # a complex number of 16 bytes is two words
        shape, stride = [*shape, item // word], [*stride, 1]
    source = storage[: len(storage) - len(storage) % word].cast(code)
    target = bytearray(size)
    _gather(source, tensor.offset * (item // word), memoryview(target).cast(code), 0, shape, stride)
    return memoryview(target)


def _gather(source: memoryview, at: int, target: memoryview, to: int, shape: list[int], stride: list[int]) -> int:
    """Copy the words of a strided block to `target` from `to` on; returns where the next ones go."""
    if len(shape) == 1:
        count, step = shape[0], stride[0]
        if step == 0:
            for place in range(to, to + count):
                target[place] = source[at]
        else:
            target[to : to + count] = source[at : at + (count - 1) * step + 1 : step]
        return to + count
    for index in range(shape[0]):
        to = _gather(source, at + index * stride[0], target, to, shape[1:], stride[1:])
    return to
