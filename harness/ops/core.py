"""What a declaration of an operator consists of, and the shape arithmetic that rules share.

A rule is a function with the parameters of torch's schema, by the schema's names; tensors come as ``TensorMeta``. It gives the
metadata that torch's eager CPU kernel gives. The storage of a result is that of the operand it aliases, or -1 where it is fresh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from harness.spec.dtypes import DTYPES, promote
from harness.spec.meta import Kind, TensorMeta
from harness.spec.program import contiguous_stride

__all__ = [
    "FRESH",
    "CollectiveSpec",
    "OpError",
    "OpSpec",
    "Part",
    "broadcast_shapes",
    "computation_dtype",
    "dense_stride",
    "elementwise",
    "fresh",
    "is_dense",
    "require",
    "require_dtype",
    "require_writable",
    "view_stride",
    "wrap_dim",
]

FRESH: Final = -1

Result = TensorMeta | tuple[TensorMeta, ...]


class OpError(ValueError):
    """A precondition of an operator is broken; the message says by which value and what would be right."""


class CollectiveSpec(NamedTuple):
    """How to read a collective's arguments.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        group: the position of the group.
        group_size: the position of the group's size, where it is given.
        reduce_op: the position of the reduce op, where there is one.
        coalesced: whether the first argument is a list of tensors.
        out: the name of the keyword argument that the result is written to, where there is one.
    """

    kind: str
    group: int
    group_size: int | None = None
    reduce_op: int | None = None
    coalesced: bool = False
    out: str | None = None


class OpSpec(NamedTuple):
    """One operator of the table.

    Attributes:
        target: the overload by its full name.
        kind: what it does to values, see ``harness.spec.meta.Kind``.
        rule: its metadata.
        writes: the positions of arguments that it writes: a tensor, or a list of tensors.
        collective: how to read it where it is a collective.
    """

    target: str
    kind: Kind
    rule: Callable[..., Result]
    writes: tuple[int, ...] = ()
    collective: CollectiveSpec | None = None


class Part(NamedTuple):
    """A group as a rule sees it: its name and how many ranks a part has."""

    name: str
    size: int


def require(condition: bool, message: str) -> None:
    """Raise ``OpError(message)`` unless ``condition``."""
    if not condition:
        raise OpError(message)


def require_dtype(meta: TensorMeta, kinds: str, what: str) -> None:
    """Raise unless the dtype's kind is one of the space-separated ``kinds``; float8 counts as ``float8``."""
    kind = "float8" if meta.dtype.startswith("float8") else DTYPES[meta.dtype].kind
    require(kind in kinds.split(), f"{what} is not implemented for {meta.dtype}")


def require_writable(meta: TensorMeta) -> None:
    """Raise where several elements of ``meta`` may share one place in memory, so that torch refuses to write it in place."""
    overlap = any(size > 1 and step == 0 for size, step in zip(meta.shape, meta.stride, strict=True))
    require(not overlap or meta.numel == 0, "writes a tensor whose elements share memory; clone it first")


