"""A graph made ready to run many times: one instruction a node, arguments by slot, operators looked up once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch.fx import GraphModule, Node

from harness.errors import Unsupported
from harness.executors.field_rules import RULES, Rule, dtype_name
from harness.graph import node_place, target_name
from harness.ops import TABLE, CollectiveSpec
from harness.spec.dtypes import represents

__all__ = ["GET", "OP", "OUTPUT", "QUICK", "START", "WAIT", "Instruction", "Plan", "compile_plan", "positional"]

OP: Final = 0
GET: Final = 1
START: Final = 2
WAIT: Final = 3
OUTPUT: Final = 4

_UNINITIALISED: Final = frozenset(
    f"aten.{name}" for name in ("empty.memory_format", "new_empty.default", "empty_like.default", "empty_strided.default")
)


def _convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What ``prims.convert_element_type`` does, without its many layers."""
    return torch.empty_like(x, dtype=dtype).copy_(x)


QUICK: Final[dict[str, Callable[..., Any]]] = {
    "aten.add.Tensor": torch.add,
    "aten.sub.Tensor": torch.sub,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.relu.default": torch.relu,
    "aten.cat.default": torch.cat,
    "aten.clone.default": torch.clone,
    "aten.copy_.default": torch.Tensor.copy_,
    "aten.view.default": torch.Tensor.view,
    "aten.reshape.default": torch.reshape,
    "aten.transpose.int": torch.transpose,
    "aten.split_with_sizes.default": torch.split_with_sizes,
    "prims.convert_element_type.default": _convert,
}
"""The same kernels through bindings that read their arguments faster than an overload does."""
_VIEWS: Final = frozenset({"aten.view.default", "aten._unsafe_view.default"})
_NO_READ: Final = frozenset({"factory", "view"})
_OPAQUE: Final = frozenset(name for name, spec in TABLE.items() if spec.kind == "opaque")
_CONTROL: Final = frozenset(
    f"aten.{name}"
    for name in ("where.self", "index.Tensor", "index_put.default", "index_put_.default", "index_select.default", "gather.default", "argmax.default")
)


class Instruction(NamedTuple):
    """One node; ``where`` is its name and source line; ``is_new`` where its result is neither a view nor written in place. ``fills`` puts slots into ``args``; ``list_fills`` into lists among them; ``kw_fills`` into ``kwargs``."""

    code: int
    slot: int
    name: str
    where: str
    target: str
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    fills: tuple[tuple[int, int], ...]
    list_fills: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    kw_fills: tuple[tuple[str, int], ...]
    rule: Rule | None
    is_view: bool
    is_new: bool
    poisons: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    collective: CollectiveSpec | None
    expected: Any = None


class Plan(NamedTuple):
    """One rank's graph.

    Attributes:
        instructions: in the graph's order.
        num_slots: how many values there are; placeholders hold the first ones.
        num_inputs: of placeholders.
        output_slots: one a graph output, None for an output that is None.
        num_hashes: operators that hash, for the error bound.
        degree: an upper bound on the degree of any value as a rational function of the inputs.
        dtypes: of all its values, by the graph's metadata.
        narrows: whether any operator's result may not represent one of its operands.
        is_opaque: whether any operator is opaque, so that unequal field halves prove nothing.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    num_inputs: int
    output_slots: tuple[int | None, ...]
    num_hashes: int
    degree: int
    dtypes: frozenset[str]
    narrows: bool
    is_opaque: bool


@lru_cache(maxsize=None)
def _positions(target: Any) -> Mapping[str, int]:
    """Which parameters of an overload may be given by position."""
    return {a.name: i for i, a in enumerate(target._schema.arguments) if not a.kwarg_only}


@lru_cache(maxsize=None)
def _defaults(target: Any) -> tuple[Any, ...]:
    return tuple(a.default_value for a in target._schema.arguments if not a.kwarg_only)


def positional(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """A node's arguments with everything by position that may be."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if kwargs:
        positions, defaults = _positions(node.target), _defaults(node.target)
        for name in [k for k in kwargs if k in positions]:
            at = positions[name]
            args.extend(defaults[len(args) : at + 1])
            args[at] = kwargs.pop(name)
    return args, kwargs


