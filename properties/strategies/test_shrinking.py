"""What a failure shrinks to is the smallest program that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from harness.spec.program import Program, Ref
from harness.strategies import collective_programs
from properties.strategies.anatomy import Anatomy

SEARCH: Final = settings(
    max_examples=4000, deadline=None, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)


def _smallest(has: Callable[[Anatomy], bool], **options: object) -> Program:
    return find(collective_programs(world_sizes=(2, 4), **options), lambda p: has(Anatomy(p)), settings=SEARCH)  # type: ignore[arg-type]


def _has_gathers_of_two_dtypes(a: Anatomy) -> bool:
    return len({a.meta(s.operands[0]).dtype for s in a.starts if s.kind == "all_gather"}) >= 2


def _has_start_with_two_waits(a: Anatomy) -> bool:
    return any(len(s.waits) >= 2 for s in a.starts)


def _has_scatter_after_gather(a: Anatomy) -> bool:
    gathers = {s.at for s in a.starts if s.kind == "all_gather"}
    return any(s.kind == "reduce_scatter" and gathers & a.ancestors(s.operands[0]) for s in a.starts)


def _has_two_groups(a: Anatomy) -> bool:
    return len({s.group for s in a.starts}) >= 2


def _has_three_reductions(a: Anatomy) -> bool:
    return sum(s.kind == "all_reduce" and s.reduce_op == "max" for s in a.starts) >= 3


def _has_write_to_operand(a: Anatomy) -> bool:
    written = {a.meta(op.args[0]).storage for op in a.program.ops if op.target == "aten.zero_.default" and isinstance(op.args[0], Ref)}
    return any(a.meta(ref).storage in written for s in a.starts for ref in s.operands)


def _has_transpose(a: Anatomy) -> bool:
    return any(op.target == "aten.transpose.int" for op in a.program.ops)


@pytest.mark.parametrize(
    ("has", "most_ops", "most_inputs"),
    [
        (lambda a: bool(a.starts), 2, 1),
        (_has_gathers_of_two_dtypes, 5, 2),
        (_has_start_with_two_waits, 3, 1),
        (_has_scatter_after_gather, 4, 1),
        (_has_two_groups, 4, 2),
        (_has_three_reductions, 6, 3),
        (_has_write_to_operand, 7, 3),
        (_has_transpose, 8, 3),
    ],
    ids=["any", "two dtypes", "two waits", "chain", "two groups", "three reductions", "write", "transpose"],
)
def test_shrinks_to_the_smallest(has: Callable[[Anatomy], bool], most_ops: int, most_inputs: int) -> None:
    """The smallest program with a feature has few ops and inputs, two ranks, contiguous inputs of few elements."""
    program = _smallest(has)
    assert len(program.ops) <= most_ops
    assert len(program.inputs) <= most_inputs
    assert program.world_size == 2
    assert {spec.shape for spec in program.inputs} <= {(1,), (2,), (2, 2)}
    assert all(spec.stride is None and not spec.storage_offset and spec.view_of is None for spec in program.inputs)
    assert {spec.dtype for spec in program.inputs} <= {"float32", "bfloat16"}
