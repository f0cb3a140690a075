"""Our functionaliser is eager on drawn programs, its graphs are functional up to their epilogue, and six canonical programs have recorded graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import expecttest
import pytest
import torch
from functorch.compile import aot_function, default_partition, nop
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from harness.check import check
from harness.errors import Unsupported
from harness.ledger import golden_folder, installed_torch
from harness.reference.mutation import Functionalised, _Functionaliser, functionalise
from harness.spec.outcome import Counters
from harness.spec.program import Program
from harness.strategies.mutations import mutation_programs
from harness.subjects.autograd import Model

QUICK = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
GRAPHS = golden_folder() / "graphs" / "mutation"
RECORDED_WITH = "2.13.0"


class AddsInBackward(torch.autograd.Function):
    """Triples ``x``; its backward adds the gradient to ``buffer``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.buffer.add_(grad)
        return grad * 3, None


class AddsInBoth(AddsInBackward):
    """The same, and its forward adds one to ``buffer``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        buffer.add_(1)
        ctx.buffer = buffer
        return x * 3


def in_forward(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    buffer.mul_(2)
    return (x * buffer,)


def in_backward(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    return (AddsInBackward.apply(x, buffer),)


def in_both(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    return (AddsInBoth.apply(x, buffer),)


def through_a_view(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    buffer[1:3].add_(1)
    return (x * buffer,)


def by_set(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        buffer.set_(buffer * 2)
    return (x * buffer,)


def under_no_grad(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    with torch.no_grad():
        x.mul_(3)
    return (y,)


CANONICAL = (in_forward, in_backward, in_both, through_a_view, by_set, under_no_grad)
RECORDS = {
    "in_forward": (Counters(data=1), Counters(data=1), ((1, "forward"),)),
    "in_backward": (Counters(), Counters(data=1), ((1, "backward"),)),
    "in_both": (Counters(data=1), Counters(data=2), ((1, "forward"), (1, "backward"))),
    "through_a_view": (Counters(data=1), Counters(data=1), ((1, "forward"),)),
    "by_set": (Counters(storage=1), Counters(storage=1), ()),
    "under_no_grad": (Counters(), Counters(), ((0, "forward"),)),
}
"""The counters of ``buffer`` after forward and after backward, and the epilogue's copies."""


def inputs() -> tuple[Tensor, Tensor]:
    return torch.arange(4.0).requires_grad_(), torch.ones(4)


def modelled(program: Callable[..., Any]) -> Functionalised:
    return functionalise(program, inputs())


@given(mutation_programs())
@QUICK
def test_model_is_eager(program: Program) -> None:
    """On every drawn program the model keeps every law that AOTAutograd is held to."""
    verdict = check(program, Model())
    assert verdict.status == "PASS" or verdict.reasons[0].kind == "refused", verdict.reasons


