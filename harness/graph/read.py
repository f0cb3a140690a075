"""From traced graphs to a Program: functional collectives and aten, one graph a rank, folded into one SPMD program.

What differs between ranks only in constants becomes ``PerRank``; a statement that some ranks lack gets ``Op.ranks``, and the
program is marked divergent.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from harness.errors import InvalidProgram, Unsupported
from harness.graph.analysis import target_name
from harness.graph.fake_world import fake_world
from harness.ops import TABLE, infer_program
from harness.spec.dtypes import DTYPES
from harness.spec.program import (
    Arg,
    DTypeArg,
    FloatArg,
    Group,
    GroupArg,
    Op,
    PerRank,
    Program,
    Ref,
    TensorSpec,
    contiguous_stride,
    structural_faults,
)

__all__ = ["program_from_graphs", "trace"]

_DROPPED = frozenset({"device", "layout", "pin_memory", "non_blocking"})
_LEGACY = {"c10d_functional": "_c10d_functional"}

Members = Callable[[int, str], tuple[int, ...]]


class _Statement(NamedTuple):
    """One node of one rank's graph: its operator, and its arguments with nodes for tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    node: Node


def trace(
    function: Callable[..., Any], inputs: Callable[[int, int], Sequence[Tensor]], world_size: int
) -> Program:
    """The Program of a Python function with functional collectives, traced once a rank in a fake world.

    Args:
        function: takes tensors, returns a tensor or a tuple of tensors.
        inputs: gives the tensors of ``(rank, world_size)``; their values become the Program's data.
        world_size: the number of ranks.

    Raises:
        Unsupported: an operator that is not in the table, with its node; an input that is no plain tensor.
    """
    graphs: list[GraphModule] = []
    values: list[list[Tensor]] = []
    groups: dict[tuple[int, str], tuple[int, ...]] = {}
    for rank in range(world_size):
        with fake_world(world_size, rank):
            given = list(inputs(rank, world_size))
            for i, value in enumerate(given):
                if type(value) not in (Tensor, torch.nn.Parameter):
                    raise Unsupported(type(value).__name__, f"input {i} of rank {rank}", "inputs must be plain tensors")
            gm = make_fx(_tupled(function), tracing_mode="fake")(*given)
            for name in _group_names(gm):
                groups[rank, name] = tuple(dist.get_process_group_ranks(c10d._resolve_process_group(name)))  # type: ignore[arg-type]
        constants = _lift_constants(gm)
        graphs.append(gm)
        values.append([*given, *constants])
    return program_from_graphs(graphs, values, lambda rank, name: groups[rank, name])


def program_from_graphs(graphs: Sequence[GraphModule], inputs: Sequence[Sequence[Tensor]], members: Members) -> Program:
    """One Program of one graph a rank.

    Args:
        graphs: in rank order.
        inputs: the tensors of each rank's placeholders.
        members: the ranks of the group that a rank calls by a name.

    Raises:
        Unsupported: an operator outside the table; ranks whose inputs differ in number, shape or dtype.
    """
    world_size = len(graphs)
    specs = _specs(inputs)
    per_rank = [_statements(gm) for gm in graphs]
    merged = _align([[s.target for s in statements] for statements in per_rank])
    groups: dict[tuple[tuple[int, ...], ...], Group] = {}
    refs: list[dict[Node, Ref]] = [_placeholder_refs(gm) for gm in graphs]
    ops: list[Op] = []
    for row in merged:
        for ranks, args, kwargs in _agreeing(row, per_rank, refs, members, groups, world_size):
            number = len(specs) + len(ops)
            for rank in ranks:
                refs[rank][per_rank[rank][row[rank]].node] = Ref(number)
            target = per_rank[ranks[0]][row[ranks[0]]].target
            ops.append(Op(target, args, kwargs, None if len(ranks) == world_size else ranks))
    outputs = _outputs(graphs, refs)
    uneven = any({r for part in parts for r in part} != set(range(world_size)) or len({len(p) for p in parts}) > 1 for parts in groups)
    divergent = uneven or any(op.ranks is not None for op in ops)
    program = Program(world_size, tuple(groups.values()), specs, tuple(ops), outputs, divergent)
    for path, reason in structural_faults(program):
        raise InvalidProgram(path, reason)
    infer_program(program)
    return program


