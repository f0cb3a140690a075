"""From a Program to an ``fx.GraphModule``, built node by node with fake tensors in ``meta["val"]``, as post-grad graphs
have them.

Nothing is traced and no code is generated: shapes come from ``harness.ops``, memoised by operator and input metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from harness.errors import Unsupported
from harness.graph.analysis import name_of, resolve, schema_of, storage_key, tensor_meta
from harness.graph.fake_world import group_size
from harness.graph.per_rank import arguments, is_uniform, rank_metas
from harness.graph.private import private
from harness.ops import TABLE, infer, infer_program
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, FloatArg, GroupArg, Op, PerRank, Program, Ref

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["build", "build_all", "emit", "emit_item", "fake_mode", "module_of"]

_FAKE_TENSOR: Final = "torch._subclasses.fake_tensor"
_CPU: Final = torch.device("cpu")
_MEMORY_FORMATS: Final[Mapping[str, torch.memory_format]] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}
_NOT_IN_PROGRAMS: Final = frozenset({"device", "layout", "pin_memory"})


@lru_cache(maxsize=1)
def fake_mode() -> FakeTensorMode:
    """The one mode that all fake tensors of this process belong to.

    Raises:
        Unsupported: the installed torch has no such mode.
    """
    mode: FakeTensorMode = private(_FAKE_TENSOR, "FakeTensorMode")()
    return mode


def module_of(graph: Graph) -> GraphModule:
    """A module that runs a graph without attributes; it generates code only when called, where the installed torch can do so."""
    return _module_class()(torch.nn.Module(), graph)


@lru_cache(maxsize=1)
def _module_class() -> type[GraphModule]:
    try:
        found: type[GraphModule] = private("torch.fx._lazy_graph_module", "_LazyGraphModule")
    except Unsupported:
        return GraphModule
    return found


@lru_cache(maxsize=None)
def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(name, None, f"torch {torch.__version__} has no such dtype")
    return found


@lru_cache(maxsize=None)
def _factory_options(target: str) -> Mapping[str, Any]:
    """What a traced call of a factory says besides a Program's arguments: where the tensor lies."""
    if TABLE[target].kind != "factory":
        return {}
    is_like = "_like." in target or ".new_" in target
    return {"pin_memory": False} if is_like else {"device": _CPU, "pin_memory": False}


def _geometry(meta: TensorMeta, base: Tensor | None) -> Tensor:
    """A tensor without memory that looks like ``meta``, in the storage of ``base`` or in one of its own."""
    dtype = _dtype(meta.dtype)
    if base is not None:
        if base.dtype is dtype:
            return base.as_strided(meta.shape, meta.stride, meta.offset)
        empty = torch.empty(0, dtype=dtype, device="meta")
        return empty.set_(base.untyped_storage(), meta.offset, meta.shape, meta.stride)
    alone = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")
    if not meta.offset:
        return alone
    held = meta.offset + alone.untyped_storage().nbytes() // alone.element_size()
    return torch.empty(held, dtype=dtype, device="meta").as_strided(meta.shape, meta.stride, meta.offset)


def _fake(geometry: Tensor) -> Tensor:
    fake: Tensor = private(_FAKE_TENSOR, "FakeTensor")(fake_mode(), geometry, _CPU)
    return fake


def _several(target: Any, values: list[Tensor]) -> list[Tensor] | tuple[Tensor, ...] | None:
    """Several results as torch gives them: a list for ``Tensor[]``, a tuple for several returns, None for none."""
    num_returns = len(schema_of(target).returns)
    return None if num_returns == 0 else values if num_returns == 1 else tuple(values)


_Place = tuple[int, int | None]
"""A value's number, and the item of one that has several."""


def build(program: Program, rank: int, metas: Sequence[Any] | None = None) -> GraphModule:
    """The graph that rank ``rank`` runs.

    Nodes have the names that tracing gives them, placeholders ``arg0_1``, ``arg1_1``, ...; a group is its name; results
    of several tensors have a ``getitem`` node for each item that is used; every node has its own fake tensor; views and
    in-place results share their operand's fake storage, while a wait has a fresh one, as torch's own fake kernel gives
    it. The graph of a divergent Program has the rank's own statements only, and returns those outputs that the rank
    computes.

    Args:
        program: valid.
        rank: resolves ``PerRank`` constants and the ops of a divergent program.
        metas: what ``infer_program(program)`` gives, where the caller has it; not used where ranks differ.

    Raises:
        ValueError: ``rank`` is not a rank of the program.
        InvalidProgram: an op's precondition is broken.
        Unsupported: the installed torch lacks an operator or dtype; the rank uses what it does not compute.
    """
    if not 0 <= rank < program.world_size:
        raise ValueError(f"rank {rank}; must be from 0 to {program.world_size - 1}")
    return _build(program, rank, metas, {})


