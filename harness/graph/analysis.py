"""Questions about ``fx`` graphs of functional collectives: names, metadata, start and wait pairs, ancestors."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from harness.errors import Unsupported
from harness.graph.private import private
from harness.ops import REGISTERED_BY, TABLE
from harness.spec.meta import TensorMeta

__all__ = [
    "Ancestors",
    "collectives",
    "is_collective",
    "is_wait",
    "name_of",
    "resolve",
    "schema_of",
    "start_of",
    "storage_key",
    "target_name",
    "tensor_meta",
    "waits",
]

WAIT = "_c10d_functional.wait_tensor.default"


@lru_cache(maxsize=None)
def resolve(target: str) -> Any:
    """The ``OpOverload`` of a full name such as ``aten.add.Tensor``.

    Raises:
        Unsupported: the installed torch has no such operator.
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    if not (namespace and name and overload):
        raise Unsupported(target, None, "no overload's full name; must be as aten.add.Tensor")
    try:
        if namespace in REGISTERED_BY:
            importlib.import_module(REGISTERED_BY[namespace])
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, ImportError) as error:
        raise Unsupported(target, None, f"torch {torch.__version__} has no such operator ({error})") from None
    if not isinstance(found, private("torch._ops", "OpOverload")):
        raise Unsupported(target, None, f"torch {torch.__version__} has something else by that name: {found!r}")
    return found


@lru_cache(maxsize=None)
def name_of(target: Any) -> str:
    """The name of a call's target: ``aten.add.Tensor`` of an overload, ``getitem``, else the function's own."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, private("torch._ops", "OpOverload")):
        schema = schema_of(target)
        namespace, name = schema.name.split("::")
        return f"{namespace}.{name}.{schema.overload_name or 'default'}"
    return str(getattr(target, "__name__", target))


def schema_of(overload: Any) -> Any:
    """The schema of an overload: its ``name``, ``overload_name``, ``arguments`` and ``returns``.

    Raises:
        Unsupported: ``overload`` has none, or the installed torch keeps it elsewhere.
    """
    try:
        return overload._schema
    except AttributeError:
        raise Unsupported(str(overload), None, f"torch {torch.__version__} gives no schema of it") from None


_NAMED: Final[dict[int, tuple[Any, str]]] = {}
"""By the identity of a target, which it keeps alive, its name: an overload's own hash is slow."""


def target_name(node: Node) -> str:
    """``aten.add.Tensor`` for a call of that overload, ``getitem`` for ``operator.getitem``, else the target's name."""
    target = node.target
    if isinstance(target, str):
        return target
    found = _NAMED.get(id(target))
    if found is None:
        found = _NAMED[id(target)] = (target, name_of(target))
    return found[1]


def node_place(node: Node) -> str:
    """A node's name, and where it is known the line of the source that it was traced from: ``wait_tensor_1, case.py:11``."""
    place = node.meta.get("place")
    return node.name if place is None else f"{node.name}, {place}"


def tensor_meta(value: Tensor) -> TensorMeta:
    """The metadata of a tensor; ``storage`` is an identity that holds while the tensor lives."""
    return TensorMeta(
        tuple(value.shape), tuple(value.stride()), str(value.dtype)[6:], int(value.storage_offset()), storage_key(value)
    )


def storage_key(value: Tensor) -> int:
    """An identity of the tensor's storage that holds while the tensor lives; tensors that share memory have the same.

    Raises:
        Unsupported: the installed torch gives none.
    """
    try:
        return int(value.untyped_storage()._cdata)
    except AttributeError as error:
        raise Unsupported(
            "the identity of a storage", None, f"torch {torch.__version__} gives none ({error})"
        ) from None


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective of the table."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    spec = TABLE.get(target_name(node))
    return spec is not None and spec.collective is not None


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective."""
    return node.op == "call_function" and target_name(node) == WAIT


def collectives(graph: Graph) -> list[Node]:
    """The nodes that start collectives, in the graph's order."""
    return [node for node in graph.nodes if is_collective(node)]


def waits(start: Node) -> list[Node]:
    """The waits on a collective's result, directly or through the items of a coalesced one, in order of use.

    A wait on a view of the result is not among them, though ``start_of`` finds its start.
    """
    found: list[Node] = []
    for user in start.users:
        if is_wait(user):
            found.append(user)
        elif user.target is operator.getitem:
            found.extend(item_user for item_user in user.users if is_wait(item_user))
    return found


def start_of(wait: Node) -> Node | None:
    """The collective whose result ``wait`` waits for, through ``getitem`` and views; None where it is none."""
    node = wait.args[0]
    while isinstance(node, Node) and node.op == "call_function":
        if is_collective(node):
            return node
        spec = TABLE.get(target_name(node))
        if node.target is not operator.getitem and (spec is None or spec.kind != "view"):
            return None
        node = node.args[0]
    return None


class Ancestors:
    """Answers whether one node depends on another, for a graph that does not change meanwhile.

    Only ``of`` nodes are tracked: every node has a bit set of the tracked nodes that it depends on, so that building
    takes time linear in nodes and edges, times the number of tracked nodes over the machine's word.
    """

    def __init__(self, graph: Graph, of: Iterable[Node] | None = None) -> None:
        tracked = list(graph.nodes) if of is None else list(of)
        self._bit = {node: 1 << i for i, node in enumerate(tracked)}
        self._above: dict[Node, int] = {}
        for node in graph.nodes:
            above = 0
            for source in node.all_input_nodes:
                above |= self._above[source] | self._bit.get(source, 0)
            self._above[node] = above

    def reaches(self, source: Node, target: Node) -> bool:
        """Whether ``target`` depends on ``source``, directly or not; a node does not depend on itself.

        Raises:
            KeyError: ``source`` is not tracked, or either is no node of the graph as it was.
        """
        return bool(self._above[target] & self._bit[source])
