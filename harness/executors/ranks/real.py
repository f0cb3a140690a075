"""One graph on one real rank: operators as torch runs them, collectives over the process group, and what was seen of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from harness.errors import Unsupported
from harness.executors.field_rules import dtype_name
from harness.executors.plan import QUICK, positional
from harness.executors.record import record
from harness.graph import node_place, resolve, start_of, target_name
from harness.graph.analysis import WAIT
from harness.ops import TABLE, CollectiveSpec
from harness.spec.outcome import CollectiveRecord, ErrorRecord, RankOutcome

__all__ = ["RealGraph", "bare_loop"]


class _Step(NamedTuple):
    node: Node
    fn: Callable[..., Any]
    collective: CollectiveSpec | None
    is_wait: bool
    waits_for: str | None


class RealGraph:
    """A graph made ready to run on this process's rank; what a pass later does to the graph changes nothing here.

    Args:
        gm: straight-line tensor code.
        views_may_copy: run ``aten.view`` as ``aten.reshape``, which is how Inductor lowers it.
        device: where what the graph makes lies.

    Raises:
        Unsupported: the graph has nodes that are no calls.
    """

    def __init__(self, gm: GraphModule, *, views_may_copy: bool = False, device: str = "cpu") -> None:
        self.placeholders: list[Node] = []
        self.steps: list[_Step] = []
        self.outputs: tuple[Any, ...] = ()
        arguments: list[tuple[Any, Any]] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.placeholders.append(node)
            elif node.op == "output":
                values = node.args[0]
                self.outputs = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            elif node.op == "call_function":
                self.steps.append(_step(node, views_may_copy))
                args, kwargs = positional(node) if hasattr(node.target, "_schema") else (node.args, dict(node.kwargs))
                if "device" in kwargs:
                    kwargs["device"] = torch.device(device)
                arguments.append((args, kwargs))
            else:
                raise Unsupported(node.op, node.name, f"{node.op} nodes are not straight-line tensor code")
        self.arguments = arguments

    def run(self, inputs: Sequence[Tensor], at: Callable[[str], None], *, keep: bool = False) -> RankOutcome:
        """Run it once; ``inputs`` are written to where the graph does.

        All collectives that were started are waited for, also after an error, so that the next case finds none under way.

        Args:
            inputs: this rank's.
            at: told the name of each collective and wait before it runs.
            keep: put the tensors' bytes into the outcome.

        Returns:
            What was seen.
        """
        values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        versions = [t._version for t in inputs]
        issued: list[CollectiveRecord] = []
        started: dict[str, list[Tensor]] = {}
        error: ErrorRecord | None = None
        at("begin")
        with torch.no_grad():
            for step, (args, kwargs) in zip(self.steps, self.arguments, strict=True):
                node = step.node
                try:
                    bound = map_arg(args, values.__getitem__)
                    named = map_arg(kwargs, values.__getitem__) if kwargs else kwargs
                    if step.collective is not None:
                        at(node_place(node))
                        issued.append(_issued(node.name, step.collective, bound))
                    elif step.is_wait:
                        at(node_place(node))
                    result = step.fn(*bound, **named)
                    if step.collective is not None:
                        started[node.name] = list(result) if isinstance(result, (list, tuple)) else [result]
                    elif step.waits_for is not None:
                        started.pop(step.waits_for, None)
                    values[node] = result
                except Exception as raised:
                    error = ErrorRecord(type(raised).__name__, str(raised), node.name)
                    break
            unsettled = _settle(started, at)
            error = error or unsettled
        outputs = [] if error else [values[v] for v in self.outputs if isinstance(v, Node)]
        seen_inputs, seen_outputs = record(inputs, outputs, versions, keep=keep)
        return RankOutcome(outputs=seen_outputs, inputs=seen_inputs, collectives=tuple(issued), error=error)


def bare_loop(graph: RealGraph, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """The graph's collectives and waits alone, on the operands that they have in one run; that run is made first.

    What it costs is what the backend costs.
    """
    values: dict[Node, Any] = dict(zip(graph.placeholders, inputs, strict=True))
    calls: list[tuple[_Step, Any, Any]] = []
    for step, (args, kwargs) in zip(graph.steps, graph.arguments, strict=True):
        bound, named = map_arg(args, values.__getitem__), map_arg(kwargs, values.__getitem__)
        values[step.node] = step.fn(*bound, **named)
        if step.collective is not None or step.is_wait:
            calls.append((step, bound, named))

    def loop() -> None:
        started: dict[Node, Any] = {}
        for step, bound, named in calls:
            if step.collective is not None:
                started[step.node] = step.fn(*bound, **named)
                continue
            source = step.node.args[0]
            start = started.get(start_of(step.node))  # type: ignore[arg-type]
            if start is not None:
                step.fn(start[source.args[1]] if isinstance(start, (list, tuple)) else start)  # type: ignore[union-attr, index]

    return loop


def _settle(started: Mapping[str, list[Tensor]], at: Callable[[str], None]) -> ErrorRecord | None:
    """Wait for the collectives that nobody waited for, and for coalesced ones."""
    error = None
    wait = resolve(WAIT)
    for name, tensors in started.items():
        at(f"the end, where {name} is waited for")
        for tensor in tensors:
            try:
                wait(tensor)
            except Exception as raised:
                error = error or ErrorRecord(type(raised).__name__, str(raised), name)
    return error


def _step(node: Node, views_may_copy: bool) -> _Step:
    if node.target is operator.getitem:
        return _Step(node, operator.getitem, None, False, None)
    target = target_name(node)
    spec = TABLE.get(target)
    own: Any = node.target
    fn = QUICK.get(target) or getattr(own, "_op", own)
    if views_may_copy and target in ("aten.view.default", "aten._unsafe_view.default"):
        fn = torch.reshape
    start = start_of(node) if target == WAIT else None
    is_single = start is not None and isinstance(start.args[0], Node)
    return _Step(node, fn, None if spec is None else spec.collective, target == WAIT, start.name if start is not None and is_single else None)


def _issued(name: str, spec: CollectiveSpec, args: Sequence[Any]) -> CollectiveRecord:
    tensors = args[0] if spec.coalesced else [args[0]]
    return CollectiveRecord(
        spec.kind,
        args[spec.group],
        None if spec.reduce_op is None else args[spec.reduce_op],
        tuple(dtype_name(t.dtype) for t in tensors),
        sum(t.numel() * t.element_size() for t in tensors),
        name,
    )
