"""From graphs of functional collectives and aten, one a rank, to one SPMD Program.

What differs between ranks only in numbers becomes ``PerRank``; a statement that some ranks lack, or run on other
operands, gets ``Op.ranks``, and the Program is marked divergent.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.fx import GraphModule, Node

from harness.errors import InvalidProgram, Unsupported
from harness.graph.align import align
from harness.graph.analysis import schema_of, target_name
from harness.graph.fold_groups import GroupFold, Members
from harness.graph.per_rank import is_uniform, rank_metas
from harness.graph.specs import input_specs
from harness.ops import TABLE, infer_program
from harness.spec.program import Arg, DTypeArg, FloatArg, Group, GroupArg, Op, PerRank, Program, Ref, structural_faults

__all__ = ["program_from_graphs"]

_DROPPED: Final = frozenset({"device", "layout", "pin_memory", "non_blocking"})
_LEGACY: Final = {"c10d_functional.wait_tensor.default": "_c10d_functional.wait_tensor.default"}
_ALIAS: Final = "aten.alias.default"
_OP_PATH: Final = re.compile(r"^\$\.ops\[(\d+)\]")


class _Statement(NamedTuple):
    """One node of one rank's graph: its operator, and its arguments with nodes for tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: Node


class _Rank(NamedTuple):
    """One rank's graph: its statements, what it returns, and the value of each node seen so far."""

    statements: list[_Statement]
    outputs: list[Node]
    refs: dict[Node, Ref]


def program_from_graphs(
    graphs: Sequence[GraphModule],
    inputs: Sequence[Sequence[Tensor]] | None = None,
    groups: Sequence[Group] | Members = (),
) -> Program:
    """One Program of one graph a rank.

    Args:
        graphs: in rank order.
        inputs: the tensors of each rank's placeholders; their values become data. None: what the placeholders'
            ``meta["val"]`` says, without values.
        groups: the process groups that the graphs name, which become the Program's; or a function that gives the ranks
            of the group that a rank calls by a name, the partitions then being put together from what is used.

    Raises:
        Unsupported: an operator or argument outside the table, with its node; a group that is not known; inputs that
            differ between ranks, see ``harness.graph.specs.input_specs``; an output that is no tensor.
        InvalidProgram: an operator's precondition is broken; the reason names the node.
    """
    placeholders = [[n for n in gm.graph.nodes if n.op == "placeholder"] for gm in graphs]
    given = [[n.meta["val"] for n in nodes] for nodes in placeholders] if inputs is None else inputs
    specs, numbers = input_specs(given)
    ranks = [
        _Rank(_statements(gm), _returned(gm), {n: Ref(number) for n, number in zip(nodes, numbers, strict=True)})
        for gm, nodes in zip(graphs, placeholders, strict=True)
    ]
    fold = _Fold(ranks, len(specs), GroupFold(len(graphs), groups))
    fold.statements()
    outputs = fold.outputs()
    found, ops = fold.groups.groups(), fold.named_ops()
    divergent = any(op.ranks is not None for op in ops) or any(_is_uneven(g, len(graphs)) for g in found)
    program = Program(len(graphs), found, specs, tuple(ops), outputs, divergent)
    _validate(program, fold.origins)
    return program


