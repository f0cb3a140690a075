"""Ops that stand between collectives: an entry for each operator of ``harness.ops`` that computes, copies or writes.

An entry is a function that looks for operands for which the operator's preconditions hold, makes a new input where it finds none,
and adds the op; where the program has no room or no such dtype, it adds nothing. Bytes of a statement: 1 operand, 2 and 7 which operator,
3 shape, 4 and 5 parameters, 6 whether the result of an op in place is used.
"""

from __future__ import annotations

from typing import Final

from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, TensorSpec, contiguous_stride
from harness.strategies.builder import MAX_NUMEL, Builder, Value, is_injective
from harness.strategies.operands import (
    Fits,
    Make,
    both,
    broadcasts,
    cast_targets,
    has_dims,
    has_elements,
    has_rows,
    is_any,
    is_contiguous,
    is_float,
    is_int,
    is_number,
    is_numeric,
    operand,
    pick,
)
from harness.strategies.tensors import Table, shape_from
from harness.strategies.views import VIEWS

__all__ = ["OPERATORS", "WRITES", "add_operator", "add_write", "is_source_of"]

_FLOAT_NUMBERS: Final = (1, 2, 0.5, -1, 3, 0.25)
_INT_NUMBERS: Final = (1, 2, 3)
_ORDER: Final = {"bool": 0, "int": 1, "uint": 1, "float": 2}


def _number(meta: TensorMeta, byte: int) -> int | float:
    numbers = _FLOAT_NUMBERS if DTYPES[meta.dtype].kind == "float" else _INT_NUMBERS
    return numbers[byte % len(numbers)]


def _unary(fits: Fits) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        x = operand(b, s, fits)
        if x is not None:
            b.read(target, x)

    return make


def _binary(fits: Fits, *, tensors_only: bool = False) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        x = operand(b, s, fits)
        if x is None:
            return
        if target.endswith(".Scalar") or (s[4] < 96 and not tensors_only):
            b.read(target, x, _number(x.meta, s[5]))
        else:
            meta = x.meta
            y = pick(b.readable(lambda m: fits(m) and broadcasts(m, meta)), s[5])
            b.read(target, x, y if y is not None else x)

    return make


def _clamp(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_number)
    if x is not None:
        b.read(target, x, 0, 2)


def _reduce_dim(fits: Fits) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        x = operand(b, s, both(is_contiguous, has_rows, fits))
        if x is not None:
            b.read(target, x, (s[4] % len(x.meta.shape),) if has_elements(x.meta) else (0,), s[5] >= 128)

    return make


def _along(fits: Fits, *more: bool) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        x = operand(b, s, both(is_contiguous, fits))
        if x is not None:
            b.read(target, x, s[4] % max(len(x.meta.shape), 1), *more)

    return make


def _matmul(ndim: int) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        if not b.has_room(2):
            return
        small: Fits = lambda m: max((1, *m.shape)) <= 32  # noqa: E731
        x = operand(b, s, both(is_number, has_dims(ndim, ndim), small))
        if x is None:
            return
        turned = b.read("aten.transpose.int", x, ndim - 2, ndim - 1)
        if target == "aten.addmm.default":
            bias = b.add_input(TensorSpec((1,), x.meta.dtype))
            b.read(target, bias, x, turned)
        else:
            b.read(target, x, turned)

    return make


def _where(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_numeric) if b.has_room(2) else None
    if x is None:
        return
    meta = x.meta
    condition = b.read("aten.gt.Scalar", x, 0)
    y = pick(b.readable(lambda m: m.shape == meta.shape and m.dtype == meta.dtype), s[5])
    b.read(target, condition, x, y if y is not None else x)


def _index_input(b: Builder, rows: int, shape: tuple[int, ...] = (1,)) -> Value:
    """An input whose values count rows; not offered to other ops."""
    value = b.add_input(TensorSpec(shape, "int64", high=rows))
    b.values.remove(value)
    return value


def _indexed(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, is_contiguous, has_rows, has_elements))
    if x is None:
        return
    rows = x.meta.shape[0]
    if target == "aten.gather.default":
        b.read(target, x, 0, _index_input(b, rows, (1,) * len(x.meta.shape)))
    elif target == "aten.index_select.default":
        b.read(target, x, 0, _index_input(b, rows, (1 + s[4] % 3,)))
    else:
        b.read(target, x, (_index_input(b, rows, (1 + s[4] % 3,)),))


