"""What each operator of the table does to field halves: one rule an operator, by the kinds that ``algebra`` describes.

A rule is called with the field, the concrete arguments in the schema's order, the same with field halves in place of tensors,
the keyword-only arguments, and the concrete result. It gives the field half of the result, or None where memory was
reinterpreted so that there is none; an in-place rule writes the field half it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from harness.executors.algebra import Field, P
from harness.graph import bucket_dtypes

__all__ = ["RULES", "Rule", "dtype_name", "uninitialised"]

Rule = Callable[[Field, list[Any], list[Any], dict[str, Any], Any], Any]

_NAMES: Final[dict[torch.dtype, str]] = {
    value: name for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype) and name == str(value)[6:]
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``float32``."""
    return _NAMES[dtype]


def _operand(field: Field, concrete: Any, half: Any, dtype: torch.dtype) -> Any:
    """One operand of an arithmetic operator, cast to the dtype it computes in; a number as a constant."""
    if isinstance(concrete, Tensor):
        return half if concrete.dtype is dtype else field.cast(half, _NAMES[concrete.dtype], _NAMES[dtype])
    return field.constant(concrete)


def _broadcast(value: Any, out: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64)


def _add(field: Field, x: Any, y: Any) -> Any:
    return x + y


def _sub(field: Field, x: Any, y: Any) -> Any:
    return x - y


def _mul(field: Field, x: Any, y: Any) -> Any:
    return x * y


def _div(field: Field, x: Any, y: Any) -> Any:
    return x * (field.inverse(y) if isinstance(y, Tensor) else pow(y, P - 2, P))


def _arithmetic(combine: Callable[[Field, Any, Any], Any]) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        dtype = out.dtype
        if dtype is torch.bool:
            return out.long()
        x = _operand(field, c[0], f[0], dtype)
        y = _operand(field, c[1], f[1], dtype)
        alpha = kw.get("alpha", 1) if len(c) < 3 else c[2]
        if alpha != 1:
            y = y * field.constant(alpha) % P
        result = combine(field, x, y)
        return result.remainder_(P) if isinstance(result, Tensor) else _broadcast(result % P, out)

    return rule


def _arithmetic_(combine: Callable[[Field, Any, Any], Any]) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        if out.dtype is torch.bool:
            return f[0].copy_(out)
        compute = torch.result_type(c[0], c[1])
        x, y = _operand(field, c[0], f[0], compute), _operand(field, c[1], f[1], compute)
        alpha = kw.get("alpha", 1) if len(c) < 3 else c[2]
        if alpha != 1:
            y = y * field.constant(alpha) % P
        result = combine(field, x, y).remainder_(P)
        return f[0].copy_(field.cast(result, _NAMES[compute], _NAMES[c[0].dtype]))

    return rule


def _neg(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return (-f[0]).remainder_(P)


def _neg_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].neg_().remainder_(P)


