"""Tensor metadata as pure values, and the names of what kinds of operator there are."""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.spec.dtypes import DTYPES
from harness.spec.program import contiguous_stride

__all__ = ["Kind", "TensorMeta"]

Kind = Literal["factory", "view", "move", "arithmetic", "pointwise", "opaque", "cast", "inplace", "collective", "wait"]
"""What an operator does to values, which decides how each arithmetic runs it (see ``executors/algebra.py``)."""


class TensorMeta(NamedTuple):
    """What a tensor looks like: sizes, strides and offset in elements, dtype by name, and which storage it lives in.

    ``storage`` numbers the storages of one program or graph; two tensors with the same number share memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int = 0
    storage: int = -1

    @property
    def numel(self) -> int:
        """The number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def size_bytes(self) -> int:
        """Elements times item size, whatever the strides."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major and without gaps, by torch's rule (dimensions of size 1 have any stride; empty tensors always are)."""
        if 0 in self.shape:
            return True
        expected = contiguous_stride(self.shape)
        return all(s == 1 or a == b for s, a, b in zip(self.shape, self.stride, expected, strict=True))
