"""Seeded faults in graphs of collectives. Each is a pass that makes one error where it can, and changes nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from harness.graph import collectives, emit, emit_item, target_name, waits

__all__ = ["FAULTS", "Fault"]


class Fault(NamedTuple):
    """One seeded error.

    Attributes:
        function: the pass that makes it.
        laws: the laws of which at least one must break, and that may break.
    """

    function: Callable[[GraphModule], None]
    laws: frozenset[str]


def swap_outputs(gm: GraphModule) -> None:
    """Return the first two outputs in the other order."""
    output = _output(gm)
    values = list(output.args[0])  # type: ignore[arg-type]
    if len(values) > 1:
        values[0], values[1] = values[1], values[0]
        output.args = (tuple(values),)


def drop_wait(gm: GraphModule) -> None:
    """Use a collective's result without waiting for it."""
    for start in collectives(gm.graph):
        for wait in waits(start):
            if wait.users:
                wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
                gm.graph.erase_node(wait)
                return


def wait_late(gm: GraphModule) -> None:
    """Let the first reader of a collective's result run before the wait."""
    for start in collectives(gm.graph):
        for wait in waits(start):
            readers = [user for user in wait.users if user.op == "call_function" and target_name(user) != "getitem"]
            if readers:
                readers[0].replace_input_with(wait, wait.args[0])  # type: ignore[arg-type]
                wait.prepend(readers[0])
                return


def lose_collective(gm: GraphModule) -> None:
    """Take an all_reduce's input for its result."""
    for start in collectives(gm.graph):
        if target_name(start) == "_c10d_functional.all_reduce.default" and waits(start):
            with gm.graph.inserting_before(start):
                clone = emit(gm.graph, "aten.clone.default", (start.args[0],))
            for wait in waits(start):
                wait.replace_all_uses_with(clone)
                gm.graph.erase_node(wait)
            start.replace_all_uses_with(clone)
            gm.graph.erase_node(start)
            return


def duplicate_collective(gm: GraphModule) -> None:
    """Issue a collective twice."""
    for start in collectives(gm.graph):
        if "out" not in start.kwargs and waits(start):
            with gm.graph.inserting_before(start):
                again = emit(gm.graph, start.target, start.args)
                if isinstance(start.meta.get("val"), torch.Tensor):
                    emit(gm.graph, "_c10d_functional.wait_tensor.default", (again,))
            return


def change_reduce_op(gm: GraphModule) -> None:
    """Reduce by another operation."""
    for start in collectives(gm.graph):
        if target_name(start) in ("_c10d_functional.all_reduce.default", "_c10d_functional.reduce_scatter_tensor.default"):
            start.update_arg(1, "max" if start.args[1] != "max" else "sum")
            return


def round_trip(gm: GraphModule) -> None:
    """Round a float32 output to bfloat16 on the way."""
    for i, value in _outputs(gm):
        if value.meta["val"].dtype is torch.float32:
            narrow = emit(gm.graph, "prims.convert_element_type.default", (value, torch.bfloat16))
            _replace_output(gm, i, emit(gm.graph, "prims.convert_element_type.default", (narrow, torch.float32)))
            return


def leave_unwritten(gm: GraphModule) -> None:
    """Return memory that nobody wrote."""
    for i, value in _outputs(gm):
        if value.meta["val"].numel():
            _replace_output(gm, i, emit(gm.graph, "aten.empty_like.default", (value,)))
            return


def share_storage(gm: GraphModule) -> None:
    """Return two outputs as views of one buffer."""
    found = [(i, v) for i, v in _outputs(gm) if v.meta["val"].numel() and v.meta["val"].is_contiguous()]
    for (i, a), (j, b) in zip(found, found[1:], strict=False):
        if a is not b and a.meta["val"].dtype is b.meta["val"].dtype:
            sizes = [a.meta["val"].numel(), b.meta["val"].numel()]
            flats = [emit(gm.graph, "aten.reshape.default", (v, [-1])) for v in (a, b)]
            buffer = emit(gm.graph, "aten.cat.default", (flats,))
            split = emit(gm.graph, "aten.split_with_sizes.default", (buffer, sizes))
            for k, (number, value) in enumerate(((i, a), (j, b))):
                item = emit_item(gm.graph, split, k)
                _replace_output(gm, number, emit(gm.graph, "aten.view.default", (item, list(value.meta["val"].shape))))
            return


def lie_in_metadata(gm: GraphModule) -> None:
    """Record another shape than what executes."""
    for start in collectives(gm.graph):
        val = start.meta.get("val")
        if isinstance(val, torch.Tensor):
            start.meta["val"] = val.new_empty((*val.shape, 2))
            return


def part_ways(gm: GraphModule) -> None:
    """On odd ranks only, issue two independent collectives in the other order."""
    if dist.get_rank() % 2:
        swap_collectives(gm)


def swap_collectives(gm: GraphModule) -> None:
    """Issue two neighbouring, independent collectives of one kind in the other order."""
    starts = collectives(gm.graph)
    for first, second in zip(starts, starts[1:], strict=False):
        sizes = [_size(n) for n in (first, second)]
        if first.target is second.target and sizes[0] != sizes[1] and all(sizes) and _can_precede(second, first):
            first.prepend(second)
            return


