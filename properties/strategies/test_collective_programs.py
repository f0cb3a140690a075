"""Drawn programs are valid, whatever the options, and keep to the options."""

from __future__ import annotations

from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.ops import TABLE, infer_program
from harness.spec.meta import TensorMeta
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec, decode_program, encode_program, structural_faults
from harness.strategies import collective_programs
from harness.strategies.builder import Options
from harness.strategies.collectives import ALL_DTYPES, KINDS, REDUCE_OPS
from harness.strategies.groups import GROUPS, groups_from
from harness.strategies.statements import HEADER, WIDTH, read_tape
from properties.strategies.anatomy import WAIT, Anatomy, flight_violations, operands

QUICK = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
WORLD_SIZES = (2, 1, 3, 4, 8)
NEVER_DRAWN = {"bucketing._pre_bucket_all_gather.default"}
"""Its arguments number dtypes by a table of the installed torch, which no strategy knows."""

_MUTATIONS: tuple[Literal["any", "epilogue"], ...] = ("any", "epilogue")
programs = st.one_of(*(collective_programs(world_sizes=WORLD_SIZES, mutation=m) for m in _MUTATIONS))


@QUICK
@given(programs)
def test_programs_are_valid(program: Program) -> None:
    """Every drawn program has a valid structure, meets every operator's preconditions, and reads and writes nothing in flight."""
    assert not list(structural_faults(program))
    infer_program(program)
    assert not flight_violations(program)


@QUICK
@given(programs)
def test_programs_survive_json(program: Program) -> None:
    """A program read back from JSON is equal to the one written."""
    assert decode_program(encode_program(program)) == program


@QUICK
@given(programs)
def test_nothing_is_idle(program: Program) -> None:
    """Every input, every group and every result of an op that is neither a collective, nor its wait, nor in place is used or returned.

    Where its memory is in flight at the end it cannot be returned.
    """
    assert_nothing_idle(program)


def test_short_tapes_leave_nothing_idle() -> None:
    """The same of tapes of one or two statements, whose programs often have no collective."""
    random = Random(0)
    options = Options(KINDS, ALL_DTYPES, REDUCE_OPS, 6, 24, True)
    tapes = [[b"\x8a\x00\x93\x00\x00\x80\x00 "], *([random.randbytes(WIDTH) for _ in range(1 + n % 2)] for n in range(4000))]
    for n, tape in enumerate(tapes):
        assert_nothing_idle(read_tape(2, groups_from(2, bytes(GROUPS)), options, random.randbytes(HEADER) if n % 4 == 3 else bytes(HEADER), tape))


def assert_nothing_idle(program: Program) -> None:
    metas, in_flight = infer_program(program), _in_flight(program)
    used = {ref.value for op in program.ops for ref in operands(op)} | {ref.value for ref in program.outputs}
    for value in range(len(program.inputs)):
        assert value in used, f"input {value} is idle"
    for number, op in enumerate(program.ops, len(program.inputs)):
        spec, meta = TABLE[op.target], metas[number]
        if spec.kind not in ("wait", "collective") and not spec.writes:
            stays = isinstance(meta, TensorMeta) and meta.storage in in_flight
            assert number in used or not meta or stays, f"op {number} ({op.target}) is idle"
    named = {arg.name for op in program.ops for arg in op.args if isinstance(arg, GroupArg)}
    assert {g.name for g in program.groups} == named or len(program.groups) == 1


def _in_flight(program: Program) -> set[int]:
    """The storages of collectives' results that nobody waits for."""
    metas = infer_program(program)
    waited = {ref.value for op in program.ops if TABLE[op.target].kind == "wait" for ref in operands(op)}
    lost = [n for n, op in enumerate(program.ops, len(program.inputs)) if TABLE[op.target].kind == "collective" and n not in waited]
    return {m.storage for n in lost for m in (metas[n] if isinstance(metas[n], tuple) else (metas[n],)) if isinstance(m, TensorMeta)}


