"""One case with a backward, run eagerly or compiled: the same source, inputs and gradients on both sides, looked at after every stage.

A case is Python text: that of a Program (``harness.graph.source``) or of a user's file. It is executed anew for every run, so that
each run has functions and code objects that no compiler has seen.
"""

from __future__ import annotations

import linecache
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from harness.errors import InvalidProgram
from harness.executors.inputs import draw_concrete
from harness.executors.record import record, version_of
from harness.graph.source import source
from harness.ops.core import is_dense
from harness.spec.outcome import ErrorRecord, RankOutcome, Stage
from harness.spec.program import Autograd, Program, TensorSpec, contiguous_stride, storage_numel

__all__ = ["Case", "Wrap", "case_of_file", "case_of_program", "run_case"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the compiled form of a callable on tensors."""

_BACKWARD_SEED: Final = 1


class Case(NamedTuple):
    """What is run.

    Attributes:
        text, name: the source, and what tracebacks call it; a user's file has its path for a name.
        program: the Program that it is the source of, or None.
        seed: of the input values of a Program.
        autograd: how often backward runs, and hooks.
        backward_seed: of the gradients that backward is given.
    """

    text: str
    name: str
    program: Program | None
    seed: int
    autograd: Autograd
    backward_seed: int = _BACKWARD_SEED


class _Inputs(NamedTuple):
    """The inputs of one call: what is passed, all that is looked at, and for each of these the leaf whose gradient is asked for."""

    args: list[Tensor]
    looked_at: list[Tensor]
    leaves: list[Tensor | None]


def case_of_program(program: Program, *, seed: int = 0) -> Case:
    """The case of a Program; one without ``autograd`` has no backward.

    Raises:
        Unsupported: see ``harness.graph.source``.
    """
    text = source(program)
    return Case(text, f"<program {zlib.crc32(text.encode()):08x}>", program, seed, program.autograd or Autograd(num_backward=0))


def case_of_file(path: Path) -> Case:
    """The case of a user's Python: ``program(*tensors)`` and ``inputs(rank, world_size)``, and as they like ``COMPILE``, ``backward_seed`` and ``num_backward`` (1).

    Raises:
        InvalidProgram: ``backward_seed`` or ``num_backward`` is no number from 0.
        OSError: the file cannot be read.
    """
    case = Case(path.read_text(encoding="utf-8"), str(path), None, 0, Autograd())
    namespace = _executed(case)
    _inputs(case, namespace, None)
    numbers = {"backward_seed": namespace.get("backward_seed", _BACKWARD_SEED), "num_backward": namespace.get("num_backward", 1)}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidProgram(name, f"{value!r}; must be a number from 0", source=str(path))
    return case._replace(autograd=Autograd(num_backward=numbers["num_backward"]), backward_seed=numbers["backward_seed"])


def run_case(
    case: Case,
    wrap: Wrap | None = None,
    *,
    num_calls: int = 1,
    after_call: Callable[[], object] = lambda: None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    after_forward: Callable[[Sequence[Tensor]], object] = lambda roots: None,
    past_errors: bool = False,
) -> list[RankOutcome]:
    """Run a case from its beginning to its last backward.

    Args:
        case: see ``Case``.
        wrap: makes the compiled form of what is called, or of the function that a user's file names with ``COMPILE``; None for eager.
        num_calls: how often it is called, each time on fresh arguments; what a module holds stays. An error ends them all, unless ``past_errors``.
        after_call: called after each, its backward included.
        around: the context that each forward runs in, not its backward.
        after_forward: called with what backward will begin from, before it runs.
        past_errors: whether calls go on after one that raised.

    Returns:
        One outcome a call, with a stage after forward and one after each backward; after an error, those before it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace = _executed(case)
        inputs = _inputs(case, namespace, None)
        call = _callable(case, namespace, inputs, wrap)
        outcomes: list[RankOutcome] = []
        while True:
            outcomes.append(_run(case, call, inputs, around, after_forward))
            after_call()
            if len(outcomes) == num_calls or (outcomes[-1].error is not None and not past_errors):
                return outcomes
            inputs = _inputs(case, namespace, inputs)


def _executed(case: Case) -> dict[str, Any]:
    """The globals of the case's source, executed anew."""
    linecache.cache[case.name] = (len(case.text), None, case.text.splitlines(keepends=True), case.name)
    namespace: dict[str, Any] = {"__name__": "harness_case", "__file__": case.name}
    folder = str(Path(case.name).resolve().parent)
    sys.path.insert(0, folder)
    try:
        exec(compile(case.text, case.name, "exec"), namespace)
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
    return namespace


def _callable(case: Case, namespace: dict[str, Any], inputs: _Inputs, wrap: Wrap | None) -> Callable[..., Any]:
    wrapped = wrap or (lambda fn: fn)
    name = namespace.get("COMPILE") if case.program is None else None
    if name is not None:
        namespace[name] = wrapped(namespace[name])
        return namespace["program"]
    if case.program is not None and "Held" in namespace:
        held = [t for t, spec in zip(inputs.looked_at, case.program.inputs, strict=True) if spec.role != "argument"]
        return wrapped(namespace["Held"](*held))
    return wrapped(namespace["program"])


def _inputs(case: Case, namespace: dict[str, Any], before: _Inputs | None) -> _Inputs:
    if case.program is not None:
        return _declared(case.program, case.seed, before)
    given = namespace["inputs"](0, namespace.get("WORLD_SIZE", 1))
    args = list(given) if isinstance(given, (tuple, list)) else [given]
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor):
            raise InvalidProgram("inputs", f"input {i} is a {type(arg).__name__}; must be a tensor", source=case.name)
    return _Inputs(args, args, [t if t.requires_grad and t.is_leaf else None for t in args])