def fresh(shape: Sequence[int], dtype: str, stride: Sequence[int] | None = None) -> TensorMeta:
    """A new tensor with a storage of its own, contiguous unless told otherwise."""
    sizes = tuple(shape)
    return TensorMeta(sizes, contiguous_stride(sizes) if stride is None else tuple(stride), dtype, 0, FRESH)


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension counted from either end as one counted from the front; 0-d tensors have one dimension here."""
    most = max(ndim, 1)
    require(-most <= dim < most, f"dimension {dim}; must be from {-most} to {most - 1}")
    return dim % most


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def dense_stride(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The strides of a new tensor that keeps the order of dimensions of its operands.

    Dimensions are put in order by comparing strides operand by operand; where an operand has stride 0 in either dimension the next
    one decides; where both strides are equal the larger size is outermost. Source: TensorIterator and ``empty_like`` of torch
    2.13.0.

    Args:
        shape: of the result.
        strides: one a operand, broadcast dimensions with stride 0.
    """
    ndim = len(shape)
    order = list(range(ndim - 1, -1, -1))

    def compare(a: int, b: int) -> int:
        for stride in strides:
            x, y = stride[a], stride[b]
            if x == 0 or y == 0:
                continue
            if x != y:
                return -1 if x < y else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    for i in range(1, ndim):
        at = i
        for j in range(i - 1, -1, -1):
            decision = compare(order[j], order[at])
            if decision > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif decision < 0:
                break
    if order == list(range(ndim - 1, -1, -1)):
        return contiguous_stride(tuple(shape))
    result = [0] * ndim
    step = 1
    for dim in order:
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape, by the usual rule: aligned at the end, sizes equal or 1."""
    ndim = max(len(s) for s in shapes)
    result = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                require(result[i] in (1, size), f"shapes {[list(s) for s in shapes]} do not broadcast")
                result[i] = size
    return tuple(result)


def elementwise(operands: Sequence[TensorMeta], dtype: str, compute: str | None = None) -> TensorMeta:
    """The result of a pointwise operator: shapes broadcast, order of dimensions kept as TensorIterator keeps it.

    Args:
        operands: the tensors.
        dtype: of the result.
        compute: the dtype computed in, where it is another: operands of other dtypes are copied to it first, which lays out anew
            those that are not dense.
    """
    operands = [_cast(m, compute or dtype) for m in operands]
    shape = broadcast_shapes(*(m.shape for m in operands))
    if all(m.shape == shape for m in operands):
        if all(m.is_contiguous for m in operands):
            return fresh(shape, dtype)
        first = operands[0].stride
        if all(m.stride == first for m in operands) and is_dense(shape, first):
            return fresh(shape, dtype, first)
    strides = []
    for m in operands:
        lead = len(shape) - len(m.shape)
        own = [0 if size == 1 and shape[lead + i] != 1 else step for i, (size, step) in enumerate(zip(m.shape, m.stride, strict=True))]
        itemsize = DTYPES[m.dtype].itemsize
        strides.append([0] * lead + [step * itemsize for step in own])
    return fresh(shape, dtype, dense_stride(shape, strides))


def _cast(meta: TensorMeta, dtype: str) -> TensorMeta:
    if meta.dtype == dtype:
        return meta
    stride = meta.stride if is_dense(meta.shape, meta.stride) else dense_stride(meta.shape, [meta.stride])
    return TensorMeta(meta.shape, stride, dtype)


def computation_dtype(*operands: object) -> str:
    """The dtype of a pointwise result: dimensioned tensors before 0-d ones before Python numbers, unless a later category is higher.

    Source: ``torch.result_type`` of torch 2.13.0.
    """
    order = {"bool": 0, "int": 1, "uint": 1, "float": 2}
    levels: list[str | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, TensorMeta):
            level, dtype = (0 if operand.shape else 1), operand.dtype
        else:
            level = 2
            dtype = "bool" if isinstance(operand, bool) else "int64" if isinstance(operand, int) else "float32"
        seen = levels[level]
        levels[level] = dtype if seen is None else _promoted(seen, dtype)
    result: str | None = None
    for found in levels:
        if found is not None and (result is None or order[DTYPES[found].kind] > order[DTYPES[result].kind]):
            result = found if result is None else _promoted(result, found)
    assert result is not None
    return result


def _promoted(a: str, b: str) -> str:
    try:
        return promote(a, b)
    except KeyError as error:
        raise OpError(str(error.args[0])) from None


def view_stride(meta: TensorMeta, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides with which ``meta``'s memory can be seen in ``shape``, or None where a copy is needed.

    Walks dimensions from the last; a run of old dimensions that lie as one block is divided among new ones.
    """
    if meta.numel == 0:
        return meta.stride if tuple(shape) == meta.shape else contiguous_stride(tuple(shape))
    result = [0] * len(shape)
    at = len(shape) - 1
    if not meta.shape:
        return (1,) * len(shape)
    base, block, seen = meta.stride[-1], 1, 1
    for dim in range(len(meta.shape) - 1, -1, -1):
        block *= meta.shape[dim]
        last = dim == 0
        if last or (meta.shape[dim - 1] != 1 and meta.stride[dim - 1] != block * base):
            while at >= 0 and (seen < block or shape[at] == 1):
                result[at] = seen * base
                seen *= shape[at]
                at -= 1
            if seen != block:
                return None
            if not last:
                base, block, seen = meta.stride[dim - 1], 1, 1
    return tuple(result) if at == -1 else None


def infer_size(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """``shape`` with a -1 replaced by what makes it hold ``numel`` elements."""
    sizes = list(shape)
    if -1 in sizes:
        at = sizes.index(-1)
        known = math.prod(s for i, s in enumerate(sizes) if i != at)
        require(known > 0 and numel % known == 0, f"shape {sizes} cannot hold {numel} elements")
        sizes[at] = numel // known
    require(min(sizes, default=0) >= 0 and math.prod(sizes) == numel, f"shape {list(shape)} cannot hold {numel} elements")
    return tuple(sizes)


def tensors(value: Any, what: str) -> tuple[TensorMeta, ...]:
    """A non-empty list of tensors."""
    require(isinstance(value, tuple) and bool(value) and all(isinstance(v, TensorMeta) for v in value), f"{what} must be a non-empty list of tensors")
    return tuple(value)
