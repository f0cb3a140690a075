"""Input tensors: shapes, layouts and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Generic, Literal, TypeVar

from hypothesis import strategies as st

from harness.spec.program import TensorSpec, contiguous_stride

__all__ = ["ALL_DTYPES", "LAYOUTS", "SHAPES", "Layout", "Table", "laid_out", "shape_from", "tensor_specs"]

ALL_DTYPES: Final = (
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "float64",
    "int32",
    "uint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "bool",
)
"""The dtypes of inputs, the simplest first."""

Layout = Literal["contiguous", "offset", "transposed", "gaps"]


T = TypeVar("T")


class Table(Generic[T]):
    """What a byte of a tape stands for: choices by weight, the simplest for the lowest bytes.

    Args:
        weighted: choices with their weights, the simplest first; every choice gets a byte at least.
    """

    def __init__(self, *weighted: tuple[T, int]) -> None:
        total = sum(weight for _, weight in weighted)
        self.entries: list[T] = []
        seen = 0
        for i, (choice, weight) in enumerate(weighted):
            seen += weight
            left = len(weighted) - 1 - i
            until = min(max(seen * 256 // total, len(self.entries) + 1), 256 - left)
            self.entries += [choice] * (until - len(self.entries))

    def __getitem__(self, byte: int) -> T:
        return self.entries[byte]


SHAPES: Final[Table[tuple[int, ...]]] = Table(
    ((1,), 5),
    ((2,), 8),
    ((3,), 10),
    ((4,), 8),
    ((5,), 6),
    ((2, 2), 5),
    ((2, 3), 6),
    ((3, 2), 5),
    ((1, 4), 4),
    ((4, 1), 3),
    ((1, 3), 3),
    ((3, 1), 3),
    ((3, 3), 3),
    ((4, 3), 3),
    ((2, 5), 3),
    ((7,), 4),
    ((2, 1, 3), 3),
    ((2, 2, 2), 3),
    ((1, 2, 3), 2),
    ((3, 2, 1), 2),
    ((0,), 3),
    ((2, 0), 2),
    ((0, 3), 2),
    ((), 5),
    ((16,), 3),
    ((4, 4), 2),
    ((33,), 3),
)

LAYOUTS: Final[Table[Layout]] = Table(("contiguous", 12), ("offset", 2), ("transposed", 2), ("gaps", 1))


def shape_from(byte: int, *, least_ndim: int = 0) -> tuple[int, ...]:
    """The shape that a byte of a tape stands for: small, odd, seldom empty or 0-d; ``(1,)`` for 0.

    Args:
        byte: from 0 to 255.
        least_ndim: 0-d becomes ``(1,)`` where this is 1.
    """
    shape = SHAPES[byte]
    return shape if len(shape) >= least_ndim else (1,)


def laid_out(shape: tuple[int, ...], dtype: str, layout: Layout, byte: int = 0) -> TensorSpec:
    """An input of this shape whose elements lie as ``layout`` says; contiguous where a shape leaves no choice.

    Args:
        shape, dtype: of the tensor.
        layout: ``offset`` leaves 1 to 3 elements free in front; ``transposed`` turns the order of dimensions around; ``gaps`` leaves
            every second element free.
        byte: chooses among offsets.
    """
    if layout == "offset":
        return TensorSpec(shape, dtype, storage_offset=1 + byte % 3)
    if layout == "transposed" and len(shape) >= 2:
        return TensorSpec(shape, dtype, stride=tuple(reversed(contiguous_stride(tuple(reversed(shape))))))
    if layout == "gaps" and shape:
        return TensorSpec(shape, dtype, stride=tuple(2 * s for s in contiguous_stride(shape)))
    return TensorSpec(shape, dtype)


def tensor_specs(
    *, dtypes: Sequence[str] = ALL_DTYPES, layouts: Sequence[Layout] = ("contiguous", "offset", "transposed", "gaps")
) -> st.SearchStrategy[TensorSpec]:
    """Single input tensors, small; shrink towards a contiguous one of one element and the first dtype.

    Args:
        dtypes: names from ``DTYPES``, the simplest first.
        layouts: which may be drawn, the simplest first.
    """
    return _tensor_specs(tuple(dtypes), tuple(layouts))


@lru_cache(maxsize=64)
def _tensor_specs(dtypes: tuple[str, ...], layouts: tuple[Layout, ...]) -> st.SearchStrategy[TensorSpec]:
    def read(tape: bytes) -> TensorSpec:
        return laid_out(shape_from(tape[0]), dtypes[tape[1] % len(dtypes)], layouts[tape[2] % len(layouts)], tape[3])

    return st.binary(min_size=4, max_size=4).map(read)