def _declared(program: Program, seed: int, before: _Inputs | None) -> _Inputs:
    """The inputs that a Program declares; those that its module holds are the same as before."""
    looked_at: list[Tensor] = []
    leaves: list[Tensor | None] = []
    values = [value.detach() for value in draw_concrete(program, "small", seed, 0)]
    for i, (spec, value) in enumerate(zip(program.inputs, values, strict=True)):
        leaf: Tensor | None = None
        if spec.same_as is not None:
            made = looked_at[spec.same_as]
        elif before is not None and spec.role != "argument":
            made, leaf = before.looked_at[i], before.leaves[i]
            if made.grad_fn is not None:
                made.detach_()
        elif spec.view_of is not None:
            base = looked_at[spec.view_of]
            made = (base if spec.requires_grad else base.detach()).as_strided(spec.shape, _stride(spec), spec.storage_offset)
            if spec.requires_grad and not base.requires_grad:
                leaf = made = made.detach().requires_grad_()
        elif spec.role == "parameter":
            made = torch.nn.Parameter(value, requires_grad=spec.requires_grad)
            leaf = made if spec.requires_grad else None
        elif spec.requires_grad and not spec.is_leaf:
            leaf, made = _non_leaf(spec, value)
        else:
            made = value.requires_grad_(spec.requires_grad)
            leaf = made if spec.requires_grad else None
        looked_at.append(made)
        leaves.append(leaf)
    args = [t for t, spec in zip(looked_at, program.inputs, strict=True) if spec.role == "argument"]
    return _Inputs(args, looked_at, leaves)


