"""Programs with a backward that write in place: inputs, views of them, intermediates, in forward and within functions' backward.

A program is drawn as a tape, as ``collectives`` does: a header with the inputs, then statements of a few bytes each. A draft reads the
tape and adds what is possible with the values that exist then; what is not possible is left out, so that deleting a statement or
lowering a byte gives a simpler program. Values are small integers, on which eager arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from hypothesis import strategies as st

from harness.errors import InvalidProgram
from harness.ops import APPLY, OpError, infer, infer_program
from harness.ops.autograd import rebound
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import Arg, Autograd, DTypeArg, Function, Hook, Op, Program, Ref, TensorSpec, contiguous_stride, storage_numel
from harness.strategies.builder import is_injective

__all__ = ["mutation_programs"]

_WIDTH: Final = 7
_INPUT_WIDTH: Final = 5
_MAX_INPUTS: Final = 4
_MAX_STATEMENTS: Final = 10
_HEADER: Final = 8
_SHAPES: Final = ((4,), (2, 3), (3, 2), (), (2, 2), (1, 3), (0,), (2, 1, 2))
_SCALARS: Final = (2, -1, 3, 1)

Mode = Literal["no_grad", "inference_mode"] | None


def mutation_programs(
    *, world_sizes: Sequence[int] = (1,), max_statements: int = _MAX_STATEMENTS, held: bool = True, functions: bool = True, storage: bool = True
) -> st.SearchStrategy[Program]:
    """Programs of one rank with ``autograd``, valid by construction; eager may refuse some of them, at any stage.

    Shrinks towards one input and one statement.

    Args:
        world_sizes: not used: these programs run on one rank.
        max_statements: statements at most; one may be a few ops.
        held: whether inputs may be parameters and buffers of a module.
        functions: whether there are ``torch.autograd.Function``s.
        storage: whether there are ``set_`` and resizes of storages.
    """
    return _programs(max_statements, held, functions, storage)


@lru_cache(maxsize=64)
def _programs(max_statements: int, held: bool, functions: bool, storage: bool) -> st.SearchStrategy[Program]:
    header = st.binary(min_size=_HEADER, max_size=_HEADER)
    inputs = st.lists(st.binary(min_size=_INPUT_WIDTH, max_size=_INPUT_WIDTH), min_size=1, max_size=_MAX_INPUTS)
    statements = st.lists(st.binary(min_size=_WIDTH, max_size=_WIDTH), min_size=1, max_size=max_statements)

    def read(drawn: tuple[bytes, list[bytes], list[bytes]]) -> Program:
        key, specs, tape = drawn
        draft = _Draft(_SHAPES[key[0] % len(_SHAPES)] if key[0] >= 64 else _SHAPES[0], held)
        for spec in specs:
            draft.add_input(spec, 3 if key[6] >= 48 else 0)
        kinds = [k for k, wanted in _KINDS if (functions or k is not _apply) and (storage or k not in (_set, _resize)) for _ in range(wanted)]
        for s in tape:
            kinds[s[0] % len(kinds)](draft, s)
        return draft.program(key)

    return st.tuples(header, inputs, statements).map(read)


class _Draft:
    """A program in the making: values by number, with their metadata."""

    def __init__(self, shape: tuple[int, ...], held: bool) -> None:
        self.shape = shape
        self.held = held
        self.inputs: list[TensorSpec] = []
        self.metas: list[TensorMeta | tuple[TensorMeta, ...]] = []
        self.ops: list[Op] = []
        self.functions: list[Function] = []
        self.values: list[Ref] = []
        self.guarded: set[int] = set()
        self.left: list[TensorMeta] = []
        self.rebound: set[Ref] = set()
        self.used: set[Ref] = set()
        self._num_storages = 0

    def add_input(self, s: bytes, shift: int) -> None:
        """An input: plain, a leaf that requires grad or not, a view of an earlier one, an earlier one again, or held by a module."""
        number = len(self.inputs)
        dtype = "float64" if s[3] >= 240 and self.shape else "float32"  # compiling for a 0-d float64 input can end torch 2.13's process
        bases = [i for i, spec in enumerate(self.inputs) if spec.view_of is None and spec.same_as is None and spec.dtype.startswith("float")]
        kind = (s[0] + shift) % 16
        if kind in (12, 13) and bases:
            base = bases[s[1] % len(bases)]
            spec = _view_of(self.inputs[base], base, s[2], s[4])
        elif kind == 14 and bases:
            base = bases[s[1] % len(bases)]
            spec = _again(self.inputs[base], base)
        elif kind in (10, 11) and self.held:
            is_parameter = kind == 11
            spec = TensorSpec(self.shape, dtype, requires_grad=is_parameter, role="parameter" if is_parameter else "buffer")
        elif kind == 15:
            spec = TensorSpec(self.shape, "int64")
        elif kind in (8, 9):
            spec = _strided(self.shape, dtype, s[2])
        else:
            spec = TensorSpec(self.shape, dtype, requires_grad=kind % 2 == 1 or kind in (2, 6), is_leaf=kind not in (2, 3, 6, 7))
        if spec.same_as is None and spec.view_of is None:
            storage, self._num_storages = self._num_storages, self._num_storages + 1
        else:
            base_meta = self.metas[spec.view_of if spec.same_as is None else spec.same_as]  # type: ignore[index]
            assert isinstance(base_meta, TensorMeta)
            storage = base_meta.storage
        if spec.requires_grad and spec.is_leaf:
            self.guarded.add(storage)
        self.inputs.append(spec)
        stride = contiguous_stride(spec.shape) if spec.stride is None else spec.stride
        self.metas.append(TensorMeta(spec.shape, stride, spec.dtype, spec.storage_offset, storage))
        self.values.append(Ref(number))

    def meta(self, ref: Ref) -> TensorMeta:
        """The metadata of a tensor."""
        found = self.metas[ref.value]
        return found if isinstance(found, TensorMeta) else found[ref.item or 0]

    def add(self, target: str, *args: Any, mode: Mode = None, is_value: bool = True, **kwargs: Arg) -> Ref | None:
        """Add an op where its preconditions hold; its result, which is a value for later ops unless told otherwise."""
        try:
            result = infer(target, tuple(_filled(a, self.meta) for a in args), kwargs, {})
        except OpError:
            return None
        if not isinstance(result, TensorMeta):
            return None
        if result.storage < 0:
            result = result._replace(storage=self._num_storages)
            self._num_storages += 1
        changed = rebound(target, args, result)
        if changed is not None:
            self.metas[args[0].value] = changed
        ref = Ref(len(self.metas))
        self.metas.append(result)
        self.ops.append(Op(target, args, kwargs, mode=mode))
        self.used.update(a for a in args if isinstance(a, Ref))
        if is_value:
            self.values.append(ref)
        return ref

    def pick(self, byte: int, fits: Callable[[TensorMeta], bool] = lambda m: True) -> Ref | None:
        """A value whose metadata fits, the latest for a byte of 0."""
        found = [ref for ref in reversed(self.values) if fits(self.meta(ref))]
        return found[byte % len(found)] if found else None

    def mode(self, byte: int, target: Ref | None = None) -> Mode:
        """The context to run in; a leaf that requires grad is mostly written without it."""
        if byte >= 248:
            return "inference_mode"
        if target is not None and self.meta(target).storage in self.guarded:
            return None if byte >= 240 else "no_grad"
        return "no_grad" if byte >= 200 else None

    def program(self, key: bytes) -> Program:
        """The program: unused results are returned, and then what the header asks for."""
        num = len(self.inputs)
        outputs = [ref for ref in self.values if ref.value >= num and ref not in self.used]
        if key[1] >= 160 and self.values:
            outputs.append(self.values[key[1] % len(self.values)])
        if key[1] % 8 == 7:
            outputs += outputs[:1]
        outputs = outputs or self.values[-1:]
        leaves = [i for i, ref in enumerate(outputs) if ref.value >= num and ref not in self.used]
        of: list[tuple[Literal["input", "output"], int]] = [("input", i) for i in range(num)] if key[2] % 2 else [("output", i) for i in leaves]
        hooks = (Hook(*of[key[3] % len(of)]),) if key[2] >= 232 and of else ()
        num_backward = 1 if key[4] < 176 else 2 if key[4] < 224 else 0
        autograd = Autograd(tuple(self.functions), num_backward, num_backward == 1 and key[5] >= 250, hooks)
        return Program(1, (), tuple(self.inputs), tuple(self.ops), tuple(outputs), autograd=autograd)


def _filled(arg: Any, meta: Callable[[Ref], TensorMeta]) -> Any:
    if isinstance(arg, Ref):
        return meta(arg)
    return tuple(_filled(a, meta) for a in arg) if isinstance(arg, tuple) else arg


def _view_of(base: TensorSpec, number: int, kind: int, grad: int) -> TensorSpec:
    """A view of an input: all of it, its beginning, its end, or turned round; with or without its gradient, or with one of its own."""
    stride = contiguous_stride(base.shape) if base.stride is None else base.stride
    shape, offset = base.shape, base.storage_offset
    if shape and shape[0] > 1 and kind % 4 in (1, 2):
        shape = (shape[0] - 1, *shape[1:])
        offset += stride[0] if kind % 4 == 2 else 0
    elif len(shape) > 1 and kind % 4 == 3:
        shape, stride = tuple(reversed(shape)), tuple(reversed(stride))
    requires_grad = base.requires_grad if grad < 224 else not base.requires_grad
    return TensorSpec(shape, base.dtype, stride, offset, requires_grad, number)


def _again(spec: TensorSpec, number: int) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype, spec.stride, spec.storage_offset, spec.requires_grad, spec.view_of, spec.high, spec.data, spec.is_leaf, number, spec.role)


def _strided(shape: tuple[int, ...], dtype: str, byte: int) -> TensorSpec:
    """A non-leaf that is not contiguous: transposed, or every other element."""
    if len(shape) > 1 and byte % 2:
        stride = tuple(reversed(contiguous_stride(tuple(reversed(shape)))))
    else:
        stride = tuple(2 * step for step in contiguous_stride(shape))
    return TensorSpec(shape, dtype, stride, byte % 3, requires_grad=byte >= 128, is_leaf=byte < 128)


def _is_float(meta: TensorMeta) -> bool:
    return DTYPES[meta.dtype].kind == "float"


def _fits_into(target: TensorMeta) -> Callable[[TensorMeta], bool]:
    """Whether a value can be an operand of an op in place on ``target``."""
    return lambda m: len(m.shape) <= len(target.shape) and all(x in (1, y) for x, y in zip(reversed(m.shape), reversed(target.shape), strict=False)) and m.dtype != "bool"


_UNARY: Final = ("neg", "relu", "square", "abs", "sin", "exp")


def _compute(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], _is_float if s[2] < 240 else lambda m: m.dtype != "bool")
    if x is None:
        return
    mode = d.mode(s[6])
    if s[2] % 4 == 0:
        d.add("aten.mul.Tensor", x, _SCALARS[s[4] % 4], mode=mode)
    elif s[2] % 4 == 3:
        d.add(f"aten.{_UNARY[s[4] % len(_UNARY)]}.default", x, mode=mode)
    else:
        y = d.pick(s[3], _fits_into(d.meta(x)))
        d.add("aten.mul.Tensor" if s[2] % 4 == 1 else "aten.add.Tensor", x, y, mode=mode)


_WRITES: Final = ("add_.Tensor", "mul_.Tensor", "copy_.default", "zero_.default", "fill_.Scalar", "sub_.Tensor", "neg_.default", "relu_.default", "index_put_.default", "masked_fill_.Scalar", "exp_.default", "div_.Scalar")


def _write(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], lambda m: is_injective(m) and m.dtype != "bool")
    if x is None:
        return
    name, mode, meta = _WRITES[s[2] % len(_WRITES)], d.mode(s[6], x), d.meta(x)
    is_value = s[5] >= 208
    target = f"aten.{name}"
    if name in ("add_.Tensor", "mul_.Tensor", "sub_.Tensor", "copy_.default"):
        y = d.pick(s[3], _fits_into(meta)) if s[4] >= 96 or name == "copy_.default" else _SCALARS[s[4] % 4]
        if y is not None:
            d.add(target, x, y, mode=mode, is_value=is_value)
    elif name in ("fill_.Scalar", "div_.Scalar"):
        d.add(target, x, _SCALARS[s[4] % 4], mode=mode, is_value=is_value)
    elif name == "masked_fill_.Scalar":
        mask = d.add("aten.gt.Scalar", x, 0, mode=mode, is_value=False)
        d.add(target, x, mask, _SCALARS[s[4] % 4], mode=mode, is_value=is_value)
    elif name == "index_put_.default":
        _index_put(d, target, x, mode, is_value)
    else:
        d.add(target, x, mode=mode, is_value=is_value)


def _index_put(d: _Draft, target: str, x: Ref, mode: Mode, is_value: bool) -> None:
    meta = d.meta(x)
    if not meta.shape or not meta.shape[0]:
        return
    rows = d.add("aten.slice.Tensor", x, 0, meta.shape[0] - 1, meta.shape[0], mode=mode, is_value=False)
    row = None if rows is None else d.add("aten.clone.default", rows, mode=mode, is_value=False)
    first = d.add("aten.zeros.default", (1,), mode=mode, is_value=False, dtype=DTypeArg("int64"))
    if row is not None and first is not None:
        d.add(target, x, (first,), row, mode=mode, is_value=is_value)


_VIEWS: Final = ("slice", "detach", "transpose", "view", "select", "data", "unsqueeze", "alias", "expand", "diagonal", "as_strided", "end")


def _view(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], lambda m: m.dtype != "bool")
    if x is None:
        return
    name, mode, meta = _VIEWS[s[2] % len(_VIEWS)], d.mode(s[6]), d.meta(x)
    if name in ("detach", "alias"):
        d.add(f"aten.{name}.default", x, mode=mode)
    elif name == "data":
        d.add("autograd.data", x, mode=mode)
    elif name in ("slice", "end") and meta.shape:
        dim = s[3] % len(meta.shape)
        d.add("aten.slice.Tensor", x, dim, *((0, max(meta.shape[dim] - 1, 0)) if name == "slice" else (min(1, meta.shape[dim]), meta.shape[dim])), mode=mode)
    elif name == "transpose" and len(meta.shape) > 1:
        d.add("aten.transpose.int", x, 0, 1, mode=mode)
    elif name == "view":
        d.add("aten.view.default", x, (meta.numel,), mode=mode)
    elif name == "select" and meta.shape and meta.shape[0]:
        d.add("aten.select.int", x, 0, s[4] % meta.shape[0], mode=mode)
    elif name == "unsqueeze":
        d.add("aten.unsqueeze.default", x, 0, mode=mode)
    elif name == "expand":
        d.add("aten.expand.default", x, (2, *meta.shape), mode=mode)
    elif name == "diagonal" and len(meta.shape) > 1:
        d.add("aten.diagonal.default", x, mode=mode)
    elif name == "as_strided" and meta.numel > 1:
        d.add("aten.as_strided.default", x, (2,), (1,), mode=mode)


def _make(d: _Draft, s: bytes) -> None:
    """A tensor with memory of its own."""
    x = d.pick(s[1], _is_float)
    if x is not None:
        name = ("clone", "zeros_like", "ones_like")[s[2] % 3]
        made = d.add(f"aten.{name}.default", x if s[3] < 128 else d.add("aten.detach.default", x, is_value=False) or x, mode=d.mode(s[6]))
        d.used.update([made] if made is not None and s[4] >= 128 else [])


def _scatter(d: _Draft, s: bytes) -> None:
    x = d.pick(s[1], lambda m: bool(m.shape) and m.shape[0] > 0 and m.dtype != "bool")
    if x is None:
        return
    mode = d.mode(s[6])
    src = d.add("aten.mul.Tensor", x, _SCALARS[s[4] % 4], mode=mode, is_value=False)
    kind = s[2] % 3
    if kind == 0:
        part = None if src is None else d.add("aten.slice.Tensor", src, 0, 0, 1, mode=mode, is_value=False)
        d.add("aten.slice_scatter.default", x, part, 0, 0, 1, mode=mode)
    elif kind == 1:
        part = None if src is None else d.add("aten.select.int", src, 0, 0, mode=mode, is_value=False)
        d.add("aten.select_scatter.default", x, part, 0, 0, mode=mode)
    elif len(d.meta(x).shape) > 1:
        part = None if src is None else d.add("aten.diagonal.default", src, mode=mode, is_value=False)
        d.add("aten.diagonal_scatter.default", x, part, mode=mode)


def _set(d: _Draft, s: bytes) -> None:
    """``x.set_(y)`` without grad, as FSDP gives a parameter the memory of an all_gather's result."""
    x = d.pick(s[1], lambda m: _is_float(m))
    if x is None or x.item is not None:
        return
    meta = d.meta(x)
    kept = {m.storage for m, spec in zip(d.metas, d.inputs, strict=False) if isinstance(m, TensorMeta) and spec.role != "argument"}

    def fits(m: TensorMeta) -> bool:
        """Memory of the same geometry where a module holds ``x``: the next call finds it so."""
        return m.shape == meta.shape and m.dtype == meta.dtype and m.storage != meta.storage and (meta.storage not in kept or (m.stride, m.offset) == (meta.stride, 0))

    y = d.pick(s[3], fits)
    if y is None:
        return
    d.add("autograd.set_", x, y, mode="no_grad", is_value=False)
    d.left.append(meta)
    d.rebound.add(x)
    d.values = [ref for ref in d.values if ref == x or d.meta(ref) != meta]  # they may be the very tensor that now has other memory