@QUICK
@given(st.data())
def test_programs_keep_to_options(data: st.DataObject) -> None:
    """Collectives, reduce ops, dtypes of inputs, world sizes and the numbers of ops and collectives are those that were allowed."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    dtypes = data.draw(st.lists(st.sampled_from(ALL_DTYPES), min_size=1, max_size=3, unique=True))
    reduce_ops = data.draw(st.lists(st.sampled_from(REDUCE_OPS), min_size=1, max_size=2, unique=True))
    most, most_ops = data.draw(st.integers(1, 8)), data.draw(st.integers(5, 40))
    program = data.draw(
        collective_programs(world_sizes=(3,), kinds=kinds, dtypes=dtypes, reduce_ops=reduce_ops, max_collectives=most, max_ops=most_ops)
    )
    starts = Anatomy(program).starts
    assert program.world_size == 3 and len(program.ops) <= most_ops and len(starts) <= most
    assert {s.kind for s in starts} <= set(kinds)
    assert {s.reduce_op for s in starts} - {None} <= set(reduce_ops)
    assert {spec.dtype for spec in program.inputs if spec.high is None} - {"int64", "bool", "float32"} <= set(dtypes)


@QUICK
@given(collective_programs(world_sizes=(2, 4), mutation="epilogue"))
def test_epilogue_programs_write_inputs_at_their_end_alone(program: Program) -> None:
    """With ``mutation="epilogue"`` the only writes are copies into inputs, and nothing else comes after the first."""
    writes = [i for i, op in enumerate(program.ops) if TABLE[op.target].writes or "out" in op.kwargs]
    assert writes == list(range(len(program.ops) - len(writes), len(program.ops)))
    for i in writes:
        target = program.ops[i].args[0]
        assert program.ops[i].target == "aten.copy_.default"
        assert isinstance(target, Ref) and target.value < len(program.inputs)


def test_every_operator_is_drawn() -> None:
    """Every operator of the table stands in the program of some tape."""
    random = Random(0)
    options = Options(KINDS, ALL_DTYPES, REDUCE_OPS, 6, 24, True)
    drawn: set[str] = set()
    for _ in range(4000):
        tape = [random.randbytes(WIDTH) for _ in range(8)]
        program = read_tape(4, groups_from(4, random.randbytes(GROUPS)), options, random.randbytes(HEADER), tape)
        drawn.update(op.target for op in program.ops)
    assert set(TABLE) - drawn == NEVER_DRAWN


@pytest.mark.parametrize(
    "options", [{"kinds": ()}, {"kinds": ("gather",)}, {"dtypes": ("float31",)}, {"reduce_ops": ("mean",)}, {"world_sizes": ()}, {"world_sizes": (0,)}]
)
def test_wrong_options_are_refused_by_name(options: dict[str, tuple[str, ...]]) -> None:
    """An option that is empty or names what does not exist is a ValueError that names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        collective_programs(**options)  # type: ignore[arg-type]


def _faulty(*ops: Op, outputs: tuple[int, ...] = ()) -> list[str]:
    inputs = (TensorSpec((4,), "float32"), TensorSpec((4,), "float32", view_of=0))
    return flight_violations(Program(2, (Group("world", ((0, 1),)),), inputs, ops, tuple(Ref(v) for v in outputs)))


def test_the_flight_checker_sees_violations() -> None:
    """The checker of this folder sees a read of a result in flight, a write to an operand, and an output that nobody waited for."""
    reduce = Op("_c10d_functional.all_reduce.default", (Ref(0), "sum", GroupArg("world")))
    wait = Op(WAIT, (Ref(2),))
    assert "touches" in _faulty(reduce, Op("aten.neg.default", (Ref(2),)), wait)[0]
    assert "writes" in _faulty(reduce, Op("aten.zero_.default", (Ref(1),)), wait)[0]
    assert "output" in _faulty(reduce, outputs=(2,))[0]
    assert not _faulty(reduce, Op("aten.neg.default", (Ref(0),)), wait, Op("aten.zero_.default", (Ref(1),)), outputs=(2, 4))
