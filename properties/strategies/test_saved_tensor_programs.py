"""Programs with saved tensor hooks: valid, run in eager, reach every pair and kind of statement, and shrink."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from harness.executors.autograd import case_of_program, run_case
from harness.ops import infer_program
from harness.spec.program import Program, decode_program, encode_program
from harness.spec.saved_hooks import SAVED_HOOKS
from harness.strategies.saved_tensors import saved_tensor_programs

MANY = settings(max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))


def test_programs_are_valid_and_reach_everything() -> None:
    """Each is decoded to itself and inferred; together they have every pair, two pairs, held inputs, and the operators that save."""
    seen: Counter[str] = Counter()

    @MANY
    @given(saved_tensor_programs())
    def draw(program: Program) -> None:
        assert decode_program(encode_program(program)) == program
        infer_program(program)
        assert program.autograd is not None
        hooks = program.autograd.saved_hooks
        seen.update([hooks[-1], f"{len(hooks)} pairs", *(op.target for op in program.ops), *(spec.role for spec in program.inputs)])

    draw()
    assert set(SAVED_HOOKS) <= set(seen)
    wanted = ("2 pairs", "parameter", "buffer", "aten.mm.default", "aten.exp.default", "aten.where.self", "aten.transpose.int", "aten.sum.default")
    assert not [name for name in wanted if not seen[name]]


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(saved_tensor_programs())
def test_programs_run_in_eager(program: Program) -> None:
    """Without hooks each has gradients and no error."""
    (outcome,) = run_case(case_of_program(program))
    assert outcome.error is None
    assert outcome.stages[-1].name.startswith("backward") and any(g is not None for g in outcome.stages[-1].grads)


def test_held_inputs_are_left_out_where_they_are_not_wanted() -> None:
    """``held=False`` gives functions of arguments alone, and ``names`` only those pairs."""

    @MANY
    @given(saved_tensor_programs(held=False, names=("bits",)))
    def draw(program: Program) -> None:
        assert {spec.role for spec in program.inputs} == {"argument"}
        assert program.autograd is not None and set(program.autograd.saved_hooks) == {"bits"}

    draw()


def test_shrinking_ends_in_one_statement() -> None:
    """The least program that saves a tensor is a square."""
    least = find(saved_tensor_programs(), lambda p: any(op.target == "aten.mul.Tensor" for op in p.ops), settings=settings(database=None, derandomize=True))
    assert len(least.inputs) == 1 and len(least.ops) <= 2
    assert least.autograd is not None and least.autograd.saved_hooks == ("identity",)
    assert isinstance(saved_tensor_programs(), st.SearchStrategy)