def _resize(d: _Draft, s: bytes) -> None:
    """Give an input's memory back and take it again, as FSDP does; all values are written anew, for a resize leaves them undefined."""
    tensors = [*d.left, *(m for found in d.metas for m in ((found,) if isinstance(found, TensorMeta) else found))]

    def num_elements(meta: TensorMeta) -> int:
        return max(storage_numel(m.shape, m.stride, m.offset) for m in tensors if m.storage == meta.storage)

    x = d.pick(s[1], lambda m: _is_float(m) and m.numel > 0 and is_injective(m) and m.numel == num_elements(m))
    if x is None or x.value >= len(d.inputs) or x in d.rebound:
        return
    num_bytes = d.meta(x).numel * DTYPES[d.meta(x).dtype].itemsize
    kept = d.add("aten.clone.default", x, mode="no_grad", is_value=False)
    d.add("autograd.resize_storage_", x, 0, mode="no_grad", is_value=False)
    d.add("autograd.resize_storage_", x, num_bytes, mode="no_grad", is_value=False)
    d.add("aten.copy_.default", x, kept, mode="no_grad", is_value=False)


def _apply(d: _Draft, s: bytes) -> None:
    """Define a function and call it: on one tensor, or on two of the same shape."""
    x = d.pick(s[1], _is_float)
    if x is None:
        return
    meta = d.meta(x)
    y = d.pick(s[3], lambda m: m.shape == meta.shape and m.dtype == meta.dtype and is_injective(m)) if s[2] % 4 else None
    function = _function(s, 1 if y is None else 2)
    operands = (x,) if y is None else (x, y)
    within = _inferred(function, [d.meta(v) for v in operands])
    if within is None:
        return
    storages = []
    for meta in within:
        if meta.storage < 0:
            meta = meta._replace(storage=d._num_storages)
            d._num_storages += 1
        storages.append(meta)
    ref = Ref(len(d.metas))
    d.metas.append(tuple(storages))
    d.ops.append(Op(APPLY, (len(d.functions), *operands), mode="no_grad" if s[6] >= 250 else None))
    d.functions.append(function)
    d.used.update(operands)
    d.values += [Ref(ref.value, i) for i in range(len(storages))]