def _non_leaf(spec: TensorSpec, value: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf, and what an operator made of it in the geometry of ``spec``."""
    if is_dense(spec.shape, _stride(spec)) and not spec.storage_offset:
        leaf = value.requires_grad_()
        return leaf, leaf.clone()
    leaf = value.as_strided((storage_numel(spec.shape, _stride(spec), spec.storage_offset),), (1,), 0).clone().requires_grad_()
    return leaf, leaf.clone().as_strided(spec.shape, _stride(spec), spec.storage_offset)


def _stride(spec: TensorSpec) -> tuple[int, ...]:
    return contiguous_stride(spec.shape) if spec.stride is None else spec.stride


class _Watched:
    """Takes down stages: tensors are compared with what they were before the call."""

    def __init__(self, inputs: _Inputs) -> None:
        self.inputs = inputs.looked_at
        self.versions = [version_of(t) for t in self.inputs]
        self.stages: list[Stage] = []
        self.outputs: list[Tensor] = []

    def stage(self, name: str, grads: Sequence[Tensor | None] = (), seeds: Sequence[Tensor] = (), *, is_last: bool = False) -> None:
        reached = [g for g in grads if g is not None]
        with torch.no_grad():
            inputs, others = record(self.inputs, [*self.outputs, *reached, *seeds], self.versions, keep=True, with_groups=is_last)
        num = len(self.outputs)
        found = iter(others[num : num + len(reached)])
        told = tuple(None if g is None else next(found) for g in grads)
        self.stages.append(Stage(name, inputs, others[:num], told, others[num + len(reached) :]))


def _run(
    case: Case,
    call: Callable[..., Any],
    inputs: _Inputs,
    around: Callable[[], AbstractContextManager[object]],
    after_forward: Callable[[Sequence[Tensor]], object],
) -> RankOutcome:
    watched = _Watched(inputs)
    at = "forward"
    try:
        for hook in case.autograd.hooks:
            if hook.of == "input":
                _double(inputs.looked_at[hook.number])
        with around():
            returned = call(*inputs.args)
        watched.outputs = [t for t in (returned if isinstance(returned, (tuple, list)) else (returned,)) if isinstance(t, Tensor)]
        roots = [t for t in (*watched.outputs, *inputs.looked_at) if t.requires_grad and t.grad_fn is not None]
        num_backward = case.autograd.num_backward if roots and any(t is not None for t in inputs.leaves) else 0
        watched.stage("forward", is_last=not num_backward)
        after_forward(roots)
        for hook in case.autograd.hooks:
            if hook.of == "output":
                _double(watched.outputs[hook.number])
        generator = torch.Generator().manual_seed(case.backward_seed)
        drawn = [torch.randint(-3, 4, t.shape, generator=generator).to(t.dtype) for t in roots]
        for number in range(num_backward):
            at = f"backward {number + 1}"
            is_last = number + 1 == num_backward
            seeds = [seed.clone() for seed in drawn]
            grads = _grads(roots, inputs.leaves, seeds, retain_graph=not is_last, create_graph=is_last and case.autograd.is_double)
            watched.stage(at, grads, seeds, is_last=is_last and not case.autograd.is_double)
        if num_backward and case.autograd.is_double:
            at = "double backward"
            again = [g for g in grads if g is not None and g.grad_fn is not None]
            if again:
                torch.autograd.backward(again, [torch.ones_like(g) for g in again])
            watched.stage(at, [None if t is None else t.grad for t in inputs.leaves], is_last=True)
    except Exception as error:
        return RankOutcome(error=_error(error, at), stages=tuple(watched.stages))
    return RankOutcome(stages=tuple(watched.stages))


def _grads(
    roots: Sequence[Tensor], leaves: Sequence[Tensor | None], seeds: Sequence[Tensor], *, retain_graph: bool = False, create_graph: bool = False
) -> list[Tensor | None]:
    """One gradient an input; None where it is no leaf or not reached."""
    asked = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(roots, asked, seeds, retain_graph=retain_graph or create_graph, create_graph=create_graph, allow_unused=True))
    return [None if t is None else next(found) for t in leaves]


def _double(tensor: Tensor) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: grad * 2)


def _error(error: Exception, stage: str) -> ErrorRecord:
    """What a compiler's own exception was raised for, and the stage that it ended."""
    while isinstance(cause := getattr(error, "inner_exception", None), Exception):
        error = cause
    return ErrorRecord(type(error).__name__, str(error), stage)
