"""In-place mutation in forward and backward: our functionaliser, readable as the specification of the feature.

A program runs eagerly on copies of its inputs under ``__torch_dispatch__``, its backward too; beside it a functional graph grows. The rules:

1. *Memory is what mutates.* Every storage has one current functional value, a vector. A tensor is a window (size, stride, offset) on it:
   reading is ``as_strided`` of the current value, so that every alias sees every write in order.
2. *A write is a new value.* An operator in place becomes its functional overload, and the storage's next value is ``as_strided_scatter``
   of the result into the window. The storage's ``data`` counter advances, whichever alias was written and in whatever grad mode.
3. *A view is no operation.* What shares a known storage is a window on it; what has a new storage is a new value.
4. ``set_`` gives a tensor another storage: the tensor's ``storage`` counter advances, no storage's ``data``. A resize changes a storage's
   size: its ``resize`` counter advances, and values beyond the old size are undefined (here zeros).
5. *Put back once, in its half.* Counters are noted between forward and backward. A storage of an input has one ``copy_`` in forward's
   epilogue if its ``data`` counter advanced in forward, and one in backward's only if it advanced since.
6. *What crosses is memory.* Backward reads a saved tensor where it lies when backward runs. So the graphs are split at the boundary by
   storages: backward takes those that it touches as they are then, and writes those that it mutated, made in forward or not. A second
   backward therefore sees what the first wrote.
7. *Gradients go through what autograd saw.* An input whose history eager changed is put back by a ``copy_`` that autograd records; one that
   was written behind its back (``no_grad``, ``detach``, ``.data``) by one that it does not, and the version counter advances as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.errors import Unsupported
from harness.spec.outcome import Counters, JointRecord
from harness.spec.program import contiguous_stride, storage_numel

__all__ = ["Functionalised", "functionalise"]

aten: Final[Any] = torch.ops.aten
_RESIZE: Final = torch.UntypedStorage.resize_
_QUERIES: Final = ("aten::is_same_size",)
_TAGS: Final = {"forward": "must_be_in_forward", "backward": "must_be_in_backward"}


class Window(NamedTuple):
    """Where a tensor lies in its storage, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def covers(self, numel: int) -> bool:
        """Whether it is a storage of ``numel`` elements from its first to its last, in order."""
        return not self.offset and prod(self.size) == numel and self.stride == contiguous_stride(self.size)


