"""Factories, copies and casts: operators that make new memory and move values, or nothing, into it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.ops.core import (
    OpError,
    OpSpec,
    broadcast_shapes,
    computation_dtype,
    dense_stride,
    elementwise,
    fresh,
    is_dense,
    require,
    tensors,
    wrap_dim,
)
from harness.ops.views import diagonal, select, slice_
from harness.spec.dtypes import promote
from harness.spec.meta import Kind, TensorMeta

__all__ = ["MOVES", "preserved"]

_CONTIGUOUS = "contiguous_format"


def preserved(meta: TensorMeta, memory_format: str | None = None) -> tuple[int, ...] | None:
    """The strides of a copy of ``meta``: kept where dense, else in the same order of dimensions; None for contiguous."""
    if memory_format is not None and memory_format.endswith(_CONTIGUOUS):
        return None
    return meta.stride if is_dense(meta.shape, meta.stride) else dense_stride(meta.shape, [meta.stride])


def empty(size: Sequence[int], *, dtype: str = "float32", memory_format: str | None = None, **_: object) -> TensorMeta:
    require(min(size, default=0) >= 0, f"size {list(size)}")
    return fresh(size, dtype)


def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: str = "float32", **_: object) -> TensorMeta:
    require(len(size) == len(stride) and min((*size, *stride), default=0) >= 0, f"size {list(size)}, stride {list(stride)}")
    return fresh(size, dtype, stride)


def full(size: Sequence[int], fill_value: float | int | bool, *, dtype: str | None = None, **_: object) -> TensorMeta:
    return fresh(size, dtype or computation_dtype(fill_value))


def new_empty(self: TensorMeta, size: Sequence[int], *, dtype: str | None = None, **_: object) -> TensorMeta:
    return fresh(size, dtype or self.dtype)


def empty_like(self: TensorMeta, *, dtype: str | None = None, memory_format: str | None = None, **_: object) -> TensorMeta:
    return fresh(self.shape, dtype or self.dtype, preserved(self, memory_format))


def full_like(self: TensorMeta, fill_value: float, *, dtype: str | None = None, memory_format: str | None = None, **_: object) -> TensorMeta:
    return fresh(self.shape, dtype or self.dtype, preserved(self, memory_format))


def clone(self: TensorMeta, *, memory_format: str | None = None) -> TensorMeta:
    return fresh(self.shape, self.dtype, preserved(self, memory_format))


def to_copy(self: TensorMeta, *, dtype: str | None = None, memory_format: str | None = None, **_: object) -> TensorMeta:
    return fresh(self.shape, dtype or self.dtype, preserved(self, memory_format))


def convert_element_type(a: TensorMeta, dtype: str) -> TensorMeta:
    return fresh(a.shape, dtype, preserved(a))


def cat(tensors_: Sequence[TensorMeta], dim: int = 0) -> TensorMeta:
    parts = tensors(tensors_, "cat's operand")
    dtype = parts[0].dtype
    for part in parts[1:]:
        if part.dtype != dtype:
            try:
                dtype = promote(dtype, part.dtype)
            except KeyError as error:
                require(False, str(error.args[0]))
    require(all(p.shape for p in parts), "a 0-d tensor cannot be concatenated")
    kept = [p for p in parts if p.shape != (0,)]
    if not kept:
        return fresh((0,), dtype)
    first = kept[0]
    d = wrap_dim(dim, len(first.shape))
    rest = (len(first.shape), first.shape[:d], first.shape[d + 1 :])
    if any((len(part.shape), part.shape[:d], part.shape[d + 1 :]) != rest for part in kept):
        raise OpError(f"cat of {[list(p.shape) for p in kept]} along {d}: other sizes must agree")
    shape = (*first.shape[:d], sum(p.shape[d] for p in kept), *first.shape[d + 1 :])
    return fresh(shape, dtype)


def stack(tensors_: Sequence[TensorMeta], dim: int = 0) -> TensorMeta:
    parts = tensors(tensors_, "stack's operand")
    require(len({p.shape for p in parts}) == 1, f"stack of {[list(p.shape) for p in parts]}: shapes must be equal")
    d = wrap_dim(dim, len(parts[0].shape) + 1)
    dtype = parts[0].dtype
    for part in parts[1:]:
        require(part.dtype == dtype or not dtype.startswith("float8"), "float8 is not promoted")
        dtype = promote(dtype, part.dtype)
    return fresh((*parts[0].shape[:d], len(parts), *parts[0].shape[d:]), dtype)


def flip(self: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    wrapped = [wrap_dim(d, len(self.shape)) for d in dims]
    require(len(set(wrapped)) == len(wrapped), f"dims {list(dims)}: one stands twice")
    return fresh(self.shape, self.dtype, preserved(self))


def index_select(self: TensorMeta, dim: int, index: TensorMeta) -> TensorMeta:
    require(index.dtype in ("int64", "int32") and len(index.shape) <= 1, "the index must be a vector of int32 or int64")
    d = wrap_dim(dim, len(self.shape))
    if not self.shape:
        return fresh((), self.dtype)
    return fresh((*self.shape[:d], index.numel, *self.shape[d + 1 :]), self.dtype)


def constant_pad_nd(self: TensorMeta, pad: Sequence[int], value: float = 0) -> TensorMeta:
    require(len(pad) % 2 == 0 and len(pad) // 2 <= len(self.shape), f"pad {list(pad)} of {len(self.shape)} dimensions")
    shape = list(self.shape)
    for i in range(len(pad) // 2):
        at = len(shape) - 1 - i
        shape[at] += pad[2 * i] + pad[2 * i + 1]
        require(shape[at] >= 0, f"pad {list(pad)} of {list(self.shape)}: a size below 0")
    return fresh(shape, self.dtype)


def slice_scatter(self: TensorMeta, src: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorMeta:
    part = slice_(self, dim, start, end, step)
    require(part.shape == src.shape, f"source {list(src.shape)} for a slice of {list(part.shape)}")
    return fresh(self.shape, self.dtype, preserved(self))


def select_scatter(self: TensorMeta, src: TensorMeta, dim: int, index: int) -> TensorMeta:
    part = select(self, dim, index)
    require(part.shape == src.shape, f"source {list(src.shape)} for a selection of {list(part.shape)}")
    return fresh(self.shape, self.dtype, preserved(self))


def diagonal_scatter(self: TensorMeta, src: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorMeta:
    part = diagonal(self, offset, dim1, dim2)
    require(part.shape == src.shape, f"source {list(src.shape)} for a diagonal of {list(part.shape)}")
    return fresh(self.shape, self.dtype, preserved(self))


def indexed_shape(self: TensorMeta, indices: Sequence[TensorMeta | None]) -> tuple[int, ...]:
    """The shape of ``self[indices]`` with integer index tensors, those standing side by side."""
    given = [i for i, index in enumerate(indices) if index is not None]
    require(bool(given) and len(indices) <= len(self.shape), f"{len(indices)} indices for {len(self.shape)} dimensions")
    require(given == list(range(given[0], given[-1] + 1)), "index tensors must stand side by side")
    picked = [index for index in indices if index is not None]
    require(all(index.dtype in ("int64", "int32") for index in picked), "indices must be int32 or int64")
    shape = broadcast_shapes(*(index.shape for index in picked))
    return (*self.shape[: given[0]], *shape, *self.shape[given[-1] + 1 :])


def index(self: TensorMeta, indices: Sequence[TensorMeta | None]) -> TensorMeta:
    require(self.is_contiguous, "indexing is modelled for contiguous tensors")
    return fresh(indexed_shape(self, indices), self.dtype)


def index_put(self: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta, accumulate: bool = False) -> TensorMeta:
    shape = indexed_shape(self, indices)
    require(values.dtype == self.dtype, f"values of {values.dtype} into {self.dtype}")
    require(broadcast_shapes(values.shape, shape) == shape, f"values of {list(values.shape)} into {list(shape)}")
    return fresh(self.shape, self.dtype, preserved(self))


def gather(self: TensorMeta, dim: int, index: TensorMeta) -> TensorMeta:
    require(index.dtype == "int64" and len(index.shape) == len(self.shape), "the index must be int64 with as many dimensions")
    return fresh(index.shape, self.dtype)


def repeat(self: TensorMeta, repeats: Sequence[int]) -> TensorMeta:
    require(len(repeats) >= len(self.shape) and min(repeats, default=0) >= 0, f"repeats {list(repeats)} of {list(self.shape)}")
    shape = (1,) * (len(repeats) - len(self.shape)) + self.shape
    return fresh([a * b for a, b in zip(shape, repeats, strict=True)], self.dtype)


def where(condition: TensorMeta, self: TensorMeta, other: TensorMeta) -> TensorMeta:
    require(condition.dtype == "bool", f"the condition is {condition.dtype}; must be bool")
    dtype = computation_dtype(self, other)
    return elementwise([m._replace(dtype=dtype) for m in (condition, self, other)], dtype)


def _declare(target: str, kind: Kind, rule: object) -> OpSpec:
    return OpSpec(target if target.startswith("prims.") else f"aten.{target}", kind, rule)  # type: ignore[arg-type]


MOVES = (
    _declare("empty.memory_format", "factory", empty),
    _declare("empty_strided.default", "factory", empty_strided),
    _declare("zeros.default", "factory", empty),
    _declare("ones.default", "factory", empty),
    _declare("full.default", "factory", full),
    _declare("new_empty.default", "factory", new_empty),
    _declare("new_zeros.default", "factory", new_empty),
    _declare("empty_like.default", "factory", empty_like),
    _declare("zeros_like.default", "factory", empty_like),
    _declare("ones_like.default", "factory", empty_like),
    _declare("full_like.default", "factory", full_like),
    _declare("clone.default", "move", clone),
    _declare("_to_copy.default", "cast", to_copy),
    _declare("prims.convert_element_type.default", "cast", convert_element_type),
    _declare("cat.default", "move", cat),
    _declare("stack.default", "move", stack),
    _declare("flip.default", "move", flip),
    _declare("index_select.default", "move", index_select),
    _declare("constant_pad_nd.default", "move", constant_pad_nd),
    _declare("slice_scatter.default", "move", slice_scatter),
    _declare("select_scatter.default", "move", select_scatter),
    _declare("diagonal_scatter.default", "move", diagonal_scatter),
    _declare("index.Tensor", "move", index),
    _declare("index_put.default", "move", index_put),
    _declare("gather.default", "move", gather),
    _declare("repeat.default", "move", repeat),
    _declare("where.self", "move", where),
)
