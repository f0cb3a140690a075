"""The pure rules for shapes and dtypes against torch's eager kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.graph import fake_mode, resolve, tensor_meta
from harness.ops import TABLE, OpError, infer
from harness.spec.dtypes import DTYPES, promote, represents
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, GroupArg

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
FLOATS = ("float32", "bfloat16", "float64")
SHAPES = ((), (1,), (3,), (4,), (0,), (2, 3), (3, 1), (4, 4), (2, 0), (2, 2, 3))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None, dtypes: tuple[str, ...] = (*FLOATS, "int64", "int32", "bool", "uint8")) -> torch.Tensor:
    """Tensors in varied layouts: contiguous, transposed, with an offset and gaps, expanded."""
    sizes = draw(st.sampled_from(SHAPES)) if shape is None else shape
    dtype = getattr(torch, draw(st.sampled_from(dtypes)))
    layout = draw(st.sampled_from(("contiguous", "transposed", "sliced", "expanded")))
    if layout == "transposed" and len(sizes) > 1:
        return torch.ones(tuple(reversed(sizes)), dtype=dtype).permute(tuple(range(len(sizes) - 1, -1, -1)))
    if layout == "sliced" and sizes:
        return torch.ones((*sizes[:-1], 2 * sizes[-1] + 1), dtype=dtype)[..., 1::2]
    if layout == "expanded" and sizes:
        return torch.ones((1, *sizes[1:]), dtype=dtype).expand(sizes)
    return torch.ones(sizes, dtype=dtype)


def view_calls(draw: st.DrawFn, x: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
    dim = draw(st.integers(-3, 3))
    small = st.integers(-2, 4)
    return draw(
        st.sampled_from(
            [
                ("view.default", (draw(st.sampled_from([(-1,), (x.numel(),), (1, x.numel()), (2, -1)])),)),
                ("reshape.default", (draw(st.sampled_from([(-1,), (x.numel(), 1), (2, -1)])),)),
                ("flatten.using_ints", (0, -1)),
                ("transpose.int", (dim, draw(small))),
                ("t.default", ()),
                ("permute.default", (tuple(range(x.dim() - 1, -1, -1)),)),
                ("slice.Tensor", (dim, draw(small), draw(small), draw(st.integers(1, 3)))),
                ("select.int", (dim, draw(small))),
                ("split.Tensor", (draw(st.integers(1, 3)), dim)),
                ("split_with_sizes.default", ((1, x.shape[0] - 1) if x.dim() and x.shape[0] else (0,), 0)),
                ("unbind.int", (dim,)),
                ("unsqueeze.default", (dim,)),
                ("squeeze.default", ()),
                ("squeeze.dim", (dim,)),
                ("expand.default", ((2, *x.shape),)),
                ("diagonal.default", (draw(st.integers(-1, 1)), 0, 1)),
                ("narrow.default", (dim, draw(st.integers(0, 2)), draw(st.integers(0, 2)))),
                ("detach.default", ()),
                ("alias.default", ()),
                ("clone.default", ()),
                ("flip.default", ((0,),)),
                ("empty_like.default", ()),
                ("zeros_like.default", ()),
                ("repeat.default", ((2, *([1] * x.dim())),)),
                ("constant_pad_nd.default", ((1, 1),)),
                ("view.dtype", (DTypeArg(draw(st.sampled_from(["float32", "uint8", "int64", "bfloat16"]))),)),
                ("neg.default", ()),
                ("relu.default", ()),
                ("exp.default", ()),
                ("sum.default", ()),
                ("logical_not.default", ()),
                ("_to_copy.default", ()),
            ]
        )
    )


def planned(x: torch.Tensor) -> TensorMeta:
    meta = tensor_meta(x)
    return meta._replace(storage=7)


def reaching(meta: TensorMeta) -> tuple[Any, ...]:
    """Geometry without strides that reach nothing: of empty tensors, and of dimensions of size 1."""
    if 0 in meta.shape:
        return meta.shape, meta.dtype
    return meta.shape, tuple(0 if n == 1 else s for n, s in zip(meta.shape, meta.stride, strict=True)), meta.dtype, meta.offset


def agrees(target: str, ours: tuple[Any, ...], theirs: tuple[Any, ...], operands: list[torch.Tensor]) -> None:
    """Both refuse, or both give the same geometry and aliasing."""
    storages = {x.untyped_storage()._cdata: 7 + i for i, x in enumerate(operands)}
    metas = iter([tensor_meta(x)._replace(storage=7 + i) for i, x in enumerate(operands)])
    args = tuple(next(metas) if isinstance(a, torch.Tensor) else a for a in ours)
    try:
        expected = resolve(f"aten.{target}")(*theirs)
    except (RuntimeError, IndexError, NotImplementedError, TypeError):
        expected = None
    try:
        result = infer(f"aten.{target}", args, {}, {})
    except OpError:
        result = None
    if expected is None:
        assert result is None, f"{target}{theirs}: torch refuses, the rule gives {result}"
        return
    if result is None:
        return
    outs = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    metas_out = [result] if isinstance(result, TensorMeta) else list(result)
    assert len(outs) == len(metas_out)
    for out, meta in zip(outs, metas_out, strict=True):
        seen = tensor_meta(out)
        assert reaching(seen) == reaching(meta), f"{target}{ours}"
        if out.numel():
            assert storages.get(seen.storage, -1) == meta.storage, f"{target}{ours}: aliasing"


@given(st.data())
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_rules_of_one_operand(data: st.DataObject) -> None:
    """Views, copies and unary functions have the geometry and aliasing of eager, and never accept what eager refuses."""
    x = data.draw(tensors())
    target, rest = view_calls(data.draw, x)
    theirs = tuple(getattr(torch, a.name) if isinstance(a, DTypeArg) else list(a) if isinstance(a, tuple) else a for a in rest)
    agrees(target, (x, *rest), (x, *theirs), [x])


@given(st.data(), st.sampled_from(["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "eq.Tensor", "add_.Tensor", "mul_.Tensor", "copy_.default"]))
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_rules_of_two_operands(data: st.DataObject, target: str) -> None:
    """Pointwise operators broadcast, promote and lay out their results as eager does, in place too."""
    shape = data.draw(st.sampled_from(SHAPES))
    other = data.draw(st.sampled_from([shape, (), (1,), (1, *shape)]))
    x, y = data.draw(tensors(shape)), data.draw(tensors(other))
    agrees(target, (x, y), (x, y), [x, y])


@pytest.mark.parametrize("target", ["add.Tensor", "mul.Tensor"])
def test_equal_numbers_of_other_types_are_told_apart(target: str) -> None:
    """1, 1.0 and True are equal as keys, yet promote a tensor of bools to three dtypes, whichever was asked for first."""
    x = torch.ones(2, dtype=torch.bool)
    for number in (True, 1, 1.0, 1, True):
        agrees(target, (x, number), (x, number), [x])


@given(st.data(), st.sampled_from([1, 0.5, True]), st.sampled_from(["add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor"]))
@QUICK
def test_rules_with_a_number(data: st.DataObject, number: float, target: str) -> None:
    """A Python number changes the dtype only where its category is higher."""
    x = data.draw(tensors())
    agrees(target, (x, number), (x, number), [x])


@given(st.data())
@QUICK
def test_rule_of_cat(data: st.DataObject) -> None:
    """Concatenation promotes dtypes, adds sizes and gives what eager gives."""
    shape = data.draw(st.sampled_from([(3,), (2, 3), (0,)]))
    xs = [data.draw(tensors(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    try:
        expected = tensor_meta(torch.cat(xs))
    except RuntimeError:
        return
    result = infer("aten.cat.default", (tuple(tensor_meta(x) for x in xs),), {}, {})
    assert isinstance(result, TensorMeta) and (result.shape, result.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (2,)), ((2, 3, 1), (2, 3)), ((), (1,))])
def test_cat_refuses_what_torch_refuses(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Parts that differ in rank or in another size are refused, by the rule and by torch."""
    xs = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        torch.cat(xs)
    with pytest.raises(OpError):
        infer("aten.cat.default", (tuple(tensor_meta(x) for x in xs),), {}, {})