def build_all(program: Program, metas: Sequence[Any] | None = None) -> list[GraphModule]:
    """What ``build`` gives for each rank; where the ranks' metadata is the same, their nodes have the same fake tensors.

    Raises:
        InvalidProgram, Unsupported: see ``build``.
    """
    shared: dict[_Place, tuple[Tensor, Tensor]] = {}
    return [_build(program, rank, metas, shared) for rank in range(program.world_size)]


def _build(program: Program, rank: int, metas: Sequence[Any] | None, shared: dict[_Place, tuple[Tensor, Tensor]]) -> GraphModule:
    if not is_uniform(program):
        values: Sequence[Any] = rank_metas(program, rank)
        shared = {}
    else:
        values = infer_program(program) if metas is None else metas
    builder = _Builder(program, rank, shared)
    for i, spec in enumerate(program.inputs):
        builder.placeholder(f"arg{i}_1", values[i], spec.view_of)
    for number, op in enumerate(program.ops, len(program.inputs)):
        if op.ranks is None or rank in op.ranks:
            builder.call(number, op, values[number])
    return builder.finish([ref for ref in program.outputs if values[ref.value] is not None])


class _Builder:
    """One graph in the making; ``nodes`` and ``geometries`` are found by a value's number and the item, or None.

    ``shared`` has the geometry and the fake tensor of each value that another rank's graph already has.
    """

    def __init__(self, program: Program, rank: int, shared: dict[_Place, tuple[Tensor, Tensor]]) -> None:
        self.graph = Graph()
        self.rank = rank
        self.shared = shared
        self.nodes: dict[_Place, Node] = {}
        self.geometries: dict[_Place, tuple[int, Tensor]] = {}
        self.used = _used_items(program)

    def placeholder(self, name: str, meta: TensorMeta, view_of: int | None) -> None:
        number = len(self.nodes)
        base = None if view_of is None else self.geometries[view_of, None][1]
        node = self.graph.placeholder(name)
        node.meta["val"] = self._tensor((number, None), meta, base)
        self.nodes[number, None] = node

    def call(self, number: int, op: Op, meta: Any) -> None:
        target = resolve(op.target)
        args = tuple([self._argument(a) for a in op.args])
        kwargs = {k: self._argument(a) for k, a in op.kwargs.items()}
        for key, value in _factory_options(op.target).items():
            kwargs.setdefault(key, value)
        node = _call(self.graph, target, op.target, args, kwargs)
        if op.place is not None:
            node.meta["place"] = op.place
        self.nodes[number, None] = node
        bases = {} if TABLE[op.target].kind == "wait" else self._operands(op)
        if isinstance(meta, TensorMeta):
            node.meta["val"] = self._tensor((number, None), meta, bases.get(meta.storage))
            return
        values = []
        for item, part in enumerate(meta):
            values.append(self._tensor((number, item), part, bases.get(part.storage)))
            bases.setdefault(part.storage, self.geometries[number, item][1])
        node.meta["val"] = _several(target, values)
        for item in self.used.get(number, ()):
            self.nodes[number, item] = emit_item(self.graph, node, item)

    def finish(self, outputs: Sequence[Ref]) -> GraphModule:
        returned = tuple(self.nodes[ref.value, ref.item] for ref in outputs)
        self.graph.output(returned).meta["val"] = tuple(node.meta["val"] for node in returned)
        return module_of(self.graph)

    def _tensor(self, place: _Place, meta: TensorMeta, base: Tensor | None) -> Tensor:
        made = self.shared.get(place)
        if made is None:
            geometry = _geometry(meta, base)
            made = self.shared[place] = (geometry, _fake(geometry))
        self.geometries[place] = (meta.storage, made[0])
        return made[1]

    def _operands(self, op: Op) -> dict[int, Tensor]:
        """By the number of its storage, an operand that lives in it."""
        return dict(self.geometries[a.value, a.item] for a in arguments(op) if isinstance(a, Ref))

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            return self.nodes[arg.value, arg.item]
        if isinstance(arg, tuple):
            return [self._argument(a) for a in arg]
        if isinstance(arg, DTypeArg):
            return _dtype(arg.name)
        if isinstance(arg, GroupArg):
            return arg.name
        if isinstance(arg, FloatArg):
            return float(arg.value)
        if isinstance(arg, PerRank):
            return arg.values[self.rank]
        return _MEMORY_FORMATS.get(arg, arg) if isinstance(arg, str) else arg


