"""Programs of collectives, in all the shapes that stress bucketing.

A program is drawn as a tape: a list of statements, each a short tuple of numbers. A builder reads the tape and adds what is
possible with the values that exist then, so that every tape gives a valid program, and deleting a statement or lowering a number
gives a smaller one. What is in flight is known to the builder: it never reads or writes such memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from hypothesis import strategies as st

from harness.ops import OpError, infer
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import Arg, DTypeArg, Group, GroupArg, Op, Program, Ref, TensorSpec, contiguous_stride
from harness.strategies.groups import group_lists

__all__ = ["ALL_DTYPES", "KINDS", "REDUCE_OPS", "collective_programs", "divergent_programs"]

KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")
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

_C10D: Final = "_c10d_functional."
_WAIT: Final = _C10D + "wait_tensor.default"
_SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (2, 3),
    (3, 2),
    (1, 4),
    (7,),
    (2, 2, 2),
    (0,),
    (2, 0),
    (),
    (16,),
    (4, 4),
    (33,),
)
_ACTIONS: Final = (
    *["comm"] * 14,
    *["start"] * 4,
    *["wait"] * 3,
    *["compute"] * 2,
    *["view"] * 2,
    *["write"] * 2,
    "cast",
    "clone",
    "join",
    "again",
    "return_start",
    "return_value",
    *["key"] * 3,
)
_MAX_NUMEL: Final = 1024


class _Statement(NamedTuple):
    """One statement of a tape; ``operand`` 0 asks for a new input, others pick among the values that will do."""

    action: str
    operand: int
    a: int
    b: int
    c: int


class _Pending(NamedTuple):
    start: Ref
    inputs: tuple[int, ...]
    output: int
    post: int


class _Builder:
    """Adds statements while keeping the program valid."""

    def __init__(self, world_size: int, groups: tuple[Group, ...], options: _Options) -> None:
        self.world_size = world_size
        self.groups = groups
        self.sizes = {g.name: g.size for g in groups}
        self.options = options
        self.inputs: list[TensorSpec] = []
        self.input_metas: list[TensorMeta] = []
        self.ops: list[tuple[str, tuple[Any, ...], dict[str, Arg]]] = []
        self.op_metas: list[TensorMeta | tuple[TensorMeta, ...]] = []
        self.values: list[tuple[Any, TensorMeta]] = []
        self.used: set[Any] = set()
        self.pending: list[_Pending] = []
        self.done: list[Ref] = []
        self.reading: dict[int, int] = {}
        self.written: set[int] = set()
        self.extra_outputs: list[Any] = []
        self.epilogue: list[_Statement] = []
        self.num_storages = 0
        self.num_collectives = 0
        self.kind = options.kinds[0]
        self.group = groups[0]
        self.reduce_op = options.reduce_ops[0]
        self.dtype = options.dtypes[0]

    # Inputs are numbered before ops; while building, inputs are Ref(-1 - i) and ops Ref(j), put right at the end.

    def new_input(self, shape: tuple[int, ...], dtype: str, layout: int) -> tuple[Ref, TensorMeta]:
        stride, offset, view_of = None, 0, None
        if layout == 5:
            offset = 1
        elif layout == 6 and len(shape) >= 2:
            order = contiguous_stride(tuple(reversed(shape)))
            stride = tuple(reversed(order))
        elif layout == 7:
            view_of = self._base_for(shape, dtype)
        storage = self.num_storages
        if view_of is None:
            self.num_storages += 1
        else:
            storage = self.input_metas[view_of].storage
        spec = TensorSpec(shape, dtype, stride=stride, storage_offset=offset, view_of=view_of)
        meta = TensorMeta(shape, stride or contiguous_stride(shape), dtype, offset, storage)
        self.inputs.append(spec)
        self.input_metas.append(meta)
        value = (Ref(-len(self.inputs)), meta)
        self.values.append(value)
        return value

    def _base_for(self, shape: tuple[int, ...], dtype: str) -> int | None:
        needed = TensorMeta(shape, contiguous_stride(shape), dtype).numel
        for i, spec in enumerate(self.inputs):
            busy = self.input_metas[i].storage in self.written
            if spec.view_of is None and spec.dtype == dtype and spec.stride is None and not busy:
                if self.input_metas[i].numel + spec.storage_offset >= needed:
                    return i
        return None

    def add(self, target: str, args: tuple[Any, ...], **kwargs: Arg) -> tuple[Ref, TensorMeta] | None:
        """Add an op and its result; None (and nothing added) where a precondition is broken."""
        metas = tuple(self._meta(a) for a in args)
        try:
            result = infer(target, metas, kwargs, self.sizes)
        except OpError:
            return None
        first = result if isinstance(result, TensorMeta) else result[0] if result else None
        self.ops.append((target, args, kwargs))
        if first is None:
            self.op_metas.append(())
            return None
        if isinstance(result, TensorMeta):
            meta = self._numbered(result)
            self.op_metas.append(meta)
            value = (Ref(len(self.ops) - 1), meta)
            self.values.append(value)
            return value
        items = tuple(self._numbered(m) for m in result)
        self.op_metas.append(items)
        for k, meta in enumerate(items):
            self.values.append((Ref(len(self.ops) - 1, k), meta))
        return self.values[-1]

    def _numbered(self, meta: TensorMeta) -> TensorMeta:
        if meta.storage < 0:
            meta = meta._replace(storage=self.num_storages)
            self.num_storages += 1
        return meta

    def _meta(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            if arg.value < 0:
                return self.input_metas[-1 - arg.value]
            meta = self.op_metas[arg.value]
            return meta if isinstance(meta, TensorMeta) else meta[arg.item or 0]
        if isinstance(arg, tuple):
            return tuple(self._meta(a) for a in arg)
        return arg

    def readable(self) -> list[tuple[Ref, TensorMeta]]:
        busy = {p.output for p in self.pending}
        return [v for v in self.values if v[1].storage not in busy]

    def writable(self) -> list[tuple[Ref, TensorMeta]]:
        return [v for v in self.readable() if not self.reading.get(v[1].storage)]

    def pick(self, among: list[tuple[Ref, TensorMeta]], operand: int) -> tuple[Ref, TensorMeta] | None:
        """The ``operand``-th newest of ``among``; None where there is none."""
        return among[-1 - (operand - 1) % len(among)] if among else None

    def use(self, value: tuple[Ref, TensorMeta]) -> Ref:
        self.used.add(value[0])
        return value[0]


class _Options(NamedTuple):
    mutation: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    reduce_ops: tuple[str, ...]
    max_collectives: int


def _collective_operand(b: _Builder, s: _Statement) -> tuple[Ref, TensorMeta] | None:
    """What a collective reads: a new input, cast where the tape says so, or a value that there is; contiguous."""
    size = b.group.size
    needs_dim = b.kind in ("all_gather", "reduce_scatter", "all_to_all")
    reduces = b.kind in ("all_reduce", "reduce_scatter")
    if s.operand:
        value = b.pick([v for v in b.readable() if v[1].numel <= _MAX_NUMEL and (v[1].shape or not needs_dim)], s.operand)
        if value is None:
            return None
    else:
        shape = _SHAPES[s.a]
        if needs_dim and not shape:
            shape = (1,)
        if b.kind in ("reduce_scatter", "all_to_all"):
            shape = (shape[0] * size, *shape[1:])
        dtypes = b.options.dtypes
        dtype = b.dtype if s.b < 5 else dtypes[(dtypes.index(b.dtype) + s.b - 4) % len(dtypes)]
        if reduces and not _is_reducible(dtype, b.reduce_op):
            dtype = "float32"
        value = b.new_input(shape, dtype, s.c)
        if s.b == 4 and dtype in ("float32", "float64"):
            value = b.add("prims.convert_element_type.default", (b.use(value), DTypeArg("bfloat16"))) or value
    if not value[1].is_contiguous:
        value = b.add("aten.clone.default", (b.use(value),), memory_format="contiguous_format") or value
    if reduces and not _is_reducible(value[1].dtype, b.reduce_op):
        return None
    return value


def _is_reducible(dtype: str, op: str) -> bool:
    return not dtype.startswith("float8") and dtype != "bool" and (op != "avg" or DTYPES[dtype].kind == "float")


def _start(b: _Builder, s: _Statement, *, post: int) -> _Pending | None:
    if b.num_collectives >= b.options.max_collectives:
        return None
    value = _collective_operand(b, s)
    if value is None:
        return None
    ref, group = b.use(value), GroupArg(b.group.name)
    if b.kind == "all_gather":
        call = (_C10D + "all_gather_into_tensor.default", (ref, b.group.size, group))
    elif b.kind == "reduce_scatter":
        call = (_C10D + "reduce_scatter_tensor.default", (ref, b.reduce_op, b.group.size, group))
    elif b.kind == "all_reduce":
        call = (_C10D + "all_reduce.default", (ref, b.reduce_op, group))
    elif b.kind == "all_to_all":
        call = (_C10D + "all_to_all_single.default", (ref, (), (), group))
    else:
        call = (_C10D + "broadcast.default", (ref, s.c % b.group.size, group))
    started = b.add(call[0], call[1])
    if started is None:
        return None
    b.values.pop()
    b.num_collectives += 1
    source, output = value[1].storage, started[1].storage
    b.reading[source] = b.reading.get(source, 0) + 1
    pending = _Pending(started[0], (source,), output, post)
    b.pending.append(pending)
    return pending


def _wait(b: _Builder, pending: _Pending) -> None:
    b.pending.remove(pending)
    for source in pending.inputs:
        b.reading[source] -= 1
    waited = b.add(_WAIT, (pending.start,))
    assert waited is not None
    b.done.append(pending.start)
    if pending.post == 6 and waited[1].dtype in ("bfloat16", "float16"):
        b.add("prims.convert_element_type.default", (b.use(waited), DTypeArg("float32")))
    elif pending.post == 7:
        b.add("aten.add.Tensor", (b.use(waited), 1))


def _comm(b: _Builder, s: _Statement) -> None:
    pending = _start(b, s, post=s.c)
    if pending is not None:
        _wait(b, pending)


def _begin(b: _Builder, s: _Statement) -> None:
    _start(b, s, post=s.c)


def _await(b: _Builder, s: _Statement) -> None:
    if b.pending:
        _wait(b, b.pending[s.operand % len(b.pending)])


def _again(b: _Builder, s: _Statement) -> None:
    if b.done:
        b.add(_WAIT, (b.done[-1 - s.operand % len(b.done)],))


_COMPUTE: Final = ("aten.add.Tensor", "aten.mul.Tensor", "aten.neg.default", "aten.relu.default", "aten.sin.default", "aten.exp.default")


def _compute(b: _Builder, s: _Statement) -> None:
    value = b.pick(b.readable(), s.operand)
    if value is None:
        value = b.new_input(_SHAPES[s.a], b.dtype, s.c)
    target = _COMPUTE[s.b % len(_COMPUTE)]
    if target in ("aten.add.Tensor", "aten.mul.Tensor"):
        b.add(target, (b.use(value), (1, 2, 0.5, 3)[s.a % 4]))
    else:
        b.add(target, (b.use(value),))


def _view(b: _Builder, s: _Statement) -> None:
    value = b.pick(b.readable(), s.operand)
    if value is None:
        value = b.new_input(_SHAPES[s.a], b.dtype, s.c)
    ref, meta = b.use(value), value[1]
    ndim = len(meta.shape)
    choice = s.b
    if choice == 0 or not ndim:
        b.add("aten.reshape.default", (ref, (-1,) if meta.numel else (0,)))
    elif choice == 1 and ndim >= 2:
        b.add("aten.transpose.int", (ref, 0, ndim - 1))
    elif choice == 2:
        b.add("aten.slice.Tensor", (ref, 0, s.c % 2, max(meta.shape[0] - s.c // 4, 0)))
    elif choice == 3 and meta.shape[0]:
        b.add("aten.select.int", (ref, 0, s.c % meta.shape[0]))
    elif choice == 4:
        b.add("aten.unsqueeze.default", (ref, 0))
    elif choice == 5 and meta.shape[0] >= 2:
        b.add("aten.split_with_sizes.default", (ref, (1, meta.shape[0] - 1), 0))
    elif choice == 6:
        b.add("aten.expand.default", (ref, (2, *meta.shape)))
    else:
        b.add("aten.view.default", (ref, meta.shape))


_WRITES: Final = ("aten.add_.Tensor", "aten.mul_.Tensor", "aten.zero_.default", "aten.fill_.Scalar", "aten.copy_.default")


def _write(b: _Builder, s: _Statement) -> None:
    if b.options.mutation == "epilogue":
        b.epilogue.append(s)
        return
    value = b.pick(b.writable(), s.operand)
    if value is None:
        return
    target = _WRITES[s.b % len(_WRITES)]
    args: tuple[Any, ...] = (value[0],)
    if target in ("aten.add_.Tensor", "aten.mul_.Tensor", "aten.fill_.Scalar"):
        args = (value[0], (1, 2, 0, 3)[s.a % 4])
    elif target == "aten.copy_.default":
        source = b.pick([v for v in b.readable() if v[1].shape == value[1].shape and v[1].storage != value[1].storage], s.c)
        if source is None:
            return
        args = (value[0], b.use(source))
    if b.add(target, args) is not None:
        b.written.add(value[1].storage)
        b.used.add(value[0])


def _cast(b: _Builder, s: _Statement) -> None:
    value = b.pick(b.readable(), s.operand)
    if value is None:
        value = b.new_input(_SHAPES[s.a], b.dtype, s.c)
    dtypes = [d for d in b.options.dtypes if d != value[1].dtype] or ["float32"]
    b.add("prims.convert_element_type.default", (b.use(value), DTypeArg(dtypes[s.b % len(dtypes)])))


def _clone(b: _Builder, s: _Statement) -> None:
    value = b.pick(b.readable(), s.operand)
    if value is not None:
        b.add("aten.clone.default", (b.use(value),))


def _join(b: _Builder, s: _Statement) -> None:
    first = b.pick(b.readable(), s.operand)
    if first is None:
        return
    same = [v for v in b.readable() if v[1].shape == first[1].shape and v[1].dtype == first[1].dtype]
    second = b.pick(same, s.c + 1)
    assert second is not None
    if s.b % 2 and first[1].shape and first[1].numel <= _MAX_NUMEL:
        b.add("aten.cat.default", ((b.use(first), b.use(second)), 0))
    else:
        b.add("aten.add.Tensor", (b.use(first), b.use(second)))


def _return_start(b: _Builder, s: _Statement) -> None:
    if b.done:
        b.extra_outputs.append(b.done[-1 - s.operand % len(b.done)])


def _return_value(b: _Builder, s: _Statement) -> None:
    values = b.readable()
    if values:
        b.extra_outputs.append(values[s.operand % len(values)][0])


def _key(b: _Builder, s: _Statement) -> None:
    """Change what the next collectives are: kind, group, reduce op, dtype of new inputs."""
    b.kind = b.options.kinds[s.operand % len(b.options.kinds)]
    b.reduce_op = b.options.reduce_ops[s.a % len(b.options.reduce_ops)]
    b.dtype = b.options.dtypes[s.b % len(b.options.dtypes)]
    b.group = b.groups[s.c % len(b.groups)]


_DO: Final = {
    "comm": _comm,
    "start": _begin,
    "wait": _await,
    "compute": _compute,
    "view": _view,
    "write": _write,
    "cast": _cast,
    "clone": _clone,
    "join": _join,
    "again": _again,
    "return_start": _return_start,
    "return_value": _return_value,
    "key": _key,
}


def _copy_into_inputs(b: _Builder) -> None:
    """The epilogue that a functional graph puts mutations back with: copies of values into inputs, after all else."""
    for s in b.epilogue:
        targets = [v for v in b.writable() if v[0].value < 0]
        target = targets[s.a % len(targets)] if targets else None
        if target is None:
            continue
        sources = [v for v in b.readable() if v[1].shape == target[1].shape and v[1].storage != target[1].storage and v[0].value >= 0]
        source = b.pick(sources, s.c + 1)
        if source is not None and b.add("aten.copy_.default", (target[0], b.use(source))) is not None:
            b.values.pop()


def _finish(b: _Builder, leave: bool) -> Program:
    """Wait for what is pending (or leave it dead), return what nothing uses and what was asked for."""
    if not leave:
        for pending in list(b.pending):
            _wait(b, pending)
    _copy_into_inputs(b)
    busy = {p.output for p in b.pending}
    returned = [v[0] for v in b.values if v[0].value >= 0 and v[0] not in b.used and v[1].storage not in busy]
    for ref in b.extra_outputs:
        if b._meta(ref).storage not in busy:
            returned.append(ref)
    num_inputs = len(b.inputs)

    def shifted(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return Ref(-1 - arg.value if arg.value < 0 else num_inputs + arg.value, arg.item)
        return tuple(shifted(a) for a in arg) if isinstance(arg, tuple) else arg

    ops = tuple(Op(target, shifted(args), kwargs) for target, args, kwargs in b.ops)
    return Program(b.world_size, b.groups, tuple(b.inputs), ops, tuple(shifted(r) for r in returned))


def _read(world_size: int, groups: tuple[Group, ...], options: _Options, key: tuple[int, ...], tape: Sequence[Any], leave: bool) -> Program:
    builder = _Builder(world_size, groups, options)
    _key(builder, _Statement("key", *key))
    for action, operand, a, b, c in tape:
        _DO[action](builder, _Statement(action, operand, a, b, c))
    return _finish(builder, leave)


_KEYS: Final = st.tuples(st.sampled_from((0, 0, 0, 0, 1, 2, 3, 4)), st.integers(0, 4), st.integers(0, 9), st.just(0))
_STATEMENTS: Final = st.tuples(
    st.sampled_from(_ACTIONS), st.sampled_from((0, 0, 0, 1, 2, 3, 4, 7)), st.integers(0, len(_SHAPES) - 1), st.integers(0, 7), st.integers(0, 7)
)


def collective_programs(
    *,
    world_sizes: Sequence[int] = (2,),
    max_collectives: int = 6,
    max_statements: int = 14,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[str] = ALL_DTYPES,
    reduce_ops: Sequence[str] = REDUCE_OPS,
    mutation: Literal["any", "epilogue"] = "any",
) -> st.SearchStrategy[Program]:
    """Programs with up to ``max_collectives`` collectives, valid on all ranks by construction.

    Args:
        world_sizes: to choose from, the simplest first.
        max_collectives: collectives started at most.
        max_statements: statements of the tape at most; each gives up to three ops.
        kinds: of ``KINDS``; the first is drawn most often.
        dtypes: of ``ALL_DTYPES``, the simplest first.
        reduce_ops: of ``REDUCE_OPS``.
        mutation: ``any`` writes in place anywhere; ``epilogue`` only copies into inputs at the end, as functionalised graphs do.
    """
    options = _Options(mutation, tuple(kinds), tuple(dtypes), tuple(reduce_ops), max_collectives)
    return _strategy(tuple(world_sizes), options, max_statements)


@lru_cache(maxsize=64)
def _strategy(world_sizes: tuple[int, ...], options: _Options, max_statements: int) -> st.SearchStrategy[Program]:
    tapes = st.lists(_STATEMENTS, min_size=1, max_size=max_statements)
    sizes = st.sampled_from(world_sizes)

    @st.composite
    def programs(draw: st.DrawFn) -> Program:
        world_size = draw(sizes)
        groups = draw(group_lists(world_size))
        return _read(world_size, groups, options, draw(_KEYS), draw(tapes), draw(st.booleans()))

    return programs()


def divergent_programs(*, world_sizes: Sequence[int] = (2, 3, 4)) -> st.SearchStrategy[Program]:
    """Programs on which the ranks disagree: one collective, and all that depends on it, is left out by one rank.

    Its program is marked ``divergent``; outputs that depend on the collective are dropped.
    """

    @st.composite
    def programs(draw: st.DrawFn) -> Program:
        program = draw(collective_programs(world_sizes=world_sizes))
        starts = [i for i, op in enumerate(program.ops) if op.target.startswith(_C10D) and op.target != _WAIT]
        if not starts:
            return Program(program.world_size, program.groups, program.inputs, program.ops, program.outputs, True)
        chosen = starts[draw(st.integers(0, len(starts) - 1))]
        absent = draw(st.integers(0, program.world_size - 1))
        present = tuple(r for r in range(program.world_size) if r != absent)
        missing = {len(program.inputs) + chosen}
        ops = list(program.ops)
        ops[chosen] = _on(ops[chosen], present)
        for i in range(chosen + 1, len(ops)):
            if any(r.value in missing for arg in (*ops[i].args, *ops[i].kwargs.values()) for r in _refs(arg)):
                missing.add(len(program.inputs) + i)
                ops[i] = _on(ops[i], present)
        outputs = tuple(r for r in program.outputs if r.value not in missing)
        return Program(program.world_size, program.groups, program.inputs, tuple(ops), outputs, True)

    return programs()


def _on(op: Op, ranks: tuple[int, ...]) -> Op:
    return Op(op.target, op.args, op.kwargs, ranks)


def _refs(arg: Any) -> list[Ref]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return [item for item in items if isinstance(item, Ref)]