def _tupled(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Tensor) -> tuple[Any, ...]:
        result = function(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    return call


def _name(node: Node) -> str:
    name = target_name(node)
    namespace, dot, rest = name.partition(".")
    return _LEGACY.get(namespace, namespace) + dot + rest


def _group_names(gm: GraphModule) -> list[str]:
    names: dict[str, None] = {}
    for node in gm.graph.nodes:
        spec = TABLE.get(_name(node)) if node.op == "call_function" else None
        if spec is not None and spec.collective is not None:
            names[str(node.args[spec.collective.group])] = None
    return list(names)


def _lift_constants(gm: GraphModule) -> list[Tensor]:
    """Make placeholders of the tensors that the function made up while it was traced; their values are returned."""
    values: list[Tensor] = []
    last = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in list(gm.graph.nodes):
        if node.op != "get_attr":
            continue
        values.append(getattr(gm, str(node.target)).detach())
        with gm.graph.inserting_after(last[-1]) if last else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            placeholder = gm.graph.placeholder(f"constant_{len(values)}")
        placeholder.meta.update(node.meta)
        last.append(placeholder)
        node.replace_all_uses_with(placeholder)
        gm.graph.erase_node(node)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and target_name(node) in ("aten.lift_fresh_copy.default", "aten.lift_fresh.default"):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(node)
    return values


def _specs(inputs: Sequence[Sequence[Tensor]]) -> tuple[TensorSpec, ...]:
    first = inputs[0]
    for rank, values in enumerate(inputs):
        mine = [(tuple(v.shape), v.dtype) for v in values]
        if mine != [(tuple(v.shape), v.dtype) for v in first]:
            raise Unsupported("inputs", f"rank {rank}", f"{mine}; rank 0 has {[(tuple(v.shape), v.dtype) for v in first]}")
    specs: list[TensorSpec] = []
    bases: dict[int, int] = {}
    for i, value in enumerate(first):
        dtype = str(value.dtype)[6:]
        if dtype not in DTYPES:
            raise Unsupported(dtype, f"input {i}", "not a dtype of the table")
        storage = value.untyped_storage()._cdata
        base = bases.get(storage)
        shares = base is not None and specs[base].dtype == dtype and value.numel() > 0
        stride = tuple(value.stride())
        data = None if shares else tuple(_bytes(values[i]) for values in inputs)
        if not shares:
            bases[storage] = i
        specs.append(
            TensorSpec(
                tuple(value.shape),
                dtype,
                None if stride == contiguous_stride(tuple(value.shape)) else stride,
                value.storage_offset(),
                value.requires_grad,
                base if shares else None,
                None,
                data,
            )
        )
    return tuple(specs)


def _bytes(value: Tensor) -> bytes:
    flat = value.detach().contiguous()
    size = flat.numel() * flat.element_size()
    return ctypes.string_at(flat.data_ptr(), size) if size else b""


def _statements(gm: GraphModule) -> list[_Statement]:
    found = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or (node.op == "call_function" and node.target is operator.getitem):
            continue
        name = _name(node) if node.op == "call_function" else node.op
        if name in ("aten.sym_size.int", "aten.sym_numel.default"):
            raise Unsupported(name, node.name, "symbolic sizes")
        if name not in TABLE:
            raise Unsupported(name, node.name)
        kwargs = tuple((k, v) for k, v in node.kwargs.items() if k not in _DROPPED and v is not None)
        found.append(_Statement(name, node.args, kwargs, node))
    return found


def _align(sequences: Sequence[Sequence[str]]) -> list[dict[int, int]]:
    """The ranks' statements side by side: rows of ``{rank: index}``, in an order that keeps each rank's own."""
    rows: list[tuple[str, dict[int, int]]] = [(name, {0: i}) for i, name in enumerate(sequences[0])]
    for rank, names in enumerate(sequences[1:], 1):
        matcher = difflib.SequenceMatcher(None, [name for name, _ in rows], list(names), autojunk=False)
        merged: list[tuple[str, dict[int, int]]] = []
        for tag, a0, a1, b0, b1 in matcher.get_opcodes():
            if tag == "equal":
                merged.extend((name, {**row, rank: b0 + k}) for k, (name, row) in enumerate(rows[a0:a1]))
            else:
                merged.extend(rows[a0:a1])
                merged.extend((names[b], {rank: b}) for b in range(b0, b1))
        rows = merged
    return [row for _, row in rows]


def _placeholder_refs(gm: GraphModule) -> dict[Node, Ref]:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return {node: Ref(i) for i, node in enumerate(placeholders)}


def _agreeing(
    row: dict[int, int],
    per_rank: Sequence[Sequence[_Statement]],
    refs: list[dict[Node, Ref]],
    members: Members,
    groups: dict[tuple[tuple[int, ...], ...], Group],
    world_size: int,
) -> list[tuple[tuple[int, ...], tuple[Arg, ...], dict[str, Arg]]]:
    """The ranks of one row, parted by whether their arguments can be written as one statement."""
    statements = {rank: per_rank[rank][index] for rank, index in row.items()}
    parted: dict[Any, list[int]] = {}
    shapes = {}
    for rank, statement in statements.items():
        shape = _shape((statement.args, statement.kwargs), refs[rank])
        shapes[rank] = shape
        parted.setdefault(shape, []).append(rank)
    result = []
    for ranks in parted.values():
        spec = TABLE[statements[ranks[0]].target].collective
        group = None
        if spec is not None:
            names = {rank: str(statements[rank].args[spec.group]) for rank in ranks}
            group = _group({rank: members(rank, name) for rank, name in names.items()}, names[ranks[0]], groups)
        args = tuple(
            GroupArg(group) if group is not None and spec is not None and i == spec.group
            else _argument([statements[r].args[i] for r in ranks], ranks, refs, world_size)
            for i in range(len(statements[ranks[0]].args))
        )
        kwargs = {
            key: _argument([dict(statements[r].kwargs)[key] for r in ranks], ranks, refs, world_size)
            for key, _ in statements[ranks[0]].kwargs
        }
        result.append((tuple(ranks), args, kwargs))
    return result


def _shape(arg: Any, refs: dict[Node, Ref]) -> Any:
    """What must be equal on all ranks of one statement: operands, and everything but numbers and groups' names."""
    if isinstance(arg, Node):
        return _ref(arg, refs)
    if isinstance(arg, (tuple, list)):
        return tuple(_shape(a, refs) for a in arg)
    if isinstance(arg, bool) or arg is None:
        return arg
    if isinstance(arg, (int, float)):
        return type(arg).__name__
    return "text" if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product") else str(arg)


def _ref(node: Node, refs: dict[Node, Ref]) -> Ref:
    if node.target is operator.getitem and node.op == "call_function":
        source, item = node.args
        assert isinstance(source, Node) and isinstance(item, int)
        return Ref(refs[source].value, item)
    return refs[node]


def _group(parts_of: dict[int, tuple[int, ...]], name: str, groups: dict[tuple[tuple[int, ...], ...], Group]) -> str:
    parts = tuple(sorted(set(parts_of.values())))
    found = groups.get(parts)
    if found is None:
        taken = {g.name for g in groups.values()}
        unique = name if name not in taken else f"{name}_{len(taken)}"
        found = groups[parts] = Group(unique, parts)
    return found.name


def _argument(values: list[Any], ranks: Sequence[int], refs: list[dict[Node, Ref]], world_size: int) -> Any:
    first = values[0]
    if isinstance(first, Node):
        return _ref(first, refs[ranks[0]])
    if isinstance(first, (tuple, list)):
        return tuple(_argument([v[k] for v in values], ranks, refs, world_size) for k in range(len(first)))
    if isinstance(first, torch.dtype):
        return DTypeArg(str(first)[6:])
    if isinstance(first, torch.memory_format):
        return str(first)[6:]
    if isinstance(first, (int, float)) and not isinstance(first, bool) and any(v != first for v in values):
        given = dict(zip(ranks, values, strict=True))
        return PerRank(tuple(given.get(rank, first) for rank in range(world_size)))
    if isinstance(first, float) and not math.isfinite(first):
        return FloatArg("nan" if first != first else "inf" if first > 0 else "-inf")
    if first is None or isinstance(first, (bool, int, float, str)):
        return first
    raise Unsupported(type(first).__name__, None, f"argument {first!r} cannot be written in a Program")


def _outputs(graphs: Sequence[GraphModule], refs: list[dict[Node, Ref]]) -> tuple[Ref, ...]:
    per_rank = []
    for rank, gm in enumerate(graphs):
        values: Any = next(reversed(gm.graph.nodes)).args[0]
        flat = values if isinstance(values, (tuple, list)) else (values,)
        per_rank.append([_ref(v, refs[rank]) for v in flat if isinstance(v, Node)])
    common = [ref for ref in per_rank[0] if all(ref in other for other in per_rank[1:])]
    return tuple(common)