def compile_plan(gm: GraphModule, *, views_may_copy: bool = False) -> Plan:
    """Make one rank's graph ready; with ``views_may_copy`` a view that needs a copy makes one.

    Raises:
        Unsupported: for an operator that is not in the table, or has no rule for field halves; it names operator and node.
    """
    slots: dict[Node, int] = {}
    degrees: list[int] = []
    instructions: list[Instruction] = []
    outputs: tuple[int | None, ...] = ()
    num_inputs = num_hashes = 0
    dtypes: set[torch.dtype] = set()
    narrows = is_opaque = False
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dtypes.add(value.dtype)
        if node.op == "placeholder":
            slots[node] = len(slots)
            degrees.append(1)
            num_inputs += 1
        elif node.op == "output":
            values = node.args[0]
            values = values if isinstance(values, (tuple, list)) else (values,)
            outputs = tuple(slots[v] if isinstance(v, Node) else None for v in values)
        elif node.op == "call_function":
            instruction = _instruction(node, slots)
            if views_may_copy and instruction.target in _VIEWS:
                instruction = instruction._replace(fn=_or_copy(instruction.fn))
            slots[node] = instruction.slot
            degrees.append(_degree(instruction, [degrees[slots[n]] for n in node.all_input_nodes]))
            num_hashes += instruction.rule is not None and not instruction.is_view
            narrows = narrows or _narrows(node, instruction)
            is_opaque = is_opaque or instruction.target in _OPAQUE
            if isinstance(value, torch.Tensor):
                instruction = instruction._replace(expected=(value.shape, value.stride(), value.dtype))
            instructions.append(instruction)
        else:
            raise Unsupported(node.op, node.name, f"{node.op} nodes are not straight-line tensor code")
    names = frozenset(dtype_name(d) for d in dtypes)
    return Plan(
        tuple(instructions), len(slots), num_inputs, outputs, num_hashes, max(degrees, default=1), names, narrows, is_opaque
    )


def _or_copy(view: Callable[..., Any]) -> Callable[..., Any]:
    """``view``, or a reshape where that needs a copy."""

    def run(x: torch.Tensor, size: list[int]) -> torch.Tensor:
        try:
            result: torch.Tensor = view(x, size)
        except RuntimeError:
            return x.reshape(size)
        return result

    return run


def _narrows(node: Node, instruction: Instruction) -> bool:
    """Whether the result (or what is written) may not represent an operand, so that values are cast to something narrower."""
    if instruction.rule is None or instruction.collective is not None or instruction.target in _CONTROL:
        return False
    vals = [n.meta.get("val") for n in node.all_input_nodes]
    sources = {v.dtype for v in vals if isinstance(v, torch.Tensor)}
    out = node.meta.get("val")
    targets = {out.dtype} if isinstance(out, torch.Tensor) else set()
    if instruction.writes and vals and isinstance(vals[0], torch.Tensor):
        targets.add(vals[0].dtype)
    return any(not represents(dtype_name(t), dtype_name(s)) for t in targets for s in sources)


def _degree(instruction: Instruction, inputs: list[int]) -> int:
    base = instruction.target.split(".")[1].rstrip("_") if "." in instruction.target else instruction.target
    most = max(inputs, default=1)
    if base in ("mul", "div", "mm", "bmm", "square", "add", "sub", "addmm"):
        return min(2 * most if len(inputs) < 2 else sum(inputs), 2**31)
    if instruction.collective is not None:
        return min(most * 64, 2**31) if instruction.collective.reduce_op is not None else most
    return most


def _instruction(node: Node, slots: dict[Node, int]) -> Instruction:
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        fill = ((0, slots[source]),)
        return Instruction(
            GET, len(slots), node.name, node.name, "getitem", operator.getitem, [None, index], {}, fill, (), (), None, True, False, False, (), (), None
        )
    target = target_name(node)
    spec = TABLE.get(target)
    if spec is None:
        raise Unsupported(target, node.name)
    rule = RULES.get(target)
    if rule is None and spec.kind not in ("view", "move", "collective", "wait"):
        raise Unsupported(target, node.name, "it has no rule in the field arithmetic")
    args, kwargs = positional(node)
    fills = tuple((i, slots[a]) for i, a in enumerate(args) if isinstance(a, Node))
    lists = []
    for i, arg in enumerate(args):
        if isinstance(arg, (list, tuple)):
            inner = tuple((j, slots[a]) for j, a in enumerate(arg) if isinstance(a, Node))
            args[i] = list(arg) if inner else tuple(arg)  # which torch reads faster
            if inner:
                lists.append((i, inner))
    kw_fills = tuple((k, slots[v]) for k, v in kwargs.items() if isinstance(v, Node))
    operands = [i for i, _ in fills] + [i for i, _ in lists]
    writes = spec.writes
    overwritten = writes if target in ("aten.copy_.default", "aten._foreach_copy_.default", "aten.zero_.default", "aten.fill_.Scalar") else ()
    no_reads = spec.kind in _NO_READ or target in _UNINITIALISED
    reads = () if no_reads else tuple(i for i in operands if i not in overwritten)
    code = WAIT if spec.kind == "wait" else START if spec.collective is not None else OP
    own: Any = node.target
    fn = QUICK.get(target) or getattr(own, "_op", own)
    return Instruction(
        code,
        len(slots),
        node.name,
        node_place(node),
        target,
        fn,
        args,
        kwargs,
        fills,
        tuple(lists),
        kw_fills,
        rule,
        spec.kind == "view",
        spec.kind != "view" and not writes,
        target in _UNINITIALISED,
        reads,
        writes,
        spec.collective,
    )