def _window(tensor: Tensor) -> Window:
    return Window(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _memory(tensor: Tensor) -> Tensor:
    """All of a tensor's storage as a vector that shares its memory and version counter."""
    return tensor.detach().as_strided((_numel(tensor),), (1,), 0)


@dataclass
class _Storage:
    """One storage and its current value: ``value`` with ``written`` not yet scattered into it; neither, where the half has not met it."""

    owner: torch.UntypedStorage
    dtype: torch.dtype
    numel: int
    value: Node | None = None
    written: tuple[Window, Node] | None = None
    reads: dict[Window, Node] = field(default_factory=dict)
    data: int = 0
    resize: int = 0


class _Half:
    """The graph of forward or of backward as it grows."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.opened: dict[int, Node] = {}

    def placeholder(self, name: str) -> Node:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            return self.graph.create_node("placeholder", name, name=name)

    def open(self, key: int, name: str) -> Node:
        """The placeholder for a storage as it is when the half begins."""
        self.opened[key] = self.placeholder(name)
        return self.opened[key]


class _Functionaliser(TorchDispatchMode):
    """Runs what it sees, and writes down its functional form."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, _Storage] = {}
        self.half = _Half()
        self.rebound: dict[int, int] = {}
        self.constants: dict[str, Tensor] = {}
        self._left: dict[int, tuple[Node | None, tuple[Window, Node] | None, dict[Window, Node]]] = {}

    def add(self, tensor: Tensor, node: Node, *, is_vector: bool = False) -> None:
        """A storage that begins with ``node`` as the value of ``tensor``, or of all of it."""
        storage = _Storage(tensor.untyped_storage(), tensor.dtype, _numel(tensor))
        if is_vector:
            storage.value = node
        else:
            storage.written = (_window(tensor), node)
        self.storages[_key(tensor)] = storage

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.half.graph.call_function(target, args, kwargs)

    def vector(self, storage: _Storage, key: int) -> Node:
        """The current value of a storage."""
        if storage.value is None and storage.written is None:
            storage.value = self.half.open(key, f"memory_{len(self.half.opened)}")
        if storage.written is not None:
            window, node = storage.written
            if window.covers(storage.numel):
                storage.value = node if len(window.size) == 1 else self.call(aten.reshape.default, node, [storage.numel])
            else:
                before = storage.value if storage.value is not None else self.call(aten.zeros.default, [storage.numel], dtype=storage.dtype)
                storage.value = self.call(aten.as_strided_scatter.default, before, node, list(window.size), list(window.stride), window.offset)
            storage.written = None
        assert storage.value is not None
        return storage.value

    def read(self, tensor: Tensor) -> Node:
        """The current value of a tensor."""
        key, window = _key(tensor), _window(tensor)
        storage = self.storage_of(tensor)
        if storage.written is not None and storage.written[0] == window:
            return storage.written[1]
        value = self.vector(storage, key)
        if window == Window((storage.numel,), (1,), 0):
            return value
        if window not in storage.reads:
            storage.reads[window] = self.call(aten.as_strided.default, value, list(window.size), list(window.stride), window.offset)
        return storage.reads[window]

    def write(self, tensor: Tensor, node: Node) -> None:
        """A tensor has the value ``node`` from now on."""
        storage, window = self.storage_of(tensor), _window(tensor)
        if storage.written is None or storage.written[0] != window or storage.value is None:
            self.vector(storage, _key(tensor))
        storage.written = (window, node)
        storage.reads = {}
        storage.data += 1

    def resized(self, owner: torch.UntypedStorage) -> None:
        """A storage has another size from now on."""
        key = int(owner._cdata)
        storage = self.storages.get(key)
        if storage is None:
            return
        before, old = self.vector(storage, key), storage.numel
        storage.numel = owner.nbytes() // storage.dtype.itemsize
        if storage.numel < old:
            storage.value = self.call(aten.as_strided.default, before, [storage.numel], [1], 0)
        elif storage.numel > old:
            storage.value = self.call(aten.cat.default, [before, self.call(aten.zeros.default, [storage.numel - old], dtype=storage.dtype)])
        storage.reads = {}
        storage.resize += 1

    def begin_backward(self) -> _Half:
        """Leave forward, which is returned: from now on storages are as backward finds them."""
        left, self.half = self.half, _Half()
        self._left = {key: (s.value, s.written, s.reads) for key, s in self.storages.items()}
        for storage in self.storages.values():
            storage.value, storage.written, storage.reads = None, None, {}
        return left

    def return_to_forward(self, half: _Half) -> None:
        """Have all storages as forward left them."""
        self.half = half
        for key, (value, written, reads) in self._left.items():
            storage = self.storages[key]
            storage.value, storage.written, storage.reads = value, written, reads

    def storage_of(self, tensor: Tensor) -> _Storage:
        storage = self.storages.get(_key(tensor))
        if storage is None:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = _memory(tensor)
            self.add(tensor, self.half.graph.get_attr(name), is_vector=True)
            storage = self.storages[_key(tensor)]
        if storage.dtype != tensor.dtype:
            raise Unsupported("view of another dtype", None, f"memory of {storage.dtype} is read as {tensor.dtype}")
        return storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.set_.source_Tensor:
            self.storage_of(args[1])
            self.rebound[id(args[0])] = self.rebound.get(id(args[0]), 0) + 1
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        result = func(*args, **kwargs)
        found = tree_leaves(result)
        if any(not isinstance(t, (Tensor, type(None))) for t in found) and func._schema.name not in _QUERIES:
            raise Unsupported(func._schema.name, None, "what follows may depend on values")
        made = [t for t in found if isinstance(t, Tensor) and _key(t) not in self.storages]
        if made:
            node = self._traced(func, args, kwargs)
            if isinstance(result, Tensor):
                self.add(result, node)
            else:
                for i, t in enumerate(result):
                    if isinstance(t, Tensor):
                        self.add(t, self.half.graph.call_function(_getitem, (node, i)))
        return result

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        functional = getattr(getattr(aten, func._schema.name.partition("::")[2].removesuffix("_"), None), func._overloadname, None)
        if written != ["self"] or functional is None or functional._schema.is_mutable:
            raise Unsupported(func._schema.name, None, "it writes, and has no functional overload")
        target = args[0]
        node = self._traced(functional, args, kwargs)
        if any(isinstance(t, Tensor) and t.dtype != target.dtype for t in tree_leaves((args, kwargs))) or not target.is_floating_point():
            node = self.call(aten._to_copy.default, node, dtype=target.dtype)
        result = func(*args, **kwargs)
        self.write(target, node)
        return result

    def _traced(self, func: Any, args: Any, kwargs: Any) -> Node:
        args, kwargs = tree_map(lambda a: self.read(a) if isinstance(a, Tensor) else a, (list(args), dict(kwargs)))
        return self.half.graph.call_function(func, tuple(args), kwargs)


def _getitem(values: Sequence[Any], number: int) -> Any:
    return values[number]


class _Base(NamedTuple):
    """An autograd base of arguments: its copy, where the copy's gradient is asked for, and the first argument that has it."""

    copy: Tensor
    anchor: Tensor | None
    arg: int


class _Copies:
    """Copies of arguments that alias, and stand in autograd's graph, as the arguments do."""

    def __init__(self, args: Sequence[Tensor]) -> None:
        owners = [_base(t) for t in args]
        first = {id(b): (b, i) for i, b in reversed(list(enumerate(owners)))}
        vectors: dict[int, Tensor] = {}
        found: dict[int, _Base] = {}
        for base, arg in sorted(first.values(), key=lambda pair: not pair[0].requires_grad or pair[0].is_leaf):
            found[id(base)] = _Base(*_copy(base, vectors), arg)
        self.bases = list(found.values())
        self.args: list[Tensor] = []
        same: dict[int, Tensor] = {}
        for t, base in zip(args, owners, strict=True):
            if id(t) not in same:
                copy = found[id(base)].copy
                with torch.set_grad_enabled(t.requires_grad or not base.requires_grad):
                    same[id(t)] = copy if t is base else copy.as_strided(*_window(t))
            self.args.append(same[id(t)])


def _base(tensor: Tensor) -> Tensor:
    """The tensor whose history a write to this one changes."""
    if tensor._base is None or (tensor.is_leaf and tensor.requires_grad):
        return tensor
    if tensor.requires_grad and not tensor._base.requires_grad:
        raise Unsupported("a view of a leaf that is a view", None, "its base has no gradient")
    return tensor._base


def _copy(base: Tensor, vectors: dict[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    key = _key(base)
    if base.requires_grad and not base.is_leaf and key in vectors:
        raise Unsupported("inputs that share memory but not a base", None, "both are made by operators")
    vector = vectors.setdefault(key, _memory(base).clone())
    plain = vector.as_strided(*_window(base)).detach()
    if not base.requires_grad:
        return plain, None
    anchor = plain.requires_grad_()
    if base.is_leaf:
        return anchor, anchor
    copy = anchor.clone()
    if _window(copy) != _window(base) or _numel(copy) != _numel(base):
        raise Unsupported("an input that an operator made with gaps", None, "its copy has another geometry")
    vectors[key] = _memory(copy)
    return copy, anchor


class Functionalised(NamedTuple):
    """What was made of a function.

    Attributes:
        joint: forward and backward in one graph, functional up to its epilogue. Takes the inputs' storages as vectors, then a gradient for each
            input whose history changed and each output that requires grad; gives outputs, then gradients of the inputs' autograd bases.
        forward: gives the vectors of what forward changed, made for the caller, or left for backward.
        backward: takes gradients, then the memory that it touches; gives gradients, and what it wrote. None where there is no backward.
        record: the counters of every input, and the epilogue's copies in their halves.
        run: calls it as eager is called, autograd included.
    """

    joint: GraphModule
    forward: GraphModule
    backward: GraphModule | None
    record: JointRecord
    run: Callable[..., tuple[Tensor, ...]]


class _Update(NamedTuple):
    """An input's base whose history changed: where it lies, and the first argument that has it."""

    key: int
    window: Window
    arg: int


class _Output(NamedTuple):
    key: int
    window: Window
    has_grad: bool


class _Plan(NamedTuple):
    """How the graphs are called: storages by the key that they had while tracing."""

    forward: GraphModule
    backward: GraphModule | None
    backward_error: Exception | None
    values: tuple[int, ...]
    sizes: dict[int, int]
    silent: frozenset[int]
    opened: tuple[int, ...]
    written: tuple[int, ...]
    updates: tuple[_Update, ...]
    outputs: tuple[_Output, ...]


class _Call(torch.autograd.Function):
    """One call: forward's graph now, backward's when autograd asks for it; both write memory that they share."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, memory: dict[int, Tensor], *bases: Tensor) -> tuple[Tensor, ...]:
        found = dict(zip(plan.values, plan.forward(*memory.values()), strict=True))
        updated = [found[key].as_strided(*window).clone() for key, window, _ in plan.updates]
        visible = {key for key, window, _ in plan.updates if window.covers(plan.sizes[key])}
        for key, value in found.items():
            if key not in memory:
                memory[key] = value.clone()
                continue
            owner = memory[key].untyped_storage()
            if value.numel() * value.element_size() != owner.nbytes():
                owner.resize_(value.numel() * value.element_size())
                memory[key] = memory[key].as_strided((value.numel(),), (1,), 0)
            if key not in visible:
                (memory[key].data if key in plan.silent else memory[key]).copy_(value)
        outputs = [memory[key].as_strided(*window).detach() for key, window, _ in plan.outputs]
        ctx.plan, ctx.memory = plan, memory
        ctx.mark_non_differentiable(*(t for t, o in zip(outputs, plan.outputs, strict=True) if not o.has_grad))
        return (*updated, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        if torch.is_grad_enabled():
            raise RuntimeError("the model does not support double backward")
        if plan.backward_error is not None:
            raise plan.backward_error
        assert plan.backward is not None
        has_grad = [True] * len(plan.updates) + [o.has_grad for o in plan.outputs]
        tangents = [g.contiguous().reshape(-1).clone() for g, has in zip(grads, has_grad, strict=True) if has]
        found, written = plan.backward(*tangents, *(ctx.memory[key] for key in plan.opened))
        for key, value in zip(plan.written, written, strict=True):
            (ctx.memory[key].data if key in plan.silent else ctx.memory[key]).copy_(value)
        return (None, None, *(None if g is None else g.clone() for g in found))


class _PutBack(torch.autograd.Function):
    """Give a tensor the value, and the history, that the function made: what history it had is cut off, not given zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor.copy_(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def functionalise(fn: Callable[..., Any], args: Sequence[Tensor]) -> Functionalised:
    """The functional form of ``fn`` and its backward on arguments like ``args``, which are not changed.

    Args:
        fn: takes tensors and returns a tensor or several.
        args: may alias each other, and require grad or not.

    Raises:
        Unsupported: it uses what this model does not know: values that steer the program, views of another dtype, operators that write and have
            no functional overload.
        Exception: whatever ``fn`` itself raises.
    """
    copies = _Copies(args)
    mode = _Functionaliser()
    for i, copy in enumerate(copies.args):
        if _key(copy) not in mode.storages:
            mode.add(copy, mode.half.open(_key(copy), f"primals_{i}"), is_vector=True)
    own_keys = [_key(copy) for copy in copies.args]
    given = tuple(dict.fromkeys(own_keys))
    versions, histories = [_version(c) for c in copies.args], [b.copy.grad_fn for b in copies.bases]
    with _resizes_seen(mode), torch.enable_grad(), mode:
        returned = fn(*copies.args)
    outputs = [t for t in (returned if isinstance(returned, (tuple, list)) else (returned,)) if isinstance(t, Tensor)]
    returns, made = _returns(outputs, copies.args, mode)
    updates = [b for b, before in zip(copies.bases, histories, strict=True) if b.copy.grad_fn is not before]
    if len({_key(b.copy) for b in updates}) != len(updates):
        raise Unsupported("inputs that share memory but not a base", None, "both histories changed")
    if any(id(b.copy) in mode.rebound for b in updates):
        raise Unsupported("set_ of an input whose history changed", None, "the history is that of memory that it no longer has")
    after_forward = [_counters(mode, copy) for copy in copies.args]
    data = {key: storage.data for key, storage in mode.storages.items()}
    changed = [key for key in given if data[key] or mode.storages[key].resize]
    if any(b.anchor is not None and id(b.copy) in mode.rebound for b in copies.bases):
        raise Unsupported("set_ of an input that requires grad", None, "eager loses the gradient of its earlier uses, but not of views")
    unwritten = [i for i, (c, v) in enumerate(zip(copies.args, versions, strict=True)) if _version(c) > v and id(c) not in mode.rebound and not data[own_keys[i]]]
    rebound = [(i, _key(c), _window(c)) for i, c in enumerate(copies.args) if id(c) in mode.rebound]

    forward = mode.begin_backward()
    roots = [*(b.copy for b in updates), *(t for t in made if t.requires_grad)]
    differentiable: Sequence[_Base] = [b for b in copies.bases if b.anchor is not None]
    grads, error = _differentiate(mode, roots, [b.anchor for b in differentiable if b.anchor is not None])
    if any(g is not None for g in grads):
        differentiable, grads = zip(*((b, g) for b, g in zip(differentiable, grads, strict=True) if g is not None), strict=True)
    after_backward = [_counters(mode, copy) for copy in copies.args]
    backward, opened = mode.half, tuple(mode.half.opened)
    written = tuple(key for key, storage in mode.storages.items() if key in data and storage.data > data[key])
    written_nodes = [mode.vector(mode.storages[key], key) for key in written]
    grad_nodes = [None if g is None else mode.read(g) for g in grads]

    mode.return_to_forward(forward)
    new = [*(_key(t) for t in made), *(key for _, key, _ in rebound), *opened, *written]
    values = tuple(dict.fromkeys([*changed, *(key for key in new if key not in given)]))
    vectors = {key: mode.vector(mode.storages[key], key) for key in dict.fromkeys([*values, *opened, *written])}
    output_nodes = [mode.read(t) for t in outputs]
    has_backward = bool(roots and differentiable) and error is None
    joint = _joint(forward, backward, [vectors[key] for key in opened], output_nodes, grad_nodes if has_backward else [])
    _epilogue(joint, forward, backward, [(key, vectors[key], "forward") for key in changed if data[key]])
    _epilogue(joint, forward, backward, [(key, n, "backward") for key, n in zip(written, written_nodes, strict=True) if key in given])
    joint.finish()
    forward.graph.output(tuple(vectors[key] for key in values))
    backward.graph.output((tuple(grad_nodes), tuple(written_nodes)))
    halves = [_module(half.graph, mode.constants) for half in (forward, backward)]
    bumped = {key for key, copy, before in zip(own_keys, copies.args, versions, strict=True) if _version(copy) > before}
    plan = _Plan(
        halves[0], halves[1], error, values, {key: mode.storages[key].numel for key in given}, frozenset(set(given) - bumped), opened, written,
        tuple(_Update(_key(b.copy), _window(b.copy), b.arg) for b in updates),
        tuple(_Output(_key(t), _window(t), t.requires_grad) for t in made),
    )  # fmt: skip
    places = [(i, half) for half in ("forward", "backward") for i, key in enumerate(own_keys) if (data[key] if half == "forward" else key in written)]
    record = JointRecord(has_backward, len(args), tuple(range(len(args))), tuple(after_forward), tuple(after_backward), tuple(places), ())

    def run(*actual: Tensor) -> tuple[Tensor, ...]:
        memory = {key: _memory(actual[own_keys.index(key)]) for key in given}
        results = _Call.apply(plan, memory, *(_base(actual[b.arg]) for b in differentiable))
        with torch.enable_grad():
            for update, value in zip(plan.updates, results, strict=False):
                _PutBack.apply(_base(actual[update.arg]), value)
        for i in unwritten:
            torch.autograd.graph.increment_version(actual[i])
        with torch.no_grad():
            for i, key, window in rebound:
                aten.set_.source_Tensor(actual[i], memory[key].as_strided(*window))
        return tuple(actual[n] if is_arg else results[len(updates) + n] for is_arg, n in returns)

    return Functionalised(_module(joint.graph, mode.constants), halves[0], halves[1] if has_backward else None, record, run)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _counters(mode: _Functionaliser, tensor: Tensor) -> Counters:
    storage = mode.storages[_key(tensor)]
    return Counters(storage.data, mode.rebound.get(id(tensor), 0), storage.resize)


def _returns(outputs: Sequence[Tensor], args: Sequence[Tensor], mode: _Functionaliser) -> tuple[list[tuple[bool, int]], list[Tensor]]:
    """For each output whether it is an argument, and its number among these or among the others; and those others."""
    returns: list[tuple[bool, int]] = []
    made: list[Tensor] = []
    for t in outputs:
        arg = next((i for i, a in enumerate(args) if a is t), None)
        if arg is not None:
            returns.append((True, arg))
            continue
        number = next((i for i, m in enumerate(made) if m is t), len(made))
        if number == len(made):
            if t.requires_grad and t.is_leaf:
                raise Unsupported("an output that is a leaf", None, "its gradient is not the function's")
            if storage_numel(*_window(t)) > mode.storage_of(t).numel:
                raise Unsupported("an output without memory", None, "its storage was resized to less than it needs")
            made.append(t)
        returns.append((False, number))
    return returns, made


def _differentiate(mode: _Functionaliser, roots: Sequence[Tensor], anchors: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Exception | None]:
    """Run backward; what eager refuses there is given back, to be raised when backward is called."""
    if not roots or not anchors:
        return [], None
    tangents = [torch.ones(t.shape, dtype=t.dtype) for t in roots]
    for i, tangent in enumerate(tangents):
        mode.add(tangent, mode.half.placeholder(f"tangents_{i}"), is_vector=True)
    try:
        with _resizes_seen(mode), mode:
            return torch.autograd.grad(roots, anchors, tangents, allow_unused=True), None
    except Unsupported:
        raise
    except Exception as error:
        return [], error.with_traceback(None)


@contextmanager
def _resizes_seen(mode: _Functionaliser) -> Iterator[None]:
    """Resizes of storages do not pass through dispatch."""

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        with torch.utils._python_dispatch._disable_current_modes():
            result = _RESIZE(storage, num_bytes)
            mode.resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


class _Joint:
    """Forward's nodes, then backward's on what forward left, in one graph."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.outputs: list[Any] = []

    def finish(self) -> None:
        self.graph.output(tuple(self.outputs))
        self.graph.eliminate_dead_code()
        self.graph.lint()


def _joint(forward: _Half, backward: _Half, crossing: Sequence[Node], outputs: Sequence[Node], grads: Sequence[Node | None]) -> _Joint:
    joint = _Joint()
    env = joint.env
    tangents = [n for n in backward.graph.nodes if n.op == "placeholder" and n not in backward.opened.values()]
    for node in [*forward.opened.values(), *(tangents if grads else ())]:
        env[node] = joint.graph.node_copy(node)
    for node in forward.graph.nodes:
        if node not in env:
            env[node] = joint.graph.node_copy(node, env.__getitem__)
    env.update(zip(backward.opened.values(), (env[node] for node in crossing), strict=True))
    for node in backward.graph.nodes if grads else ():
        if node not in env:
            env[node] = joint.graph.node_copy(node, env.__getitem__)
    joint.outputs = [*(env[n] for n in outputs), *(None if n is None else env[n] for n in grads)]
    return joint


def _epilogue(joint: _Joint, forward: _Half, backward: _Half, copies: Sequence[tuple[int, Node, str]]) -> None:
    for key, node, half in copies:
        copied = joint.graph.call_function(aten.copy_.default, (joint.env[forward.opened[key]], joint.env[node]))
        copied.meta["partitioner_tag"] = _TAGS[half]


def _module(graph: Graph, constants: dict[str, Tensor]) -> GraphModule:
    graph.eliminate_dead_code()
    used = {n.target for n in graph.nodes if n.op == "get_attr"}
    return GraphModule({name: t for name, t in constants.items() if name in used}, graph)