def _index_put(b: Builder, s: bytes, target: str) -> None:
    if not b.has_room(3):
        return
    fits = both(is_numeric, is_contiguous, has_rows, has_elements)
    if target.endswith("put.default"):
        x = operand(b, s, fits)
        if x is not None:
            row = b.read("aten.slice.Tensor", x, 0, 0, 1)
            b.read(target, x, (_index_input(b, x.meta.shape[0]),), row)
        return
    x = pick(b.writable(fits), s[1])
    if x is not None:
        row = b.read("aten.clone.default", b.read("aten.slice.Tensor", x, 0, 0, 1))
        b.write(target, x, (_index_input(b, x.meta.shape[0]),), row, returns=s[6] >= 192)


def _slice_scatter(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, has_rows)) if b.has_room(2) else None
    if x is not None:
        rows = x.meta.shape[0]
        b.read(target, x, b.read("aten.slice.Tensor", x, 0, rows - 1, rows), 0, s[4] % rows, s[4] % rows + 1)


def _select_scatter(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, has_rows)) if b.has_room(2) else None
    if x is not None:
        rows = x.meta.shape[0]
        b.read(target, x, b.read("aten.select.int", x, 0, s[4] % rows), 0, s[5] % rows)


def _diagonal_scatter(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, has_dims(2))) if b.has_room(2) else None
    if x is not None:
        b.read(target, x, b.read("aten.diagonal.default", x, s[4] % 2), s[4] % 2)


def _pad(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, has_dims(1)))
    if x is not None:
        b.read(target, x, (s[4] % 2, 1 + s[5] % 2), 0)


def _flip(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(is_numeric, has_dims(1)))
    if x is not None:
        b.read(target, x, (s[4] % len(x.meta.shape),))


