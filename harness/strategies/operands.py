"""How an op between collectives finds its operands: tests of metadata, and the choice among the values for which one holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from harness.ops.core import broadcast_shapes
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import TensorSpec, contiguous_stride
from harness.strategies.builder import MAX_NUMEL, Builder, Value
from harness.strategies.tensors import shape_from

__all__ = [
    "Fits",
    "Make",
    "both",
    "broadcasts",
    "cast_targets",
    "has_dims",
    "has_elements",
    "has_rows",
    "is_any",
    "is_contiguous",
    "is_float",
    "is_int",
    "is_number",
    "is_numeric",
    "operand",
    "pick",
]

_NEW: Final = 48

V = TypeVar("V")

Make = Callable[[Builder, bytes, str], None]
"""Adds an op by its name, reading a statement's bytes; or adds nothing."""

Fits = Callable[[TensorMeta], bool]
"""A precondition of one operand."""


def is_numeric(meta: TensorMeta) -> bool:
    """Whether arithmetic knows the dtype: all but float8."""
    return not meta.dtype.startswith("float8")


def is_number(meta: TensorMeta) -> bool:
    """Numeric, and no bool."""
    return is_numeric(meta) and meta.dtype != "bool"


def is_float(meta: TensorMeta) -> bool:
    """A float, but no float8."""
    return is_numeric(meta) and DTYPES[meta.dtype].kind == "float"


def is_int(meta: TensorMeta) -> bool:
    """An integer."""
    return DTYPES[meta.dtype].kind in ("int", "uint")


def is_any(meta: TensorMeta) -> bool:
    """Whatever it is."""
    return True


def both(*tests: Fits) -> Fits:
    """Where all tests hold."""
    return lambda meta: all(test(meta) for test in tests)


def has_dims(least: int, most: int = 8) -> Fits:
    """Where there are ``least`` to ``most`` dimensions."""
    return lambda meta: least <= len(meta.shape) <= most


def is_contiguous(meta: TensorMeta) -> bool:
    """Row-major without gaps."""
    return meta.is_contiguous


def has_rows(meta: TensorMeta) -> bool:
    """Where the first dimension has an element."""
    return bool(meta.shape) and meta.shape[0] > 0


def has_elements(meta: TensorMeta) -> bool:
    """Where no size is 0."""
    return 0 not in meta.shape


def pick(among: Sequence[V], byte: int, least: int = 0) -> V | None:
    """What a byte chooses: the newest (last) for ``least``, the oldest for 255; None where there is nothing.

    Not by remainder: a byte goes on choosing the same, or nearly, where some older value is gone.
    """
    return among[-1 - (byte - least) * len(among) // (256 - least)] if among else None


def operand(b: Builder, s: bytes, fits: Fits) -> Value | None:
    """An operand for which ``fits`` holds: a new input where the statement asks for one or no value will do.

    Args:
        b: the program so far.
        s: the statement; byte 1 chooses: below 48 a new input, else a value, the newest first.
        fits: the precondition. Byte 3 chooses the shape of a new input, others stand in where that won't do.

    Returns:
        None where the options leave no dtype that fits, and no value does.
    """
    found = None if s[1] < _NEW else pick(b.readable(fits), s[1], _NEW)
    if found is not None:
        return found
    for new_shape in (shape_from(s[3]), (1,), (2, 2), (2, 2, 2)):
        for dtype in b.options.dtypes:
            if fits(TensorMeta(new_shape, contiguous_stride(new_shape), dtype)):
                return b.add_input(TensorSpec(new_shape, dtype))
    return pick(b.readable(fits), s[1])


def broadcasts(a: TensorMeta, b: TensorMeta) -> bool:
    """Whether two shapes broadcast, to something small."""
    size = 1
    for x, y in zip(reversed(a.shape), reversed(b.shape), strict=False):
        if x != y and x != 1 and y != 1:
            return False
    for x in broadcast_shapes(a.shape, b.shape):
        size *= x
    return size <= MAX_NUMEL


def cast_targets(b: Builder, dtype: str) -> list[str]:
    """The dtypes that a cast from ``dtype`` may go to; never from a float to an integer, which is undefined out of range."""
    from_float = DTYPES[dtype].kind == "float"
    return [d for d in b.options.dtypes if d != dtype and (not from_float or DTYPES[d].kind in ("float", "bool"))]
