"""Programs with a backward that saves tensors, under one or two pairs of saved tensor hooks.

A program is drawn as a tape, as ``mutations`` does: a header with the hooks, inputs, then statements of a few bytes each; what is not possible
is left out. Values are small integers, on which the arithmetic of most operators is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from hypothesis import strategies as st

from harness.ops import OpError, infer
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import Arg, Autograd, Op, Program, Ref, TensorSpec, contiguous_stride
from harness.spec.saved_hooks import SAVED_HOOKS

__all__ = ["saved_tensor_programs"]

_WIDTH: Final = 5
_HEADER: Final = 5
_MAX_INPUTS: Final = 3
_MAX_STATEMENTS: Final = 4
_SHAPES: Final = ((3, 3), (2, 4), (4,), (1, 8), (), (0, 2), (2, 2, 3))
_SCALARS: Final = (2, -1, 3)
_SELDOM: Final = frozenset({"buffer", "twice"})
_NAMES: Final = [name for name in SAVED_HOOKS for _ in range(1 if name in _SELDOM else 3)]
"""What torch 2.13.0 cannot inline is drawn seldom."""


def saved_tensor_programs(
    *, world_sizes: Sequence[int] = (1,), max_statements: int = _MAX_STATEMENTS, held: bool = True, names: Sequence[str] = tuple(_NAMES)
) -> st.SearchStrategy[Program]:
    """Programs of one rank with ``autograd.saved_hooks``, valid by construction, the first input of which requires grad.

    Shrinks towards one input, one statement and one pair.

    Args:
        world_sizes: not used: these programs run on one rank.
        max_statements: statements at most; one may be a few ops.
        held: whether inputs may be parameters and buffers of a module.
        names: of the pairs to draw from; one that stands twice is drawn twice as often.
    """
    return _programs(max_statements, held, tuple(names))


@lru_cache(maxsize=64)
def _programs(max_statements: int, held: bool, names: tuple[str, ...]) -> st.SearchStrategy[Program]:
    header = st.binary(min_size=_HEADER, max_size=_HEADER)
    inputs = st.lists(st.binary(min_size=2, max_size=2), min_size=1, max_size=_MAX_INPUTS)
    statements = st.lists(st.binary(min_size=_WIDTH, max_size=_WIDTH), min_size=1, max_size=max_statements)

    def read(drawn: tuple[bytes, list[bytes], list[bytes]]) -> Program:
        key, specs, tape = drawn
        draft = _Draft(_SHAPES[key[0] % len(_SHAPES)] if key[0] >= 96 else _SHAPES[0])
        for spec in specs:
            draft.add_input(spec, held)
        for s in tape:
            _KINDS[s[0] % len(_KINDS)](draft, s)
        pairs = (names[key[1] % len(names)],)
        outer = (names[key[3] % len(names)],) if key[2] >= 216 else ()
        return draft.program(outer + pairs, 2 if key[4] >= 224 else 1)

    return st.tuples(header, inputs, statements).map(read)


class _Draft:
    """A program in the making: values by number, with their metadata."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.inputs: list[TensorSpec] = []
        self.metas: list[TensorMeta] = []
        self.ops: list[Op] = []
        self.used: set[Ref] = set()
        self.with_grad: set[Ref] = set()

    def add_input(self, s: bytes, held: bool) -> None:
        """An input: a leaf that requires grad, and after the first one plain, or held by a module."""
        kind = s[0] % 8 if self.inputs else 0
        dtype = "float64" if s[1] >= 240 else "float32"
        role: Any = "parameter" if held and kind == 6 else "buffer" if held and kind == 7 else "argument"
        spec = TensorSpec(self.shape, dtype, requires_grad=kind < 4 or role == "parameter", role=role)
        self.metas.append(TensorMeta(spec.shape, contiguous_stride(spec.shape), spec.dtype, 0, len(self.metas)))
        if spec.requires_grad:
            self.with_grad.add(Ref(len(self.inputs)))
        self.inputs.append(spec)

    def add(self, target: str, *args: Any, **kwargs: Arg) -> Ref | None:
        """Add an op where its preconditions hold; its result."""
        if any(a is None for a in args):
            return None
        try:
            result = infer(target, tuple(self.metas[a.value] if isinstance(a, Ref) else a for a in args), kwargs, {})
        except OpError:
            return None
        if not isinstance(result, TensorMeta):
            return None
        ref = Ref(len(self.metas))
        self.metas.append(result if result.storage >= 0 else result._replace(storage=ref.value))
        self.ops.append(Op(target, args, kwargs))
        self.used.update(a for a in args if isinstance(a, Ref))
        if self.is_float(ref) and any(a in self.with_grad for a in args if isinstance(a, Ref)):
            self.with_grad.add(ref)
        return ref

    def is_float(self, ref: Ref) -> bool:
        """Whether a value is of a floating point dtype."""
        return DTYPES[self.metas[ref.value].dtype].kind == "float"

    def pick(self, byte: int, fits: Callable[[TensorMeta], bool] = lambda m: True) -> Ref | None:
        """A floating point value whose metadata fits, the latest for a byte of 0."""
        found = [Ref(i) for i in reversed(range(len(self.metas))) if self.is_float(Ref(i)) and fits(self.metas[i])]
        return found[byte % len(found)] if found else None

    def like(self, ref: Ref, byte: int) -> Ref | None:
        """A value of the shape and dtype of another."""
        meta = self.metas[ref.value]
        return self.pick(byte, lambda m: m.shape == meta.shape and m.dtype == meta.dtype)

    def program(self, hooks: tuple[str, ...], num_backward: int) -> Program:
        """The program: unused results are returned, and where none of them has a gradient, a square."""
        num = len(self.inputs)
        outputs = [Ref(i) for i in range(num, len(self.metas)) if Ref(i) not in self.used and self.is_float(Ref(i))]
        if not self.with_grad.intersection(outputs):
            square = self.add("aten.mul.Tensor", Ref(0), Ref(0))
            assert square is not None
            outputs.append(square)
        return Program(1, (), tuple(self.inputs), tuple(self.ops), tuple(outputs), autograd=Autograd((), num_backward, saved_hooks=hooks))