def _used_items(program: Program) -> dict[int, list[int]]:
    used: dict[int, set[int]] = {}
    for op in program.ops:
        for arg in arguments(op):
            if isinstance(arg, Ref) and arg.item is not None:
                used.setdefault(arg.value, set()).add(arg.item)
    for ref in program.outputs:
        if ref.item is not None:
            used.setdefault(ref.value, set()).add(ref.item)
    return {value: sorted(items) for value, items in used.items()}


def emit(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    """Add a call of ``target`` at the graph's insertion point, with true ``meta["val"]``.

    An operator outside the table gets the metadata that its own fake kernel gives.

    Args:
        target: an ``OpOverload``, or its full name.
        args, kwargs: with nodes for tensors, as the overload takes them.

    Returns:
        The node; where it has several results take them with ``emit_item``.

    Raises:
        harness.ops.OpError: a precondition is broken; the graph is as it was.
        Unsupported: the overload does not exist; the graph is as it was.
    """
    overload = resolve(target) if isinstance(target, str) else target
    named = dict(kwargs or {})
    name = name_of(overload)
    value = _inferred(overload, name, args, named) if name in TABLE else _executed(overload, args, named)
    node = _call(graph, overload, name, args, named)
    node.meta["val"] = value
    return node


def _call(graph: Graph, target: Any, full_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    """A call, named as tracing names it; its arguments are set afterwards, because ``create_node`` walks them in search of symbolic numbers."""
    node = graph.create_node("call_function", target, name=full_name.split(".")[1] if "." in full_name else full_name)
    node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def emit_item(graph: Graph, node: Node, index: int) -> Node:
    """Add a ``getitem`` of a node with several results."""
    item = _call(graph, operator.getitem, "getitem", (node, index), {})
    item.meta["val"] = node.meta["val"][index]
    return item


def _inferred(overload: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    storages: dict[int, Tensor] = {}
    spec = TABLE[name].collective
    plain = [_plain(a, storages) for a in args]
    sizes: dict[str, int] = {}
    if spec is not None and spec.group < len(args):
        group = str(args[spec.group])
        plain[spec.group] = GroupArg(group)
        sizes[group] = args[spec.group_size] if spec.group_size is not None else _size(spec.kind, group, args)
    named = {k: _plain(v, storages) for k, v in kwargs.items() if k not in _NOT_IN_PROGRAMS}
    result = infer(name, tuple(plain), named, sizes)
    if TABLE[name].kind == "wait":
        storages.clear()
    if isinstance(result, TensorMeta):
        return _fake(_geometry(result, _without_mode(storages.get(result.storage))))
    values = [_fake(_geometry(m, _without_mode(storages.get(m.storage)))) for m in result]
    return _several(overload, values)


def _size(kind: str, group: str, args: tuple[Any, ...]) -> int:
    """The size of a group, where the call does not state it: the registered group's, else the least it can be."""
    known = group_size(group)
    if known is not None:
        return known
    if kind == "all_to_all":
        return max(len(args[1] or ()), 1)
    return args[1] + 1 if kind == "broadcast" and isinstance(args[1], int) else 1


def _without_mode(value: Tensor | None) -> Tensor | None:
    """A fake tensor's storage as a plain tensor without memory, whose views need no dispatch through the mode."""
    if value is None:
        return None
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(value.untyped_storage(), 0, (0,), (1,))


def _executed(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with fake_mode():
        result = overload(*_values(args), **{k: _values(v) for k, v in kwargs.items()})
    given = {id(n.meta["val"]) for n in _nodes((args, tuple(kwargs.values())))}
    return _distinct(result, given)


def _distinct(result: Any, given: set[int]) -> Any:
    """An operator that returns its operand gets a tensor object of its own all the same."""
    if isinstance(result, (tuple, list)):
        return type(result)(_distinct(r, given) for r in result)
    if isinstance(result, Tensor) and id(result) in given:
        return _fake(_geometry(tensor_meta(result), _without_mode(result)))
    return result


def _nodes(arg: Any) -> list[Node]:
    if isinstance(arg, Node):
        return [arg]
    return [n for a in arg for n in _nodes(a)] if isinstance(arg, (tuple, list)) else []


def _plain(arg: Any, storages: dict[int, Tensor]) -> Any:
    if isinstance(arg, Node):
        value = arg.meta["val"]
        storages.setdefault(storage_key(value), value)
        return tensor_meta(value)
    if isinstance(arg, (tuple, list)):
        return tuple(_plain(a, storages) for a in arg)
    return str(arg)[6:] if isinstance(arg, (torch.dtype, torch.memory_format)) else arg


def _values(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta["val"]
    if isinstance(arg, (tuple, list)):
        return type(arg)(_values(a) for a in arg)
    return arg