def write_input(gm: GraphModule) -> None:
    """Zero a graph input."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.meta["val"].numel() and node.meta["val"].dtype.is_floating_point:
            with gm.graph.inserting_before(_output(gm)):
                emit(gm.graph, "aten.zero_.default", (node,))
            return


def use_before_definition(gm: GraphModule) -> None:
    """Put a collective behind its wait."""
    for start in collectives(gm.graph):
        for wait in waits(start):
            if wait.args[0] is start:
                wait.append(start)
                return


def transpose_layout(gm: GraphModule) -> None:
    """Return a matrix with the right values in column-major order."""
    for i, value in _outputs(gm):
        val = value.meta["val"]
        if val.dim() == 2 and min(val.shape) > 1 and val.is_contiguous():
            turned = emit(gm.graph, "aten.t.default", (value,))
            stored = emit(gm.graph, "aten.clone.default", (turned,), {"memory_format": torch.contiguous_format})
            _replace_output(gm, i, emit(gm.graph, "aten.t.default", (stored,)))
            return


def scale_first(gm: GraphModule) -> None:
    """Multiply by 3 before a sum and divide by 3 after it: the same real function with other roundings."""
    for start in collectives(gm.graph):
        val = start.meta["val"]
        if target_name(start) == "_c10d_functional.all_reduce.default" and start.args[1] == "sum" and val.dtype is torch.float32:
            for wait in waits(start):
                with gm.graph.inserting_before(start):
                    scaled = emit(gm.graph, "aten.mul.Tensor", (start.args[0], 3.0))
                start.update_arg(0, scaled)
                with gm.graph.inserting_after(wait):
                    back = emit(gm.graph, "aten.div.Tensor", (wait, 3.0))
                wait.replace_all_uses_with(back)
                back.update_arg(0, wait)
                return


def copy_alias(gm: GraphModule) -> None:
    """Return a copy where the program returns an input itself."""
    for i, value in _outputs(gm):
        if value.op == "placeholder" and value.meta["val"].numel():
            _replace_output(gm, i, emit(gm.graph, "aten.clone.default", (value,)))
            return


def give_up(gm: GraphModule) -> None:
    """Raise where two collectives have inputs of different dtypes."""
    dtypes = {n.meta["val"].dtype for n in collectives(gm.graph) if isinstance(n.meta.get("val"), torch.Tensor)}
    if len(dtypes) > 1:
        raise AssertionError("mixed dtypes")


def _size(node: Node) -> int:
    value = node.args[0]
    return value.meta["val"].numel() if isinstance(value, Node) else 0


def _can_precede(node: Node, other: Node) -> bool:
    """Whether all inputs of ``node`` stand before ``other``, with only views and nothing in place between."""
    between = other
    while between is not node:
        if between in node.all_input_nodes or (between.op == "call_function" and target_name(between).split(".")[1].endswith("_")):
            return False
        between = between.next
    return True


def _output(gm: GraphModule) -> Node:
    return next(reversed(gm.graph.nodes))


def _outputs(gm: GraphModule) -> list[tuple[int, Node]]:
    return [(i, v) for i, v in enumerate(_output(gm).args[0]) if isinstance(v, Node)]  # type: ignore[arg-type]


def _replace_output(gm: GraphModule, number: int, value: Node) -> None:
    output = _output(gm)
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    values[number] = value
    output.args = (tuple(values),)


def _before_output(function: Callable[[GraphModule], None]) -> Callable[[GraphModule], None]:
    """Nodes that ``function`` makes without saying where go before the output."""

    def run(gm: GraphModule) -> None:
        with gm.graph.inserting_before(_output(gm)):
            function(gm)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def _fault(function: Callable[[GraphModule], None], *laws: str) -> Fault:
    return Fault(_before_output(function), frozenset(laws))


FAULTS: Final[Mapping[str, Fault]] = {
    "swap_outputs": _fault(swap_outputs, "equal_outputs", "equal_metadata", "same_aliasing"),
    "drop_wait": _fault(drop_wait, "in_flight", "metadata_true"),
    "wait_late": _fault(wait_late, "in_flight", "equal_outputs"),
    "lose_collective": _fault(lose_collective, "equal_outputs", "collectives_conserved"),
    "duplicate_collective": _fault(duplicate_collective, "collectives_conserved"),
    "change_reduce_op": _fault(change_reduce_op, "equal_outputs", "collectives_conserved"),
    "round_trip": _fault(round_trip, "equal_outputs", "same_aliasing"),
    "leave_unwritten": _fault(leave_unwritten, "equal_outputs", "same_aliasing"),
    "share_storage": _fault(share_storage, "own_storage", "same_aliasing"),
    "lie_in_metadata": _fault(lie_in_metadata, "metadata_true"),
    "part_ways": _fault(part_ways, "ranks_agree", "runs", "order_kept"),
    "swap_collectives": _fault(swap_collectives, "order_kept"),
    "write_input": _fault(write_input, "equal_inputs", "equal_outputs"),
    "use_before_definition": _fault(use_before_definition, "graph_valid", "runs"),
    "transpose_layout": _fault(transpose_layout, "equal_strides", "same_aliasing"),
    "scale_first": _fault(scale_first, "equal_outputs"),
    "copy_alias": _fault(copy_alias, "same_aliasing"),
    "give_up": _fault(give_up, "applies"),
}