class _Fold:
    """The merged program in the making; ``origins`` has a node for each op."""

    def __init__(self, ranks: Sequence[_Rank], num_inputs: int, groups: GroupFold) -> None:
        self.ranks = ranks
        self.num_inputs = num_inputs
        self.groups = groups
        self.ops: list[Op] = []
        self.origins: list[str] = []
        self._group_numbers: dict[int, int] = {}

    def statements(self) -> None:
        for row in align([[s.target for s in rank.statements] for rank in self.ranks]):
            for members in self._agreeing({rank: self.ranks[rank].statements[i] for rank, i in row.items()}):
                self._add(members)

    def outputs(self) -> tuple[Ref, ...]:
        """What the ranks return; where only some of those that compute a value return it, an alias on them alone."""
        returned = [[_ref(node, rank.refs) for node in rank.outputs] for rank in self.ranks]
        result: list[Ref] = []
        for row in align(returned):
            first = min(row)
            ref = returned[first][row[first]]
            number = ref.value - self.num_inputs
            computing = None if number < 0 else self.ops[number].ranks
            if len(row) < (len(self.ranks) if computing is None else len(computing)):
                ref = self._append(Op(_ALIAS, (ref,), {}, tuple(sorted(row))), "output")
            result.append(ref)
        return tuple(result)

    def named_ops(self) -> list[Op]:
        """The ops, with the names that the groups have got."""
        names = [group.name for group in self.groups.groups()]
        result = list(self.ops)
        for i, number in self._group_numbers.items():
            spec = TABLE[result[i].target].collective
            assert spec is not None
            args = list(result[i].args)
            args[spec.group] = GroupArg(names[number])
            result[i] = replace(result[i], args=tuple(args))
        return result

    def _agreeing(self, statements: Mapping[int, _Statement]) -> list[dict[int, _Statement]]:
        """The ranks of one row, parted by whether their arguments can be written as one statement."""
        parted: dict[Any, dict[int, _Statement]] = {}
        for rank, statement in statements.items():
            shape = _shape(
                (statement.args, tuple(statement.kwargs.items())), self.ranks[rank].refs, _group_at(statement)
            )
            parted.setdefault(shape, {})[rank] = statement
        result: list[dict[int, _Statement]] = []
        for members in parted.values():
            first = next(iter(members.values()))
            at = _group_at(first)
            if at is None:
                result.append(members)
                continue
            try:
                split = list(self.groups.split({rank: str(s.args[at]) for rank, s in members.items()}))
            except KeyError as error:
                raise Unsupported(
                    f"group {error}", first.node.name, "no group of that name is known to the rank"
                ) from None
            result.extend({rank: members[rank] for rank in names} for names in split)
        return result

    def _add(self, members: Mapping[int, _Statement]) -> None:
        ranks, statements = list(members), list(members.values())
        first = statements[0]
        at = _group_at(first)
        group = None if at is None else self.groups.number({rank: str(s.args[at]) for rank, s in members.items()})

        def merged(values: list[Any]) -> Any:
            return self._argument(values, ranks, first)

        args = tuple("" if i == at else merged([s.args[i] for s in statements]) for i in range(len(first.args)))
        kwargs = {key: merged([s.kwargs[key] for s in statements]) for key in first.kwargs}
        if group is not None:
            self._group_numbers[len(self.ops)] = group
        everyone = len(ranks) == len(self.ranks)
        op = Op(first.target, args, kwargs, None if everyone else tuple(ranks), first.node.meta.get("place"))
        ref = self._append(op, first.node.name)
        for rank, statement in members.items():
            self.ranks[rank].refs[statement.node] = ref

    def _append(self, op: Op, origin: str) -> Ref:
        self.ops.append(op)
        self.origins.append(origin)
        return Ref(self.num_inputs + len(self.ops) - 1)

    def _argument(self, values: list[Any], ranks: Sequence[int], statement: _Statement) -> Arg:
        first = values[0]
        if isinstance(first, Node):
            return _ref(first, self.ranks[ranks[0]].refs)
        if isinstance(first, (tuple, list)):
            items = [self._argument([v[k] for v in values], ranks, statement) for k in range(len(first))]
            return tuple(items)  # type: ignore[arg-type]
        if isinstance(first, torch.dtype):
            return DTypeArg(str(first)[6:])
        if isinstance(first, torch.memory_format):
            return str(first)[6:]
        if first is None or isinstance(first, (bool, str)):
            return first
        if isinstance(first, float) and not math.isfinite(first):
            return FloatArg("nan" if math.isnan(first) else "inf" if first > 0 else "-inf")
        if type(first) not in (int, float):
            raise Unsupported(
                type(first).__name__,
                statement.node.name,
                f"argument {first!r} of {statement.target} cannot be written in a Program",
            )
        if any(repr(v) != repr(first) for v in values):
            seen = dict(zip(ranks, values, strict=True))
            return PerRank(tuple(seen.get(rank, first) for rank in range(len(self.ranks))))
        number: int | float = first
        return number


