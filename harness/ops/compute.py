"""Operators that compute: arithmetic, pointwise functions, comparisons, reductions, matrix products, and their in-place forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.ops.core import (
    OpSpec,
    broadcast_shapes,
    computation_dtype,
    elementwise,
    fresh,
    require,
    require_dtype,
    require_writable,
    tensors,
    wrap_dim,
)
from harness.ops.moves import index_put
from harness.spec.dtypes import DTYPES
from harness.spec.meta import Kind, TensorMeta

__all__ = ["COMPUTE"]

Operand = TensorMeta | float | int | bool
Rule = Callable[..., TensorMeta | tuple[TensorMeta, ...]]
_NUMERIC = "float int uint bool"


def _metas(*operands: Operand) -> list[TensorMeta]:
    found = [m for m in operands if isinstance(m, TensorMeta)]
    for meta in found:
        require_dtype(meta, _NUMERIC, "arithmetic")
    return found


def _binary(*, floats: bool = False, no_bool: bool = False) -> Rule:
    def rule(self: TensorMeta, other: Operand, alpha: float = 1) -> TensorMeta:
        operands = _metas(self, other)
        dtype = computation_dtype(self, other)
        has_bool = isinstance(other, bool) or "bool" in {m.dtype for m in operands}
        require(not (no_bool and has_bool), "a bool is subtracted or subtracted from")
        if floats and DTYPES[dtype].kind != "float":
            dtype = "float32"
        require(alpha == 1 or DTYPES[dtype].kind == "float" or isinstance(alpha, int), f"alpha {alpha} for {dtype}")
        return elementwise(operands, dtype)

    return rule


def _binary_(*, floats: bool = False, no_bool: bool = False) -> Rule:
    pure = _binary(floats=floats, no_bool=no_bool)

    def rule(self: TensorMeta, other: Operand, alpha: float = 1) -> TensorMeta:
        require_writable(self)
        result = pure(self, other, alpha)
        assert isinstance(result, TensorMeta)
        require(result.shape == self.shape, f"in-place result of {list(result.shape)} into {list(self.shape)}")
        order = {"bool": 0, "int": 1, "uint": 1, "float": 2}
        require(order[DTYPES[result.dtype].kind] <= order[DTYPES[self.dtype].kind], f"in-place result of {result.dtype} into {self.dtype}")
        return self

    return rule


def _unary(kinds: str, *, to_float: bool = False) -> Rule:
    def rule(self: TensorMeta, *args: object, **kwargs: object) -> TensorMeta:
        require_dtype(self, kinds, "this function")
        dtype = "float32" if to_float and DTYPES[self.dtype].kind != "float" else self.dtype
        return elementwise([self], dtype)

    return rule


def _unary_(kinds: str) -> Rule:
    def rule(self: TensorMeta) -> TensorMeta:
        require_dtype(self, kinds, "this function")
        require_writable(self)
        return self

    return rule


def _comparison(self: TensorMeta, other: Operand) -> TensorMeta:
    return elementwise(_metas(self, other), "bool", computation_dtype(self, other))


def _to_bool(self: TensorMeta) -> TensorMeta:
    require_dtype(self, _NUMERIC, "this predicate")
    return elementwise([self], "bool", self.dtype)


def _extremum(self: TensorMeta, other: TensorMeta) -> TensorMeta:
    return elementwise(_metas(self, other), computation_dtype(self, other))


def _clamp(self: TensorMeta, min: float | None = None, max: float | None = None) -> TensorMeta:
    require(min is not None or max is not None, "clamp needs a bound")
    require_dtype(self, "float int uint", "clamp")
    dtype = computation_dtype(self, *(b for b in (min, max) if b is not None))
    return elementwise([self], dtype)


def _reduced(meta: TensorMeta, dim: int | Sequence[int] | None, keepdim: bool) -> tuple[int, ...]:
    dims = list(range(len(meta.shape))) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    wrapped = {wrap_dim(d, len(meta.shape)) for d in dims}
    require(len(wrapped) == len(dims), f"dims {dims}: one stands twice")
    if keepdim:
        return tuple(1 if i in wrapped else size for i, size in enumerate(meta.shape))
    return tuple(size for i, size in enumerate(meta.shape) if i not in wrapped)


def _sum_dtype(meta: TensorMeta, dtype: str | None) -> str:
    require_dtype(meta, _NUMERIC, "sum")
    return dtype or (meta.dtype if DTYPES[meta.dtype].kind == "float" else "int64")


def _reduction_result(meta: TensorMeta, shape: tuple[int, ...], dim: int | Sequence[int] | None, keepdim: bool, dtype: str) -> TensorMeta:
    require(meta.is_contiguous, "reductions are modelled for contiguous tensors")
    return fresh(shape, dtype)


def _sum(self: TensorMeta, *, dtype: str | None = None) -> TensorMeta:
    return fresh((), _sum_dtype(self, dtype))


def _sum_dim(self: TensorMeta, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: str | None = None) -> TensorMeta:
    return _reduction_result(self, _reduced(self, dim, keepdim), dim, keepdim, _sum_dtype(self, dtype))


def _mean(self: TensorMeta, *, dtype: str | None = None) -> TensorMeta:
    require_dtype(self, "float", "mean")
    return fresh((), dtype or self.dtype)


def _mean_dim(self: TensorMeta, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: str | None = None) -> TensorMeta:
    require_dtype(self, "float", "mean")
    return _reduction_result(self, _reduced(self, dim, keepdim), dim, keepdim, dtype or self.dtype)


def _amax(self: TensorMeta, dim: Sequence[int] = (), keepdim: bool = False) -> TensorMeta:
    require_dtype(self, _NUMERIC, "an extremum")
    shape = _reduced(self, dim, keepdim)
    dims = range(len(self.shape)) if not dim else [wrap_dim(d, len(self.shape)) for d in dim]
    require(not self.shape or all(self.shape[d] for d in dims), "the extremum of no elements")
    return _reduction_result(self, shape, dim, keepdim, self.dtype)


def _argmax(self: TensorMeta, dim: int | None = None, keepdim: bool = False) -> TensorMeta:
    require_dtype(self, "float int uint", "argmax")
    require(self.numel > 0, "the extremum of no elements")
    shape = _reduced(self, dim, keepdim)
    return _reduction_result(self, shape, dim, keepdim, "int64")


def _cumsum(self: TensorMeta, dim: int, *, dtype: str | None = None) -> TensorMeta:
    wrap_dim(dim, len(self.shape))
    require(self.is_contiguous, "cumsum is modelled for contiguous tensors")
    return fresh(self.shape, _sum_dtype(self, dtype))


def _softmax(self: TensorMeta, dim: int, half_to_float: bool) -> TensorMeta:
    wrap_dim(dim, len(self.shape))
    require_dtype(self, "float", "softmax")
    require(not half_to_float and self.is_contiguous, "softmax is modelled for contiguous tensors, without half_to_float")
    return fresh(self.shape, self.dtype)


def _mm(self: TensorMeta, mat2: TensorMeta) -> TensorMeta:
    require_dtype(self, "float int uint", "mm")
    ok = len(self.shape) == len(mat2.shape) == 2 and self.shape[1] == mat2.shape[0] and self.dtype == mat2.dtype
    require(ok, f"mm of {self.dtype}{list(self.shape)} and {mat2.dtype}{list(mat2.shape)}")
    return fresh((self.shape[0], mat2.shape[1]), self.dtype)


def _bmm(self: TensorMeta, mat2: TensorMeta) -> TensorMeta:
    require_dtype(self, "float int uint", "bmm")
    a, b = self.shape, mat2.shape
    require(len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1] and self.dtype == mat2.dtype, f"bmm of {list(a)} and {list(b)}")
    return fresh((a[0], a[1], b[2]), self.dtype)


def _addmm(self: TensorMeta, mat1: TensorMeta, mat2: TensorMeta, *, beta: float = 1, alpha: float = 1) -> TensorMeta:
    product = _mm(mat1, mat2)
    require(self.dtype == product.dtype and broadcast_shapes(self.shape, product.shape) == product.shape, "addmm's operands do not fit")
    return product


def _copy_(self: TensorMeta, src: TensorMeta, non_blocking: bool = False) -> TensorMeta:
    require_writable(self)
    require(broadcast_shapes(self.shape, src.shape) == self.shape, f"copy of {list(src.shape)} into {list(self.shape)}")
    return self


def _fill_(self: TensorMeta, value: float) -> TensorMeta:
    require_writable(self)
    return self


def _masked_fill_(self: TensorMeta, mask: TensorMeta, value: float) -> TensorMeta:
    require_writable(self)
    require(mask.dtype == "bool", f"a mask of {mask.dtype}; must be bool")
    require(broadcast_shapes(self.shape, mask.shape) == self.shape, f"mask {list(mask.shape)} of {list(self.shape)}")
    return self


def _zero_(self: TensorMeta) -> TensorMeta:
    require_writable(self)
    return self


def _index_put_(self: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta, accumulate: bool = False) -> TensorMeta:
    require_writable(self)
    index_put(self, indices, values, accumulate)
    return self


def _foreach_copy_(self: Sequence[TensorMeta], src: Sequence[TensorMeta], non_blocking: bool = False) -> tuple[TensorMeta, ...]:
    targets, sources = tensors(self, "the targets"), tensors(src, "the sources")
    require(len(targets) == len(sources), f"{len(sources)} sources for {len(targets)} targets")
    for a, b in zip(targets, sources, strict=True):
        _copy_(a, b)
    return ()


def _declare(names: str, kind: Kind, rule: Rule, writes: tuple[int, ...] = ()) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(f"aten.{name}", kind, rule, writes) for name in names.split())


COMPUTE = (
    *_declare("add.Tensor add.Scalar mul.Tensor mul.Scalar", "arithmetic", _binary()),
    *_declare("sub.Tensor sub.Scalar", "arithmetic", _binary(no_bool=True)),
    *_declare("div.Tensor div.Scalar", "arithmetic", _binary(floats=True)),
    *_declare("add_.Tensor add_.Scalar mul_.Tensor mul_.Scalar", "inplace", _binary_(), (0,)),
    *_declare("sub_.Tensor sub_.Scalar", "inplace", _binary_(no_bool=True), (0,)),
    *_declare("div_.Tensor div_.Scalar", "inplace", _binary_(floats=True), (0,)),
    *_declare("neg.default", "arithmetic", _unary("float int uint")),
    *_declare("square.default", "arithmetic", _unary("float int uint")),
    *_declare("neg_.default", "inplace", _unary_("float int uint"), (0,)),
    *_declare("relu.default abs.default sign.default", "pointwise", _unary("float int uint")),
    *_declare("bitwise_not.default", "pointwise", _unary("int uint")),
    *_declare(
        "exp.default sin.default cos.default tanh.default sigmoid.default sqrt.default rsqrt.default reciprocal.default",
        "pointwise",
        _unary(_NUMERIC, to_float=True),
    ),
    *_declare("gelu.default silu.default", "pointwise", _unary("float")),
    *_declare("clamp.default", "pointwise", _clamp),
    *_declare("relu_.default", "inplace", _unary_("float int uint"), (0,)),
    *_declare("exp_.default sigmoid_.default tanh_.default", "inplace", _unary_("float"), (0,)),
    *_declare("maximum.default minimum.default", "pointwise", _extremum),
    *_declare(
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
        "pointwise",
        _comparison,
    ),
    *_declare("logical_not.default isnan.default", "pointwise", _to_bool),
    *_declare("sum.default", "arithmetic", _sum),
    *_declare("sum.dim_IntList", "arithmetic", _sum_dim),
    *_declare("mean.default", "arithmetic", _mean),
    *_declare("mean.dim", "arithmetic", _mean_dim),
    *_declare("cumsum.default", "arithmetic", _cumsum),
    *_declare("amax.default amin.default", "pointwise", _amax),
    *_declare("argmax.default argmin.default", "opaque", _argmax),
    *_declare("_softmax.default", "opaque", _softmax),
    *_declare("mm.default", "arithmetic", _mm),
    *_declare("bmm.default", "arithmetic", _bmm),
    *_declare("addmm.default", "arithmetic", _addmm),
    *_declare("copy_.default", "inplace", _copy_, (0,)),
    *_declare("zero_.default", "inplace", _zero_, (0,)),
    *_declare("fill_.Scalar", "inplace", _fill_, (0,)),
    *_declare("masked_fill_.Scalar", "inplace", _masked_fill_, (0,)),
    *_declare("index_put_.default", "inplace", _index_put_, (0,)),
    *_declare("_foreach_copy_.default", "inplace", _foreach_copy_, (0,)),
)