def test_promotion_is_torchs() -> None:
    """The whole promotion table is that of ``torch.promote_types``; float8 is promoted with nothing else."""
    for a, b in itertools.product(DTYPES, DTYPES):
        if a != b and (a.startswith("float8") or b.startswith("float8")):
            with pytest.raises(KeyError):
                promote(a, b)
        else:
            assert getattr(torch, promote(a, b)) == torch.promote_types(getattr(torch, a), getattr(torch, b))


@pytest.mark.parametrize("narrow", [d for d, t in DTYPES.items() if t.itemsize <= 2])
@pytest.mark.parametrize("wide", sorted(DTYPES))
def test_represents_is_true_of_every_value(narrow: str, wide: str) -> None:
    """``represents`` holds exactly where the round trip of every value of a one- or two-byte dtype is the identity."""
    n, w = getattr(torch, narrow), getattr(torch, wide)
    if narrow == "bool":
        values = torch.tensor([False, True])
    elif DTYPES[narrow].itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(n)
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(n)
    if n.is_floating_point:
        wide_values = values.double()
        values = values[torch.isfinite(wide_values)] if wide.startswith("float8_e4m3") or not w.is_floating_point else values[~wide_values.isnan()]
    back = values.to(w).double()
    exact = bool(torch.equal(back, values.double()))
    if represents(wide, narrow):
        assert exact
    elif w.is_floating_point and wide != "bool" and not n.is_floating_point:
        assert not exact


@pytest.mark.parametrize("target", sorted(t for t, s in TABLE.items() if s.collective is not None and s.collective.out is None))
def test_collectives_have_torchs_fake_geometry(target: str) -> None:
    """A collective's result has the shape, strides and dtype that torch's own fake kernel gives for a contiguous input."""
    spec = TABLE[target].collective
    assert spec is not None
    with fake_mode():
        x = torch.ones(4, 3)
    rest: list[Any] = [None] * (max(spec.group, spec.group_size or 0, spec.reduce_op or 0) + 1)
    rest[spec.group] = "g"
    if spec.group_size is not None:
        rest[spec.group_size] = 2
    if spec.reduce_op is not None:
        rest[spec.reduce_op] = "sum"
    if spec.kind == "all_to_all":
        rest[1], rest[2] = [1, 3], [2, 2]
    if spec.kind == "broadcast":
        rest[1] = 0
    theirs = [[x] if spec.coalesced else x, *rest[1:]]
    meta = tensor_meta(x)
    ours = tuple(((meta,) if spec.coalesced else meta) if i == 0 else GroupArg("g") if i == spec.group else tuple(a) if isinstance(a, list) else a for i, a in enumerate(theirs))
    expected = resolve(target)(*theirs)
    result = infer(target, ours, {}, {"g": 2})
    expected_metas = [tensor_meta(v)[:3] for v in (expected if isinstance(expected, (list, tuple)) else [expected])]
    assert [m[:3] for m in ((result,) if isinstance(result, TensorMeta) else result)] == expected_metas
