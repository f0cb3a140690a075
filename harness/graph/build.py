"""From a Program to an ``fx.GraphModule``, built node by node with fake tensors in ``meta["val"]``, as post-grad graphs have them.

Nothing is traced and no code is generated: shapes come from ``harness.ops``, memoised by operator and input metadata.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from harness.errors import Unsupported
from harness.graph.analysis import resolve, target_name, tensor_meta
from harness.ops import TABLE, infer, infer_program
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg, FloatArg, GroupArg, Op, PerRank, Program, Ref

__all__ = ["build", "emit", "emit_item", "fake_mode"]

_CPU = torch.device("cpu")
_FACTORIES = frozenset(name for name, spec in TABLE.items() if spec.kind == "factory" and "_like" not in name)


@lru_cache(maxsize=1)
def fake_mode() -> FakeTensorMode:
    """The one mode that all fake tensors of this process belong to."""
    return FakeTensorMode()


def _lazy_class() -> type[GraphModule]:
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule
    return _LazyGraphModule


class _Fakes:
    """Makes fake tensors, those of one storage sharing one."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}

    def tensor(self, meta: TensorMeta, *, share: bool) -> FakeTensor:
        dtype = _dtype(meta.dtype)
        base = self._bases.get(meta.storage) if share and meta.storage >= 0 else None
        if base is None:
            elem = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")
            if meta.offset:
                elem = torch.empty((meta.offset + elem.untyped_storage().nbytes() // max(elem.element_size(), 1),), dtype=dtype, device="meta")
                elem = elem.as_strided(meta.shape, meta.stride, meta.offset)
            if meta.storage >= 0:
                self._bases[meta.storage] = elem
        else:
            elem = (base if base.dtype is dtype else base.view(dtype)).as_strided(meta.shape, meta.stride, meta.offset)
        return FakeTensor(fake_mode(), elem, _CPU)


@lru_cache(maxsize=None)
def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(name, None, "the installed torch has no such dtype")
    return found


def build(program: Program, rank: int, metas: Sequence[Any] | None = None) -> GraphModule:
    """The graph that rank ``rank`` runs.

    Placeholders are ``arg0_1``, ``arg1_1``, ...; a group is its name; results of several tensors have a ``getitem`` node for
    each item that is used; every node has its own fake tensor, views share their base's fake storage.

    Args:
        program: valid.
        rank: resolves ``PerRank`` constants and the ops of a divergent program.
        metas: what ``infer_program(program)`` gives, where the caller has it.
    """
    metas = infer_program(program) if metas is None else metas
    graph, fakes = Graph(), _Fakes()
    nodes: list[Node | dict[int, Node] | None] = []
    used = _used_items(program)
    for i, meta in enumerate(metas[: len(program.inputs)]):
        node = graph.placeholder(f"arg{i}_1")
        node.meta["val"] = fakes.tensor(meta, share=True)
        nodes.append(node)
    for number, op in enumerate(program.ops, len(program.inputs)):
        if op.ranks is not None and rank not in op.ranks:
            nodes.append(None)
            continue
        nodes.append(_add(graph, op, metas[number], nodes, fakes, used.get(number, ()), rank))
    output = graph.output(tuple(_node(ref, nodes, rank) for ref in program.outputs))
    output.meta["val"] = tuple(n.meta["val"] for n in output.all_input_nodes)
    return _lazy_class()(torch.nn.Module(), graph)


def _used_items(program: Program) -> dict[int, list[int]]:
    used: dict[int, set[int]] = {}
    for arg in (a for op in program.ops for a in (*op.args, *op.kwargs.values())):
        for item in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(item, Ref) and item.item is not None:
                used.setdefault(item.value, set()).add(item.item)
    for ref in program.outputs:
        if ref.item is not None:
            used.setdefault(ref.value, set()).add(ref.item)
    return {value: sorted(items) for value, items in used.items()}


def _node(ref: Ref, nodes: Sequence[Any], rank: int) -> Node:
    found = nodes[ref.value]
    if isinstance(found, dict):
        found = found[ref.item if ref.item is not None else -1]
    if found is None:
        raise Unsupported(f"value {ref.value}", None, f"rank {rank} does not compute it, yet uses it")
    assert isinstance(found, Node)
    return found


def _add(
    graph: Graph, op: Op, meta: Any, nodes: Sequence[Any], fakes: _Fakes, items: Sequence[int], rank: int
) -> Node | dict[int, Node]:
    args = tuple(_argument(a, nodes, rank) for a in op.args)
    kwargs = {k: _argument(a, nodes, rank) for k, a in op.kwargs.items()}
    if op.target in _FACTORIES:
        kwargs.setdefault("device", _CPU)
        kwargs.setdefault("pin_memory", False)
    node = graph.call_function(resolve(op.target), args, kwargs)
    if isinstance(meta, TensorMeta):
        node.meta["val"] = fakes.tensor(meta, share=TABLE[op.target].kind != "wait")
        return node
    node.meta["val"] = [fakes.tensor(m, share=True) for m in meta]
    return {-1: node, **{i: emit_item(graph, node, i) for i in items}}


_MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}


def _argument(arg: Any, nodes: Sequence[Any], rank: int) -> Any:
    if isinstance(arg, Ref):
        return _node(arg, nodes, rank)
    if isinstance(arg, tuple):
        return [_argument(a, nodes, rank) for a in arg]
    if isinstance(arg, DTypeArg):
        return _dtype(arg.name)
    if isinstance(arg, GroupArg):
        return arg.name
    if isinstance(arg, FloatArg):
        return float(arg.value)
    if isinstance(arg, PerRank):
        return arg.values[rank]
    return _MEMORY_FORMATS.get(arg, arg) if isinstance(arg, str) else arg


def emit(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    """Add a call of ``target`` at the graph's insertion point, with true ``meta["val"]``.

    Args:
        target: an ``OpOverload``, or its full name.
        args, kwargs: with nodes for tensors, as the overload takes them.

    Returns:
        The node; where it has several results take them with ``emit_item``.

    Raises:
        harness.ops.OpError: a precondition is broken.
        Unsupported: the overload does not exist.
    """
    overload = resolve(target) if isinstance(target, str) else target
    named = dict(kwargs or {})
    node = graph.call_function(overload, args, named)
    name = target_name(node)
    if name not in TABLE:
        with fake_mode():
            node.meta["val"] = overload(*_fake(args), **{k: _fake(v) for k, v in named.items()})
        return node
    storages: dict[int, Tensor] = {}
    try:
        result = infer(name, _plain(args, storages), {k: _plain(v, storages) for k, v in named.items() if k not in _IGNORED}, _AnySize(args))
    except ValueError:
        graph.erase_node(node)
        raise
    if isinstance(result, TensorMeta):
        node.meta["val"] = _like(result, storages, share=TABLE[name].kind != "wait")
    else:
        node.meta["val"] = [_like(m, storages, share=True) for m in result]
    return node


def emit_item(graph: Graph, node: Node, index: int) -> Node:
    """Add a ``getitem`` of a node with several results."""
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


_IGNORED = frozenset({"device", "layout", "pin_memory"})


class _AnySize(dict[str, int]):
    """Group sizes as the call itself states them; where it states none, any size fits."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        for before, name in zip(args, args[1:], strict=False):
            if isinstance(before, int) and isinstance(name, str):
                self[name] = before
        for arg in args:
            if isinstance(arg, str):
                self.setdefault(arg, 1)


def _like(meta: TensorMeta, storages: Mapping[int, Tensor], *, share: bool) -> FakeTensor:
    base = storages.get(meta.storage) if share else None
    dtype = _dtype(meta.dtype)
    if base is None:
        elem = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")
    else:
        with torch.no_grad():
            elem = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), meta.offset, meta.shape, meta.stride)  # type: ignore[call-overload]
    return FakeTensor(fake_mode(), elem, _CPU)


def _plain(arg: Any, storages: dict[int, Tensor]) -> Any:
    if isinstance(arg, Node):
        value = arg.meta["val"]
        meta = tensor_meta(value)
        storages[meta.storage] = value
        return meta
    if isinstance(arg, (tuple, list)):
        return tuple(_plain(a, storages) for a in arg)
    if isinstance(arg, torch.dtype):
        return str(arg)[6:]
    if isinstance(arg, torch.memory_format):
        return str(arg)[6:]
    if isinstance(arg, str):
        return GroupArg(arg) if arg not in ("sum", "avg", "max", "min", "product") else arg
    return arg


def _fake(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta["val"]
    if isinstance(arg, (tuple, list)):
        return type(arg)(_fake(a) for a in arg)
    return arg