def _square(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return (f[0] * f[0]).remainder_(P)


def _mm(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return field.matmul(f[0], f[1])


def _addmm(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    beta, alpha = field.constant(kw.get("beta", 1)), field.constant(kw.get("alpha", 1))
    return (f[0] * beta % P + field.matmul(f[1], f[2]) * alpha % P).remainder_(P)


def _dims(c: list[Any], position: int, rank: int) -> list[int]:
    dims = c[position] if len(c) > position else None
    if dims is None or dims == [] or dims == ():
        return list(range(rank))
    return [dims] if isinstance(dims, int) else list(dims)


def _sum(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    x = _operand(field, c[0], f[0], out.dtype)
    return x.sum(_dims(c, 1, x.dim()), bool(c[2]) if len(c) > 2 else False).remainder_(P)


def _sum_all(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return _operand(field, c[0], f[0], out.dtype).sum().remainder_(P)


def _mean(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    dims = _dims(c, 1, f[0].dim())
    count = math.prod(f[0].shape[d] for d in dims)
    total = _sum(field, c, f, kw, out)
    return (total * pow(count % P, P - 2, P)).remainder_(P)


def _cumsum(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return _operand(field, c[0], f[0], out.dtype).cumsum(c[1]).remainder_(P)


def _extremum(greatest: bool) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        x, y = _operand(field, c[0], f[0], out.dtype), _operand(field, c[1], f[1], out.dtype)
        return field.extremum(*torch.broadcast_tensors(x, y), greatest=greatest)

    return rule


def _extremum_dims(greatest: bool) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        keepdim = bool(c[2]) if len(c) > 2 else False
        return field.extremum_dims(f[0], _dims(c, 1, f[0].dim()), keepdim, greatest=greatest)

    return rule


def _pointwise(name: str) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        if out.dtype is torch.bool:
            return out.long()
        constants = tuple(repr(x) for x in c[1:]) + tuple(sorted((k, repr(v)) for k, v in kw.items()))
        return field.hash(f[0], name, _NAMES[out.dtype], constants)

    return rule


def _pointwise_(name: str) -> Rule:
    pure = _pointwise(name)

    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        return f[0].copy_(pure(field, c, f, kw, out))

    return rule


def _opaque(name: str) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        constants = tuple(repr(x) for x in c if not isinstance(x, Tensor))
        operands = [x for x in f if isinstance(x, Tensor)]
        return field.opaque(operands, out.shape, name, _NAMES[out.dtype], constants)

    return rule


def _control(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return out.to(torch.int64, copy=True)


def _where(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    x, y = _operand(field, c[1], f[1], out.dtype), _operand(field, c[2], f[2], out.dtype)
    return torch.where(c[0], x, y)


def _cast(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    result = field.cast(f[0], _NAMES[c[0].dtype], _NAMES[out.dtype])
    return result.clone() if result is f[0] else result


def _copy_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].copy_(_operand(field, c[1], f[1], c[0].dtype))


def _foreach_copy_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Any) -> tuple[()]:
    for target, source, to, half in zip(c[0], c[1], f[0], f[1], strict=True):
        to.copy_(_operand(field, source, half, target.dtype))
    return ()


def _zero_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].zero_()


def _fill_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].fill_(field.constant(c[1]))


def _masked_fill_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].masked_fill_(c[1], field.constant(c[2]))


def _filled(value: Callable[[list[Any]], float]) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        return torch.empty_strided(out.shape, out.stride(), dtype=torch.int64).fill_(field.constant(value(c)))

    return rule


def _cat_like(call: Callable[..., Tensor]) -> Rule:
    def rule(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
        parts = [_operand(field, x, half, out.dtype) for x, half in zip(c[0], f[0], strict=True)]
        return call(parts, *c[1:])

    return rule


def _pad(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.constant_pad_nd(f[0], c[1], field.constant(c[2] if len(c) > 2 else 0))


def _index(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.ops.aten.index.Tensor(f[0], c[1])


def _index_select(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].index_select(c[1], c[2])


def _gather(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return f[0].gather(c[1], c[2])


def _index_put(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    accumulate = bool(c[3]) if len(c) > 3 else False
    result = torch.ops.aten.index_put.default(f[0], c[1], f[2], accumulate)
    return result.remainder_(P) if accumulate else result


def _index_put_(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    accumulate = bool(c[3]) if len(c) > 3 else False
    torch.ops.aten.index_put_.default(f[0], c[1], f[2], accumulate)
    return f[0].remainder_(P) if accumulate else f[0]


def _slice_scatter(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.ops.aten.slice_scatter.default(f[0], _operand(field, c[1], f[1], out.dtype), *c[2:])


def _select_scatter(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.ops.aten.select_scatter.default(f[0], _operand(field, c[1], f[1], out.dtype), *c[2:])


def _diagonal_scatter(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.ops.aten.diagonal_scatter.default(f[0], _operand(field, c[1], f[1], out.dtype), *c[2:])


def _view_dtype(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor | None:
    return f[0].view(torch.int64) if c[0].dtype is out.dtype else None


def _pre_bucket_reduce_scatter(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return torch.cat([x.reshape(c[1], -1) for x in f[0]], dim=1).flatten()


def _pre_bucket_all_gather(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor | None:
    """The bucket holds each input, cast to its output dtype, in this rank's chunk; elsewhere memory nobody wrote."""
    inputs, group_size, dtype, out_dtypes, rank = c[:5]
    dtypes = [bucket_dtypes()[i] for i in out_dtypes]
    if any(d is not dtype for d in dtypes):
        return None
    chunk = torch.cat([_operand(field, x, half, dtype).reshape(-1) for x, half in zip(inputs, f[0], strict=True)])
    result = uninitialised(field, out)
    if chunk.numel() * group_size == result.numel():
        result[rank * chunk.numel() : (rank + 1) * chunk.numel()] = chunk
    return result


def _all_gather_copy_in(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Any) -> tuple[Tensor, Tensor]:
    numel, rank = c[3], c[4]
    chunk = f[1].narrow(0, numel * rank, numel)
    for part, source, half in zip(chunk.split(list(c[2])), c[0], f[0], strict=True):
        part.copy_(_operand(field, source, half, c[1].dtype))
    return chunk, f[1]


def uninitialised(field: Field, out: Tensor) -> Tensor:
    """The field half of memory that nobody wrote: fresh random values, from the generator of poison, not of inputs."""
    result = torch.empty_strided(out.shape, out.stride(), dtype=torch.int64)
    return result.random_(0, P, generator=field.poison)


def _empty(field: Field, c: list[Any], f: list[Any], kw: dict[str, Any], out: Tensor) -> Tensor:
    return uninitialised(field, out)


def _aten(names: str, rule: Callable[[str], Rule] | Rule, *, named: bool = False) -> dict[str, Rule]:
    return {f"aten.{name}": (rule(name) if named else rule) for name in names.split()}  # type: ignore[call-arg, arg-type, misc]


def _pure_name(name: str) -> Rule:
    return _pointwise(name.split(".")[0])


def _inplace_name(name: str) -> Rule:
    return _pointwise_(name.split(".")[0].rstrip("_"))


def _opaque_name(name: str) -> Rule:
    return _opaque(name)


RULES: Final[dict[str, Rule]] = {
    **_aten("empty.memory_format new_empty.default empty_like.default empty_strided.default", _empty),
    **_aten("full.default", _filled(lambda c: c[1])),
    **_aten("full_like.default", _filled(lambda c: c[1])),
    **_aten("zeros.default zeros_like.default new_zeros.default", _filled(lambda c: 0)),
    **_aten("ones.default ones_like.default", _filled(lambda c: 1)),
    **_aten("add.Tensor add.Scalar", _arithmetic(_add)),
    **_aten("sub.Tensor sub.Scalar", _arithmetic(_sub)),
    **_aten("mul.Tensor mul.Scalar", _arithmetic(_mul)),
    **_aten("div.Tensor div.Scalar", _arithmetic(_div)),
    **_aten("add_.Tensor add_.Scalar", _arithmetic_(_add)),
    **_aten("sub_.Tensor sub_.Scalar", _arithmetic_(_sub)),
    **_aten("mul_.Tensor mul_.Scalar", _arithmetic_(_mul)),
    **_aten("div_.Tensor div_.Scalar", _arithmetic_(_div)),
    **_aten("neg.default", _neg),
    **_aten("neg_.default", _neg_),
    **_aten("square.default", _square),
    **_aten("mm.default bmm.default", _mm),
    **_aten("addmm.default", _addmm),
    **_aten("sum.default", _sum_all),
    **_aten("sum.dim_IntList", _sum),
    **_aten("mean.default mean.dim", _mean),
    **_aten("cumsum.default", _cumsum),
    **_aten("maximum.default", _extremum(True)),
    **_aten("minimum.default", _extremum(False)),
    **_aten("amax.default", _extremum_dims(True)),
    **_aten("amin.default", _extremum_dims(False)),
    **_aten(
        "relu.default exp.default sin.default cos.default tanh.default sigmoid.default abs.default sqrt.default"
        " rsqrt.default reciprocal.default sign.default gelu.default silu.default clamp.default bitwise_not.default",
        _pure_name,
        named=True,
    ),
    **_aten("relu_.default exp_.default sigmoid_.default tanh_.default", _inplace_name, named=True),
    **_aten("_softmax.default", _opaque_name, named=True),
    **_aten(
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar"
        " ge.Scalar logical_not.default logical_and.default logical_or.default isnan.default argmax.default argmin.default",
        _control,
    ),
    **_aten("where.self", _where),
    **_aten("_to_copy.default", _cast),
    "prims.convert_element_type.default": _cast,
    **_aten("copy_.default", _copy_),
    **_aten("_foreach_copy_.default", _foreach_copy_),
    **_aten("zero_.default", _zero_),
    **_aten("fill_.Scalar", _fill_),
    **_aten("masked_fill_.Scalar", _masked_fill_),
    **_aten("cat.default", _cat_like(torch.ops.aten.cat.default)),
    **_aten("stack.default", _cat_like(torch.ops.aten.stack.default)),
    **_aten("constant_pad_nd.default", _pad),
    **_aten("index.Tensor", _index),
    **_aten("index_select.default", _index_select),
    **_aten("gather.default", _gather),
    **_aten("index_put.default", _index_put),
    **_aten("index_put_.default", _index_put_),
    **_aten("slice_scatter.default", _slice_scatter),
    **_aten("select_scatter.default", _select_scatter),
    **_aten("diagonal_scatter.default", _diagonal_scatter),
    **_aten("view.dtype", _view_dtype),
    "bucketing._pre_bucket_reduce_scatter.default": _pre_bucket_reduce_scatter,
    "bucketing._pre_bucket_all_gather.default": _pre_bucket_all_gather,
    "fsdp.all_gather_copy_in.default": _all_gather_copy_in,
}