@given(mutation_programs(held=False))
@QUICK
def test_joint_graph_is_functional_until_its_epilogue(program: Program) -> None:
    """Nothing in the joint graph writes, but for the copies at its end: one for each half in which an input was mutated."""
    made: list[Functionalised] = []

    def noting(fn: Callable[..., Any], args: Sequence[Tensor]) -> Functionalised:
        made.append(functionalise(fn, args))
        return made[-1]

    with patch("harness.subjects.autograd.functionalise", noting):
        check(program, Model())
    for found in made:
        nodes = [n for n in found.joint.graph.nodes if n.op == "call_function"]
        writes = [n for n in nodes if getattr(getattr(n.target, "_schema", None), "is_mutable", False)]
        assert writes == nodes[len(nodes) - len(writes) :]
        assert all(n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder" for n in writes)
        assert len({(n.args[0], n.meta["partitioner_tag"]) for n in writes}) == len(writes)


@pytest.mark.parametrize("program", CANONICAL, ids=lambda p: p.__name__)
def test_joint_and_split_graphs_compute_what_eager_computes(program: Callable[..., Any]) -> None:
    """Outputs, inputs and gradients are those of eager: from the joint graph run as it stands, and from its halves under autograd."""
    (x, buffer), (other_x, other_buffer) = inputs(), inputs()
    outputs, results = program(x, buffer), modelled(program).run(other_x, other_buffer)
    (grad,), (seen,) = (torch.autograd.grad(of, [leaf], [torch.full((4,), 2.0)]) for of, leaf in ((outputs, x), (results, other_x)))
    for old, new in ((outputs[0], results[0]), (grad, seen), (x, other_x), (buffer, other_buffer)):
        assert torch.equal(old, new)
    memory = [t.detach() for t in inputs()]
    *outs, last = modelled(program).joint(*memory, torch.full((4,), 2.0))
    assert torch.equal(outs[0], outputs[0]) and torch.equal(last, grad) and torch.equal(memory[0], x)
    assert program is by_set or torch.equal(memory[1], buffer)


@pytest.mark.parametrize("program", CANONICAL, ids=lambda p: p.__name__)
def test_counters_and_copies(program: Callable[..., Any]) -> None:
    """Counters advance in the half where the mutation happens, and each advance has its copy there."""
    record = modelled(program).record
    assert (record.after_forward[1], record.after_backward[1], record.copies) == RECORDS[program.__name__]


def test_a_value_that_steers_is_refused() -> None:
    """A program that branches on values has no graph."""
    with pytest.raises(Unsupported, match="_local_scalar_dense"):
        functionalise(lambda x: (x * 2 if x.sum() > 0 else x,), [torch.ones(2)])


def lost_write(mode: Any, tensor: Tensor, node: Node) -> None:
    """A write that changes nothing."""


def uncounted(mode: Any, tensor: Tensor, node: Node) -> None:
    """A write that no counter sees, and that is so not put back."""
    _write(mode, tensor, node)
    mode.storage_of(tensor).data -= 1


def unseen_by_aliases(mode: Any, tensor: Tensor, node: Node) -> None:
    """A write that aliases read before do not see."""
    reads = dict(mode.storage_of(tensor).reads)
    _write(mode, tensor, node)
    mode.storage_of(tensor).reads = reads


_write = _Functionaliser.write


@pytest.mark.parametrize("fault", [lost_write, uncounted, unseen_by_aliases])
def test_a_planted_fault_is_seen(fault: Callable[..., None]) -> None:
    """The comparison with eager fails on a functionaliser that forgets a write, a counter, or an alias."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        view = x[1:]
        first = view * 2
        x.mul_(3)
        return (first, view + 1)

    def differs() -> bool:
        old, new = torch.arange(4.0), torch.arange(4.0)
        expected, seen = program(old), functionalise(program, [new.clone()]).run(new)
        return not all(torch.equal(a, b) for a, b in zip((*expected, old), (*seen, new), strict=True))

    assert not differs()
    with patch.object(_Functionaliser, "write", fault):
        assert differs()


def told(graph: Graph) -> Iterator[str]:
    """A graph, one line a node, copies with their half."""
    for node in graph.nodes:
        args = ", ".join([*(str(a) for a in node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        half = f"  # {node.meta['partitioner_tag']}" if "partitioner_tag" in node.meta and node.target is torch.ops.aten.copy_.default else ""
        yield f"    {node.name}" if node.op == "placeholder" else f"    return {args}" if node.op == "output" else f"    {node.name} = {node.target}({args}){half}"


def installed(program: Callable[..., Any]) -> list[list[str]]:
    """The same graphs, told, by the installed torch's AOTAutograd."""
    found: list[list[str]] = []

    def noting(gm: GraphModule, args: Sequence[Any]) -> Any:
        found.append([*told(gm.graph)])
        return nop(gm, args)

    def partition(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        found.append([*told(gm.graph)])
        return default_partition(gm, *args, **kwargs)

    x, buffer = inputs()
    compiled = aot_function(program, noting, noting, partition, keep_inference_input_mutations=True)
    compiled(x, buffer)[0].sum().backward()
    return found


def side_by_side(program: Callable[..., Any]) -> str:
    made = modelled(program)
    assert made.backward is not None
    lines: list[str] = []
    for name, gm, other in zip(("joint", "forward", "backward"), (made.joint, made.forward, made.backward), installed(program), strict=True):
        lines += [f"{name}, by our model:", *told(gm.graph), f"{name}, by torch {RECORDED_WITH}:", *other, ""]
    return "\n".join(lines)


@pytest.mark.skipif(installed_torch() != RECORDED_WITH, reason=f"recorded with torch {RECORDED_WITH}")
@pytest.mark.parametrize("program", CANONICAL, ids=lambda p: p.__name__)
def test_golden_graphs(program: Callable[..., Any]) -> None:
    """Our graphs and torch's are as recorded; ``EXPECTTEST_ACCEPT=1`` records them anew."""
    path: Path = GRAPHS / f"{program.__name__}.txt"
    text = side_by_side(program)
    if expecttest.ACCEPT:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
