"""From a Python function of tensors, with functional collectives, to a Program: traced once a rank, in fake worlds."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from harness.errors import Unsupported
from harness.graph.align import align
from harness.graph.analysis import target_name
from harness.graph.fake_world import fake_world, group_ranks
from harness.graph.private import private
from harness.graph.read import program_from_graphs
from harness.graph.specs import require_strided
from harness.ops import TABLE
from harness.spec.program import Program

__all__ = ["trace"]

_LIFTS = frozenset({"aten.lift_fresh_copy.default", "aten.lift_fresh.default"})
_PLACE = "harness.place"
_DETACHES = frozenset({"aten.detach.default", "aten.alias.default"})


def trace(function: Callable[..., Any], inputs: Callable[[int, int], Sequence[Tensor]], world_size: int, *, with_places: bool = False) -> Program:
    """The Program of a Python function, traced once a rank in a fake world of that rank.

    The graph is what the function says in aten, in-place operators as they are; the function may ask
    ``torch.distributed`` for ranks and groups, and make groups and meshes (``DeviceMesh`` of a list of ranks). Tensors
    that it makes from Python values, or finds outside itself, become inputs after its own.

    Args:
        function: takes tensors, returns tensors, None, or tuples, lists or dicts of them.
        inputs: gives the tensors of ``(rank, world_size)``; their values become the Program's data.
        world_size: the number of ranks.
        with_places: give each op the line of ``function``'s file that it comes from, see ``Op.place``.

    Raises:
        Unsupported: an operator that is not in the table, with its node; inputs that are no plain strided tensors or
            differ between ranks in more than values; the installed torch cannot trace so.
        InvalidProgram: an operator's precondition is broken.
        Exception: whatever ``function`` and ``inputs`` raise.
    """
    graphs: list[GraphModule] = []
    values: list[list[Tensor]] = []
    constants: list[dict[str, Tensor]] = []
    groups: dict[tuple[int, str], tuple[int, ...]] = {}
    for rank in range(world_size):
        with fake_world(world_size, rank):
            given = list(inputs(rank, world_size))
            _require_plain(given, rank)
            gm = _traced(_placing(function) if with_places else function, given)
            for name in _group_names(gm):
                ranks = group_ranks(name)
                if ranks is not None:
                    groups[rank, name] = ranks
        _drop_dead_detaches(gm)
        graphs.append(gm)
        values.append(given)
        constants.append(_constants(gm))
    for given, lifted in zip(values, _lift(graphs, constants), strict=True):
        given.extend(lifted)
    return program_from_graphs(graphs, values, lambda rank, name: groups[rank, name])


def _require_plain(values: Sequence[Any], rank: int) -> None:
    for i, value in enumerate(values):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise Unsupported(type(value).__name__, f"input {i} of rank {rank}", "inputs must be plain tensors")
    require_strided(values)


def _traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    make_fx = private("torch.fx.experimental.proxy_tensor", "make_fx")
    options: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    missing = options.keys() - inspect.signature(make_fx).parameters.keys()
    if missing:
        raise Unsupported("make_fx", None, f"that of torch {torch.__version__} has no {', '.join(sorted(missing))}")
    annotations = private("torch.fx.traceback", "preserve_node_meta")
    unknown = private("torch.fx.experimental.symbolic_shapes", "GuardOnDataDependentSymNode")
    try:
        with _untraced_meshes(), annotations():
            gm: GraphModule = make_fx(function, **options)(*inputs)
    except unknown as error:
        reason = "tracing knows no values; what init_device_mesh makes must be made before, by inputs"
        raise Unsupported("a number read from a tensor", None, f"{str(error).splitlines()[0]} ({reason})") from error
    for node in gm.graph.nodes:
        if place := node.meta.get("custom", {}).get(_PLACE):
            node.meta["place"] = place
    return gm


def _placing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose every operator is annotated with the line of ``function``'s own file that called it, or that called what called it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    file, annotate = code.co_filename, private("torch.fx.traceback", "annotate")

    class Lines(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != file:
                frame = frame.f_back
            if frame is None:
                return func(*args, **(kwargs or {}))
            with annotate({_PLACE: f"{os.path.basename(file)}:{frame.f_lineno}"}):
                return func(*args, **(kwargs or {}))

    @wraps(function)
    def placing(*args: Any) -> Any:
        with Lines():
            return function(*args)

    return placing


@contextmanager
def _untraced_meshes() -> Iterator[None]:
    """Inside, a DeviceMesh is made as outside of tracing: its own tensors hold ranks, not the program's values.

    Not so one of ``init_device_mesh``, which makes a tensor of ranks before the mesh.
    """
    disabled = private("torch.utils._python_dispatch", "_disable_current_modes")
    mesh_class = private("torch.distributed.device_mesh", "DeviceMesh")
    make = mesh_class.__init__

    @wraps(make)
    def untraced(*args: Any, **kwargs: Any) -> None:
        with disabled():
            make(*args, **kwargs)

    mesh_class.__init__ = untraced
    try:
        yield
    finally:
        mesh_class.__init__ = make


def _group_names(gm: GraphModule) -> list[str]:
    names: dict[str, None] = {}
    for node in gm.graph.nodes:
        spec = TABLE.get(target_name(node)) if node.op == "call_function" else None
        if spec is not None and spec.collective is not None and spec.collective.group < len(node.args):
            names[str(node.args[spec.collective.group])] = None
    return list(names)


def _drop_dead_detaches(gm: GraphModule) -> None:
    """Take out the unused detaches that tracing adds where autograd saves a tensor."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and target_name(node) in _DETACHES:
            gm.graph.erase_node(node)