def _repeat(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, lambda m: is_numeric(m) and m.numel <= MAX_NUMEL // 2)
    if x is not None:
        b.read(target, x, (2,) + (1,) * (max(len(x.meta.shape), 1) - 1))


def _joined(b: Builder, s: bytes, target: str) -> None:
    is_stack = target == "aten.stack.default"
    fits: Fits = lambda m: m.numel <= MAX_NUMEL // 2 and (is_stack or bool(m.shape))  # noqa: E731
    x = operand(b, s, fits)
    if x is None:
        return
    meta = x.meta
    like: Fits = lambda m: (  # noqa: E731
        m.dtype == meta.dtype and fits(m) and (m.shape == meta.shape or (not is_stack and bool(m.shape) and m.shape[1:] == meta.shape[1:]))
    )
    y = pick(b.readable(like), s[5])
    b.read(target, (x, y if y is not None else x), 0)


def _cast(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, lambda m: bool(cast_targets(b, m.dtype)))
    if x is None:
        return
    targets = cast_targets(b, x.meta.dtype)
    dtype = DTypeArg(targets[s[4] % len(targets)])
    if target == "aten._to_copy.default":
        b.read(target, x, dtype=dtype)
    else:
        b.read(target, x, dtype)


def _packed(b: Builder, s: bytes, target: str) -> None:
    """What a bucketing pass packs the operands of a reduce_scatter with, on one or two of them."""
    size = max(group.size for group in b.groups)
    fits: Fits = lambda m: is_numeric(m) and bool(m.shape) and m.numel % size == 0 and m.numel <= MAX_NUMEL // 2  # noqa: E731
    x = operand(b, s, fits)
    if x is not None:
        dtype = x.meta.dtype
        y = pick(b.readable(lambda m: m.dtype == dtype and fits(m)), s[5])
        b.read(target, (x,) if y is None or s[4] < 128 else (x, y), size)


def _clone(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_any)
    if x is not None and s[4] < 128:
        b.read(target, x)
    elif x is not None:
        b.read(target, x, memory_format="contiguous_format")


_FACTORY_DTYPES: Final = ("float32", "bfloat16", "float16", "int64")


def _factory(b: Builder, s: bytes, target: str) -> None:
    allowed = [d for d in b.options.dtypes if d in _FACTORY_DTYPES]
    if not allowed:
        return
    shape, dtype = shape_from(s[3]), DTypeArg(allowed[s[4] % len(allowed)])
    if target == "aten.full.default":
        b.add(target, shape, s[5] % 4, dtype=dtype)
    else:
        b.add(target, shape, dtype=dtype)


def _factory_like(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_numeric)
    if x is not None:
        more = (1,) if target == "aten.full_like.default" else (shape_from(s[3]),) if ".new_" in target else ()
        b.read(target, x, *more)


def _empty(b: Builder, s: bytes, target: str) -> None:
    """Memory that nobody wrote, and at once a copy into it."""
    if not b.options.writes or not b.has_room(2):
        return
    x = operand(b, s, both(is_numeric, is_injective))
    if x is None:
        return
    shape, dtype = x.meta.shape, DTypeArg(x.meta.dtype)
    uses_operand = target in ("aten.empty_like.default", "aten.new_empty.default")
    if target == "aten.empty_like.default":
        made = b.read(target, x)
    elif target == "aten.new_empty.default":
        made = b.read(target, x, shape)
    elif target == "aten.empty_strided.default":
        made = b.add(target, shape, tuple(reversed(contiguous_stride(tuple(reversed(shape))))), dtype=dtype)
    else:
        made = b.add(target, shape, dtype=dtype)
    if s[5] < 128 or s[5] < 192 and not uses_operand:
        b.write("aten.copy_.default", made, x)
    elif s[5] < 192:
        b.write("aten.fill_.Scalar", made, s[5] % 4)
    else:
        b.write("aten._foreach_copy_.default", (made,), (x,))


def _masked_fill(b: Builder, s: bytes, target: str) -> None:
    x = pick(b.writable(is_number), s[1]) if b.has_room(2) else None
    if x is not None:
        b.write(target, x, b.read("aten.gt.Scalar", x, 0), _number(x.meta, s[5]), returns=s[6] >= 192)


def _writing(fits: Fits, num_operands: int) -> Make:
    def make(b: Builder, s: bytes, target: str) -> None:
        x = pick(b.writable(fits), s[1])
        if x is None:
            return
        meta, returns = x.meta, s[6] >= 192
        if num_operands == 1:
            b.write(target, x, returns=returns)
            return
        y = None
        if target.endswith(".Tensor") and s[4] >= 128:
            y = pick(b.readable(lambda m: _is_operand_of(m, meta)), s[5])
        b.write(target, x, y if y is not None else _number(meta, s[5]), returns=returns)

    return make


def _is_operand_of(other: TensorMeta, target: TensorMeta) -> bool:
    """Whether ``target.add_(other)`` is allowed: broadcasts into it, of no higher category, in memory of its own."""
    if other.storage == target.storage or not is_number(other) or len(other.shape) > len(target.shape):
        return False
    if _ORDER[DTYPES[other.dtype].kind] > _ORDER[DTYPES[target.dtype].kind]:
        return False
    return all(x in (1, y) for x, y in zip(reversed(other.shape), reversed(target.shape), strict=False))


def _copy_(b: Builder, s: bytes, target: str) -> None:
    x = pick(b.writable(is_numeric), s[1])
    if x is None:
        return
    meta = x.meta
    y = pick(b.readable(lambda m: is_source_of(m, meta)), s[5])
    if y is None:
        return
    if target == "aten.copy_.default":
        b.write(target, x, y, returns=s[6] >= 192)
    else:
        b.write(target, (x,), (y,))


def is_source_of(source: TensorMeta, target: TensorMeta) -> bool:
    """Whether ``target.copy_(source)`` is allowed and defined: same shape, in memory of its own, no float to integer."""
    if source.shape != target.shape or source.storage == target.storage or source.dtype.startswith("float8"):
        return False
    return not (DTYPES[source.dtype].kind == "float" and is_int(target))

_Entry = tuple[tuple[str, Make], int]


def _entries(names: str, make: Make, weight: int = 1) -> list[_Entry]:
    return [((name if name.startswith(("prims.", "bucketing.")) else f"aten.{name}", make), weight) for name in names.split()]


_COMPUTE: Final[list[_Entry]] = [
    *_entries("add.Tensor mul.Tensor", _binary(is_numeric), 3),
    *_entries("neg.default relu.default", _unary(is_number), 2),
    *_entries("clone.default", _clone, 4),
    *_entries("prims.convert_element_type.default", _cast, 4),
    *_entries("_to_copy.default", _cast, 2),
    *_entries("cat.default", _joined, 3),
    *_entries("stack.default", _joined),
    *_entries("sin.default", _unary(is_numeric), 1),
    *_entries("exp.default cos.default tanh.default sigmoid.default sqrt.default rsqrt.default reciprocal.default", _unary(is_numeric)),
    *_entries("abs.default sign.default square.default", _unary(is_number)),
    *_entries("gelu.default silu.default", _unary(is_float)),
    *_entries("bitwise_not.default", _unary(is_int)),
    *_entries("logical_not.default isnan.default", _unary(is_numeric)),
    *_entries("clamp.default", _clamp),
    *_entries("add.Scalar mul.Scalar div.Scalar div.Tensor", _binary(is_numeric)),
    *_entries("sub.Tensor sub.Scalar", _binary(is_number)),
    *_entries("maximum.default minimum.default", _binary(is_numeric, tensors_only=True)),
    *_entries("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", _binary(is_numeric, tensors_only=True)),
    *_entries("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", _binary(is_numeric)),
    *_entries("where.self", _where),
    *_entries("sum.default", _unary(is_numeric)),
    *_entries("mean.default", _unary(is_float)),
    *_entries("sum.dim_IntList", _reduce_dim(is_numeric)),
    *_entries("mean.dim", _reduce_dim(is_float)),
    *_entries("amax.default amin.default", _reduce_dim(is_numeric)),
    *_entries("cumsum.default", _along(is_numeric)),
    *_entries("_softmax.default", _along(is_float, False)),
    *_entries("argmax.default argmin.default", _along(both(is_number, has_elements))),
    *_entries("mm.default", _matmul(2), 2),
    *_entries("addmm.default", _matmul(2)),
    *_entries("bmm.default", _matmul(3)),
    *_entries("index.Tensor index_select.default gather.default", _indexed),
    *_entries("index_put.default", _index_put),
    *_entries("slice_scatter.default", _slice_scatter),
    *_entries("select_scatter.default", _select_scatter),
    *_entries("diagonal_scatter.default", _diagonal_scatter),
    *_entries("constant_pad_nd.default", _pad),
    *_entries("flip.default", _flip),
    *_entries("repeat.default", _repeat),
    *_entries("bucketing._pre_bucket_reduce_scatter.default", _packed),
    *_entries("zeros.default ones.default full.default", _factory),
    *_entries("new_zeros.default zeros_like.default ones_like.default full_like.default", _factory_like),
    *_entries("empty.memory_format empty_strided.default new_empty.default empty_like.default", _empty),
]

OPERATORS: Final[Table[tuple[str, Make]]] = Table(*_COMPUTE, *VIEWS)
"""Computation, copies, casts and views, the most frequent and simplest first."""

WRITES: Final[Table[tuple[str, Make]]] = Table(
    *_entries("add_.Tensor mul_.Tensor", _writing(is_number, 2), 4),
    *_entries("copy_.default", _copy_, 4),
    *_entries("zero_.default", _writing(is_any, 1), 2),
    *_entries("fill_.Scalar", _writing(is_any, 2), 2),
    *_entries("sub_.Tensor add_.Scalar sub_.Scalar mul_.Scalar", _writing(is_number, 2)),
    *_entries("div_.Tensor div_.Scalar", _writing(is_float, 2)),
    *_entries("neg_.default relu_.default", _writing(is_number, 1)),
    *_entries("exp_.default sigmoid_.default tanh_.default", _writing(is_float, 1)),
    *_entries("index_put_.default", _index_put),
    *_entries("masked_fill_.Scalar", _masked_fill),
    *_entries("_foreach_copy_.default", _copy_, 2),
)
"""Ops in place."""


def add_operator(b: Builder, s: bytes) -> None:
    """Add the op that bytes 2 and 7 together choose, where it is possible."""
    if b.has_room():
        target, make = OPERATORS[(s[2] + s[7]) % 256]
        make(b, s, target)


def add_write(b: Builder, s: bytes) -> None:
    """Add the op in place that bytes 2 and 7 together choose, where it is possible."""
    if b.has_room():
        target, make = WRITES[(s[2] + s[7]) % 256]
        make(b, s, target)