def _statements(gm: GraphModule) -> list[_Statement]:
    found = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or (node.op == "call_function" and node.target is operator.getitem):
            continue
        if node.op == "get_attr" and not isinstance(getattr(gm, str(node.target), None), Tensor):
            continue  # no tensor: whatever takes it is outside the table, and says more
        name = target_name(node) if node.op == "call_function" else node.op
        name = _LEGACY.get(name, name)
        if name not in TABLE:
            raise Unsupported(name, node.name)
        args, kwargs = _positional(node)
        layout = kwargs.get("layout")
        if layout not in (None, torch.strided):
            raise Unsupported(str(layout), node.name, "tensors must be strided")
        kept = {k: v for k, v in kwargs.items() if k not in _DROPPED and v is not None}
        found.append(_Statement(name, args, kept, node))
    return found


@lru_cache(maxsize=None)
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    """The parameters of an overload that may be given by position, with their defaults."""
    return tuple((a.name, a.default_value) for a in schema_of(target).arguments if not a.kwarg_only)


def _positional(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, by position where they may be, as the dispatcher records them."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if kwargs:
        parameters = _parameters(node.target)
        last = max((i for i, (name, _) in enumerate(parameters) if name in kwargs), default=-1)
        args += [kwargs.pop(name, default) for name, default in parameters[len(args) : last + 1]]
    return tuple(args), kwargs


def _returned(gm: GraphModule) -> list[Node]:
    output = next(reversed(gm.graph.nodes))
    found: list[Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif value is not None:
            raise Unsupported(type(value).__name__, output.name, f"{value!r} is returned; only tensors and None may be")

    visit(output.args[0])
    return found


def _group_at(statement: _Statement) -> int | None:
    """The position of the group among a collective's arguments; None for another operator."""
    spec = TABLE[statement.target].collective
    return None if spec is None else spec.group


def _shape(arg: Any, refs: Mapping[Node, Ref], group: int | None = None) -> Any:
    """What must be equal on all ranks of one statement: all but finite numbers and the group's name."""
    if isinstance(arg, Node):
        return _ref(arg, refs)
    if group is not None:
        args, kwargs = arg
        return _shape((args[:group], args[group + 1 :], kwargs), refs)
    if isinstance(arg, (tuple, list)):
        return tuple([_shape(a, refs) for a in arg])
    if type(arg) is int or (type(arg) is float and math.isfinite(arg)):
        return type(arg)
    return (type(arg), str(arg))


def _ref(node: Node, refs: Mapping[Node, Ref]) -> Ref:
    if node.op == "call_function" and node.target is operator.getitem:
        source, item = node.args
        if not isinstance(source, Node) or not isinstance(item, int):
            raise Unsupported(
                "getitem", node.name, f"of {source!r} at {item!r}; must select a tensor from an operator's results"
            )
        return Ref(refs[source].value, item)
    if node not in refs:
        raise Unsupported(node.op, node.name, "no tensor of the program")
    return refs[node]


def _is_uneven(group: Group, world_size: int) -> bool:
    return sum(map(len, group.parts)) != world_size or len({len(part) for part in group.parts}) > 1


def _validate(program: Program, origins: Sequence[str]) -> None:
    for path, reason in structural_faults(program):
        raise InvalidProgram(path, reason)
    try:
        if is_uniform(program):
            infer_program(program)
        else:
            for rank in range(program.world_size):
                rank_metas(program, rank)
    except InvalidProgram as error:
        match = _OP_PATH.match(error.path)
        where = f" (node {origins[int(match.group(1))]})" if match else ""
        raise InvalidProgram(error.path, error.reason + where) from None
