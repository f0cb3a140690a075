"""Reading stored tensor bytes without torch: elements as numbers, and where two tensors differ."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from harness.spec.dtypes import DTYPES
from harness.spec.outcome import TensorRecord
from harness.spec.program import DTypeArg, Program

__all__ = ["Difference", "element", "first_difference", "is_rounding", "named_dtypes"]

_FORMATS: Final = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint8": "B",
    "bool": "?",
}
_FLOAT8: Final = {"float8_e4m3fn": (4, 3, 7), "float8_e5m2": (5, 2, 15)}


class Difference(NamedTuple):
    """Where two tensors of the same shape differ.

    Attributes:
        place: of the first element that differs, one number a dimension.
        expected, seen: the elements there.
        num_elements: how many differ.
    """

    place: tuple[int, ...]
    expected: float | int | bool
    seen: float | int | bool
    num_elements: int


def element(data: bytes, dtype: str, position: int) -> float | int | bool:
    """One element of raw little-endian bytes; float8 by its bits (OCP 8-bit floating point, 2023: E4M3 has no infinity)."""
    size = DTYPES[dtype].itemsize
    raw = data[position * size : (position + 1) * size]
    if dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    if dtype in _FLOAT8:
        return _float8(raw[0], dtype)
    value: float | int | bool = struct.unpack("<" + _FORMATS[dtype], raw)[0]
    return value


def _float8(bits: int, dtype: str) -> float:
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if dtype == "float8_e4m3fn" and bits & 0x7F == 0x7F:
        return math.nan
    if dtype == "float8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


ROUNDING: Final = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2, "float8_e4m3fn": 0.5, "float8_e5m2": 0.5}
"""Which share of the largest element a float may be off, where a backend adds in an order of its own; generous, for sums over few ranks."""


def named_dtypes(program: Program) -> set[str]:
    """The dtypes that a program names: of its inputs, and of its casts and factories."""
    named = {arg.name for op in program.ops for arg in (*op.args, *op.kwargs.values()) if isinstance(arg, DTypeArg)}
    return named | {spec.dtype for spec in program.inputs}


def is_rounding(expected: TensorRecord, seen: TensorRecord, dtypes: Iterable[str]) -> bool:
    """Whether two kept tensors of floats differ only as rounding may, the least precise of ``dtypes`` being on the way.

    Infinities and NaNs must stand at the same places.
    """
    if DTYPES[expected.dtype].kind != "float" or expected.data is None or seen.data is None:
        return False
    share = max(ROUNDING[d] for d in {expected.dtype, *dtypes} if d in ROUNDING)
    count = len(expected.data) // DTYPES[expected.dtype].itemsize
    pairs = [(element(expected.data, expected.dtype, i), element(seen.data, seen.dtype, i)) for i in range(count)]
    largest = max((abs(a) for a, _ in pairs if math.isfinite(a)), default=0.0)
    return all((a != a and b != b) or a == b or abs(a - b) <= share * largest for a, b in pairs)


def first_difference(expected: TensorRecord, seen: TensorRecord) -> Difference | None:
    """Where two kept tensors of the same dtype and shape differ bitwise, any NaN being equal to any other; None where nowhere.

    Raises:
        ValueError: the bytes were not kept.
    """
    if expected.data is None or seen.data is None:
        raise ValueError("the tensors' bytes were not kept")
    size = DTYPES[expected.dtype].itemsize
    is_float = DTYPES[expected.dtype].kind == "float"
    found: Difference | None = None
    count = 0
    for position in range(len(expected.data) // size):
        at = slice(position * size, (position + 1) * size)
        if expected.data[at] == seen.data[at]:
            continue
        a, b = element(expected.data, expected.dtype, position), element(seen.data, seen.dtype, position)
        if is_float and a != a and b != b:
            continue
        count += 1
        if found is None:
            found = Difference(_index(position, expected.shape), a, b, 1)
    return None if found is None else found._replace(num_elements=count)


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))