def _inferred(function: Function, operands: list[TensorMeta]) -> list[TensorMeta] | None:
    """The outputs' metadata, or None where a statement of the function is not possible."""
    specs = tuple(TensorSpec(m.shape, m.dtype, m.stride, m.offset) for m in operands)
    call = Program(1, (), specs, (Op(APPLY, (0, *(Ref(i) for i in range(len(specs))))),), (), autograd=Autograd((function,)))
    try:
        result = infer_program(call)[-1]
    except InvalidProgram:
        return None
    assert not isinstance(result, TensorMeta)
    return [m._replace(storage=operands[m.storage].storage if m.storage < len(operands) else -1) for m in result]


def _function(s: bytes, num_inputs: int) -> Function:
    """A function that triples its first input; what else it does is read from the bytes."""
    other = num_inputs - 1
    forward: list[Op] = []

    def statement(*args: Any) -> Ref:
        forward.append(Op(args[0], args[1:]))
        return Ref(num_inputs + len(forward) - 1)

    writes, form = s[4], s[5]
    dirty: tuple[int, ...] = ()
    if writes % 4 == 1:
        statement("aten.add_.Tensor", Ref(other), 1)
        dirty = (other,) if writes >= 128 else ()
    y = statement("aten.mul.Tensor", Ref(0), 3)
    outputs = [y]
    non_differentiable: tuple[int, ...] = ()
    if dirty:
        outputs.append(Ref(other))
    elif form % 4 == 2:
        outputs.append(statement("aten.add.Tensor", Ref(0), 1))
        non_differentiable = (1,) if form >= 128 else ()
    elif form % 4 == 3:
        outputs.append(Ref(other))
    saved = (Ref(other),) if form % 8 < 4 else (y,) if form % 8 < 6 else ()
    kept = (Ref(other),) if writes % 8 >= 6 else ()
    first = len(outputs) + len(saved) + len(kept)
    backward: list[Op] = []
    backward.append(Op("aten.mul.Tensor", (Ref(0), 3)))
    grad = Ref(first)
    how = s[6] % 8
    written = Ref(len(outputs)) if saved or kept else Ref(0)
    if kept and s[6] % 2:
        written = Ref(len(outputs) + len(saved))
    if how in (1, 2, 3):
        backward.append(Op("aten.add_.Tensor", (written, Ref(0))))
    elif how == 4:
        backward.append(Op("aten.mul_.Tensor", (written, 2)))
    elif how == 5:
        backward.append(Op("aten.copy_.default", (written, Ref(0))))
    elif how == 6:
        backward.append(Op("aten.add_.Tensor", (Ref(0), 1)))
    elif saved:
        backward.append(Op("aten.mul.Tensor", (grad, Ref(len(outputs)))))
        grad = Ref(first + 1)
    grads = (grad,) if num_inputs == 1 else (grad, None if s[2] % 8 < 4 else Ref(0))
    return Function(num_inputs, tuple(forward), tuple(outputs), saved, kept, dirty, non_differentiable, tuple(backward), grads)


_KINDS: Final[tuple[tuple[Callable[[_Draft, bytes], None], int], ...]] = (
    (_write, 6),
    (_compute, 5),
    (_view, 4),
    (_apply, 5),
    (_make, 2),
    (_scatter, 1),
    (_set, 1),
    (_resize, 1),
)
