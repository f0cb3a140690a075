"""The model of inlined saved tensor hooks: what is saved between the halves of a partitioned graph, and the halves with pack and unpack in them.

Written after the notes on ``saved_tensors_hooks_filtering_mode`` in ``torch/_functorch/config.py`` and the comments of
``maybe_inline_graph_saved_tensors_hooks`` in torch 2.13.0:

- The innermost pair of hooks is applied, once to each saved tensor that the mode selects: ``all``; ``no_static``: but for parameters, buffers
  and other static inputs; ``donated``: those whose memory no input, output or gradient shares.
- Pack runs at the end of forward and unpack at the beginning of backward. The tensors and symbolic sizes of the packed value are saved in place
  of the tensor; its other parts are constants of backward.
- Forward returns its outputs, the saved tensors in their order, the packed sizes, then the sizes that were saved anyway. Backward takes all
  sizes in this order, the tensors, then the gradients.
- A constant tensor that pack or unpack captured is a constant of the half that it is used in.
- Backward's writes to a hooked tensor go to what unpack gave, as eager's do. A graph does not tell what a function kept as an attribute of its
  ``ctx``, which eager does not hook: with such functions the model is not eager.
- Hooks that are plain functions are not inlined: autograd calls them while the compiled function saves its tensors, whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

__all__ = ["Halves", "Saved", "copied", "inlined", "results", "saved_nodes", "saved_tensors"]


class Halves(NamedTuple):
    """A partitioned graph.

    Attributes:
        forward, backward: the halves; the tensors and sizes that forward saves have the names of backward's inputs.
        num_outputs: how many of forward's results are not saved.
        static: the numbers of forward's inputs that stay the same from call to call.
    """

    forward: GraphModule
    backward: GraphModule
    num_outputs: int
    static: tuple[int, ...] = ()


class Saved(NamedTuple):
    """A tensor saved for backward.

    Attributes:
        node: in forward.
        is_hooked: whether pack and unpack are applied to it.
        packed: the leaves of the packed value, or the tensor itself; fake tensors, sizes and constants.
        spec: how they make up the packed value.
    """

    node: Node
    is_hooked: bool
    packed: list[Any]
    spec: Any


def saved_tensors(halves: Halves, mode: str, pack: Callable[[Tensor], Any]) -> list[Saved]:
    """The tensors that ``halves`` saves, in their order, and what pack makes of them in this mode.

    Raises:
        Exception: whatever pack raises.
    """
    found = []
    for node in saved_nodes(halves):
        is_hooked = _selects(halves, mode, node)
        value = node.meta["val"]
        with patch.object(value.fake_mode, "allow_non_fake_inputs", True):
            packed, spec = pytree.tree_flatten(pack(value) if is_hooked else value)
        found.append(Saved(node, is_hooked, packed, spec))
    return found


def saved_nodes(halves: Halves) -> list[Node]:
    """The tensors that forward saves, in their order."""
    return [n for n in results(halves.forward)[halves.num_outputs :] if isinstance(n, Node) and isinstance(n.meta["val"], Tensor)]


def _selects(halves: Halves, mode: str, node: Node) -> bool:
    if mode == "all":
        return True
    inputs = halves.forward.graph.find_nodes(op="placeholder")
    if mode == "no_static":
        return node not in [inputs[i] for i in halves.static]
    visible = [*inputs, *results(halves.forward)[: halves.num_outputs], *results(halves.backward)]
    return not _resizes(halves) and _storage(node) not in {_storage(n) for n in visible if isinstance(n, Node)}


def _resizes(halves: Halves) -> bool:
    """Whether a tensor is given other memory, so that nobody can tell who shares it."""
    return any(n.target is torch.ops.aten.set_.source_Tensor for half in halves[:2] for n in half.graph.nodes)


def results(gm: GraphModule) -> Sequence[Any]:
    """What a half returns."""
    return gm.graph.output_node().args[0]  # type: ignore[return-value]


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def inlined(halves: Halves, saved: Sequence[Saved], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Halves:
    """The halves with pack and unpack in them, each one call a hooked tensor; ``halves`` stays as it is."""
    forward, in_forward = _copied(halves.forward)
    backward, in_backward = _copied(halves.backward)
    inputs = {n.name: in_backward[n] for n in halves.backward.graph.find_nodes(op="placeholder")}
    tensors: list[Node] = []
    sizes: list[Node] = []
    tensor_inputs: list[Node] = []
    size_inputs: list[Node] = []
    first_call = next(n for n in backward.nodes if n.op != "placeholder")
    for one in saved:
        node, taken = in_forward[one.node], inputs[one.node.name]
        if not one.is_hooked:
            tensors.append(node)
            tensor_inputs.append(taken)
            continue
        with forward.inserting_before(forward.output_node()):
            value = forward.call_function(_packed(pack), (node,))
            leaves = [_with_val(forward.call_function(_leaf, (value, i)), x) if _is_saved(x) else x for i, x in enumerate(one.packed)]
        with backward.inserting_before(taken):
            given = [_with_val(backward.placeholder(f"{one.node.name}_packed_{i}"), x) if _is_saved(x) else x for i, x in enumerate(one.packed)]
        with backward.inserting_before(first_call):
            unpacked = backward.call_function(_unpacked(unpack, one.spec), tuple(given))
        unpacked.meta["val"] = one.node.meta["val"]
        taken.replace_all_uses_with(unpacked)
        backward.erase_node(taken)
        for leaf, placeholder, packed in zip(leaves, given, one.packed, strict=True):
            if _is_saved(packed):
                (tensors if isinstance(packed, Tensor) else sizes).append(leaf)
                (tensor_inputs if isinstance(packed, Tensor) else size_inputs).append(placeholder)
    outputs = [in_forward[n] if isinstance(n, Node) else n for n in results(halves.forward)[: halves.num_outputs]]
    tensors_before = {one.node for one in saved}
    others = [in_forward[n] for n in results(halves.forward)[halves.num_outputs :] if n not in tensors_before]
    forward.output_node().args = (tuple([*outputs, *tensors, *sizes, *others]),)
    _put_first(backward, [*size_inputs, *(inputs[n.name] for n in others), *tensor_inputs])
    return Halves(_module(halves.forward, forward), _module(halves.backward, backward), halves.num_outputs, halves.static)


def copied(halves: Halves) -> Halves:
    """A copy, of which changes to ``halves`` leave nothing."""
    return halves._replace(forward=_module(halves.forward, _copied(halves.forward)[0]), backward=_module(halves.backward, _copied(halves.backward)[0]))


def _copied(gm: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    graph, copies = Graph(), dict[Node, Node]()
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    return graph, copies


def _module(root: GraphModule, graph: Graph) -> GraphModule:
    graph.lint()
    return GraphModule(root, graph)


def _with_val(node: Node, value: Any) -> Node:
    node.meta["val"] = value
    return node


def _is_saved(leaf: Any) -> bool:
    """Whether a leaf of a packed value is saved; others are constants."""
    return isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _leaf(value: Any, number: int) -> Any:
    return pytree.tree_leaves(value)[number]


def _packed(pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def call(tensor: Tensor) -> Any:
        return pack(tensor)

    return call


def _unpacked(unpack: Callable[[Any], Tensor], spec: Any) -> Callable[..., Tensor]:
    def call(*leaves: Any) -> Tensor:
        return unpack(pytree.tree_unflatten(list(leaves), spec))

    return call


def _put_first(graph: Graph, nodes: Sequence[Node]) -> None:
    for node in reversed(nodes):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