def _constants(gm: GraphModule) -> dict[str, Tensor]:
    """The tensors that the graph holds as attributes, in order of use."""
    found: dict[str, Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, str(node.target), None)
            if isinstance(value, Tensor):
                found[str(node.target)] = value.detach()
    return found


def _lift(graphs: Sequence[GraphModule], constants: Sequence[dict[str, Tensor]]) -> list[list[Tensor]]:
    """Make placeholders of constants, the same number on all ranks; a rank that lacks one has an unused placeholder for
    it.

    Returns:
        The values of each rank's new placeholders.
    """
    names = [list(mine) for mine in constants]
    looks = [[(tuple(v.shape), v.dtype) for v in mine.values()] for mine in constants]
    lifted: list[list[Tensor]] = [[] for _ in graphs]
    for number, row in enumerate(align(looks)):
        present = min(row)
        like = constants[present][names[present][row[present]]]
        for rank, gm in enumerate(graphs):
            placeholder = _append_placeholder(gm, f"constant_{number}")
            if rank in row:
                name = names[rank][row[rank]]
                _replace_attribute(gm, name, placeholder)
                lifted[rank].append(constants[rank][name])
            else:
                lifted[rank].append(torch.zeros_like(like))
    return lifted


def _append_placeholder(gm: GraphModule, name: str) -> Node:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(placeholders[-1]) if placeholders else gm.graph.inserting_before(first):
        return gm.graph.placeholder(name)


def _replace_attribute(gm: GraphModule, name: str, placeholder: Node) -> None:
    """Put the placeholder in the place of an attribute; a copy of it that is only read is the placeholder itself."""
    for node in list(gm.graph.nodes):
        if node.op == "get_attr" and node.target == name:
            node.replace_all_uses_with(placeholder)
            gm.graph.erase_node(node)
    for node in list(placeholder.users):
        if target_name(node) not in _LIFTS:
            continue
        if all(_only_reads(user) for user in node.users):
            node.replace_all_uses_with(placeholder)
            gm.graph.erase_node(node)
        else:
            node.target = torch.ops.aten.clone.default


def _only_reads(user: Node) -> bool:
    """Whether ``user`` neither writes, nor returns, nor hands on the memory of its operands."""
    spec = TABLE.get(target_name(user)) if user.op == "call_function" else None
    return spec is not None and not spec.writes and spec.kind not in ("view", "wait", "collective")
