"""What a program with a backward makes use of: how the ledger tells one fault's wrong values from another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from harness.ops.views import VIEWS
from harness.spec.program import Function, Op, Program, Ref

__all__ = ["TRAITS", "traits"]

_VIEW_TARGETS: Final = frozenset((*(spec.target for spec in VIEWS), "autograd.data"))


def _functions(program: Program) -> tuple[Function, ...]:
    return () if program.autograd is None else program.autograd.functions


def _ops(program: Program) -> Iterator[Op]:
    yield from program.ops
    for function in _functions(program):
        yield from function.forward
        yield from function.backward


def _is_write(op: Op) -> bool:
    return op.target.split(".")[1].endswith("_")


def _writes_given(function: Function) -> bool:
    """Whether backward writes to something that forward saved or kept."""
    given = range(len(function.outputs), function.num_given)
    return any(_is_write(op) and isinstance(op.args[0], Ref) and op.args[0].value in given for op in function.backward)


def _returns_input(function: Function) -> bool:
    return any(ref.value < function.num_inputs and ref.value not in function.dirty for ref in function.outputs)


TRAITS: Final[Mapping[str, Callable[[Program], bool]]] = {
    "mark_dirty": lambda p: any(f.dirty for f in _functions(p)),
    "write_in_backward": lambda p: any(_writes_given(f) for f in _functions(p)),
    "returned_input": lambda p: any(_returns_input(f) for f in _functions(p)),
    "no_grad_view": lambda p: any(op.mode is not None and op.target in _VIEW_TARGETS for op in p.ops),
    "no_grad_write": lambda p: any(op.mode is not None and _is_write(op) for op in p.ops),
    "aliased_inputs": lambda p: any(spec.view_of is not None or spec.same_as is not None for spec in p.inputs),
    "scatter": lambda p: any(op.target.endswith("_scatter.default") for op in _ops(p)),
    "set_": lambda p: any(op.target == "autograd.set_" for op in p.ops),
    "resize": lambda p: any(op.target == "autograd.resize_storage_" for op in p.ops),
}
"""By name; writes and views under ``no_grad`` or in inference mode are those of the program itself, not of its functions."""


def traits(program: Program) -> frozenset[str]:
    """The names of ``TRAITS`` that ``program`` has."""
    return frozenset(name for name, has in TRAITS.items() if has(program))