_UNARY: Final = ("relu", "square", "abs", "sin", "exp", "neg", "sigmoid", "tanh")


def _product(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1])
    if x is not None:
        d.add("aten.mul.Tensor", x, d.like(x, s[2]))


def _unary(d: _Draft, s: bytes) -> None:
    d.add(f"aten.{_UNARY[s[2] % len(_UNARY)]}.default", d.pick(s[1]))


def _matmul(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], lambda m: len(m.shape) == 2)
    if x is None:
        return
    meta = d.metas[x.value]
    y = d.pick(s[2], lambda m: len(m.shape) == 2 and m.shape[0] == meta.shape[1] and m.dtype == meta.dtype)
    d.add("aten.mm.default", x, y if y is not None else d.add("aten.t.default", d.like(x, s[2])))


def _sum(d: _Draft, s: bytes) -> None:
    d.add("aten.sum.default", d.pick(s[1], lambda m: bool(m.shape)))


def _add(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1])
    if x is not None:
        d.add("aten.add.Tensor", x, d.like(x, s[2]) if s[3] < 128 else _SCALARS[s[4] % len(_SCALARS)])


def _view(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], lambda m: bool(m.shape))
    if x is None:
        return
    meta = d.metas[x.value]
    if s[2] % 3 == 0 and len(meta.shape) > 1:
        d.add("aten.transpose.int", x, 0, 1)
    elif s[2] % 3 == 1:
        d.add("aten.slice.Tensor", x, 0, min(1, meta.shape[0]), meta.shape[0])
    else:
        d.add("aten.view.default", x, (meta.numel,))


def _masked(d: _Draft, s: bytes) -> None:
    """A choice by a mask, which is saved."""
    x = d.pick(s[1])
    if x is not None:
        d.add("aten.where.self", d.add("aten.gt.Scalar", x, s[4] % 2), x, d.like(x, s[2]))


_KINDS: Final[tuple[Callable[[_Draft, bytes], None], ...]] = (_product, _unary, _matmul, _unary, _masked, _view, _sum, _add)
