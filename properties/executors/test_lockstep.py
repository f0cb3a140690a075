"""Lockstep against direct definitions of each collective, in both arithmetics, and its reports of what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from harness.errors import Unsupported
from harness.executors.algebra import P, Field
from harness.executors import lockstep as lockstep_module
from harness.executors.inputs import draw_inputs, fresh
from harness.executors.lockstep import Lockstep
from harness.graph import build, build_all
from harness.spec.dtypes import DTYPES
from harness.spec.outcome import Outcome
from harness.spec.program import Arg, DTypeArg, Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.strategies import collective_programs

C10D = "_c10d_functional."
WORLD = Group("world", ((0, 1, 2, 3),))
PAIRS = Group("pairs", ((0, 1), (2, 3)))
CROSS = Group("cross", ((0, 2), (1, 3)))
FIELD = Field(7, frozenset(DTYPES))


def _program(*ops: Op, inputs: tuple[TensorSpec, ...] = (TensorSpec((4,), "float32"),), outputs: tuple[int, ...] | None = None, divergent: bool = False) -> Program:
    last = len(inputs) + len(ops) - 1
    refs = tuple(Ref(v) for v in (outputs or (last,)))
    return Program(4, (WORLD, PAIRS, CROSS), inputs, ops, refs, divergent)


def _op(target: str, *args: Arg, ranks: tuple[int, ...] | None = None) -> Op:
    return Op(target, args, ranks=ranks)


def _run(program: Program, *, keep: bool = True) -> tuple[Outcome, list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    lockstep = Lockstep([build(program, r) for r in range(4)], program.groups, 4)
    inputs = draw_inputs(program, "small", FIELD, 3)
    outcome = lockstep.run([fresh(i, program) for i in inputs], FIELD, trial="small", poison_seed=1, keep=keep)
    return outcome, [i.concrete for i in inputs], [i.field for i in inputs]


def _tensors(outcome: Outcome, which: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    concrete, halves = [], []
    for rank in outcome.ranks:
        record = rank.outputs[which]
        assert record.data is not None and record.field_data is not None
        concrete.append(torch.frombuffer(bytearray(record.data), dtype=getattr(torch, record.dtype)).reshape(record.shape))
        halves.append(torch.frombuffer(bytearray(record.field_data), dtype=torch.int64).reshape(record.shape))
    return concrete, halves


@pytest.mark.parametrize("group", [WORLD, PAIRS, CROSS])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_all_reduce(group: Group, op: str) -> None:
    """An all_reduce gives every rank of a part the reduction over that part, in both arithmetics."""
    program = _program(_op(C10D + "all_reduce.default", Ref(0), op, GroupArg(group.name)), _op(C10D + "wait_tensor.default", Ref(1)))
    outcome, inputs, halves = _run(program)
    concrete, field = _tensors(outcome)
    for part in group.parts:
        stack = torch.stack([inputs[r][0] for r in part])
        expected = {"sum": stack.sum(0), "avg": stack.sum(0) / len(part), "max": stack.amax(0), "min": stack.amin(0), "product": stack.prod(0)}[op]
        for rank in part:
            assert torch.equal(concrete[rank], expected)
            assert torch.equal(field[rank], FIELD.reduce([halves[r][0] for r in part], op))
    assert not any(r.in_flight or r.untrue or r.error for r in outcome.ranks)


@pytest.mark.parametrize("group", [WORLD, PAIRS, CROSS])
def test_all_gather_and_reduce_scatter(group: Group) -> None:
    """A gather concatenates in rank order; a reduce_scatter of it gives each rank its own part times the group's size."""
    program = _program(
        _op(C10D + "all_gather_into_tensor.default", Ref(0), group.size, GroupArg(group.name)),
        _op(C10D + "wait_tensor.default", Ref(1)),
        _op(C10D + "reduce_scatter_tensor.default", Ref(2), "sum", group.size, GroupArg(group.name)),
        _op(C10D + "wait_tensor.default", Ref(3)),
        outputs=(2, 4),
    )
    outcome, inputs, halves = _run(program)
    gathered, gathered_field = _tensors(outcome, 0)
    scattered, scattered_field = _tensors(outcome, 1)
    for part in group.parts:
        for rank in part:
            assert torch.equal(gathered[rank], torch.cat([inputs[r][0] for r in part]))
            assert torch.equal(gathered_field[rank], torch.cat([halves[r][0] for r in part]))
            assert torch.equal(scattered[rank], inputs[rank][0] * len(part))
            assert torch.equal(scattered_field[rank], halves[rank][0] * len(part) % P)


def test_all_to_all_and_broadcast() -> None:
    """An all_to_all transposes blocks over ranks; a broadcast gives the source's value, counted within the part."""
    program = _program(
        _op(C10D + "all_to_all_single.default", Ref(0), (1, 1, 1, 1), (1, 1, 1, 1), GroupArg("world")),
        _op(C10D + "wait_tensor.default", Ref(1)),
        _op(C10D + "broadcast.default", Ref(0), 1, GroupArg("cross")),
        _op(C10D + "wait_tensor.default", Ref(3)),
        outputs=(2, 4),
    )
    outcome, inputs, _ = _run(program)
    exchanged, _ = _tensors(outcome, 0)
    copied, _ = _tensors(outcome, 1)
    for rank in range(4):
        assert torch.equal(exchanged[rank], torch.stack([inputs[r][0][rank] for r in range(4)]))
        assert torch.equal(copied[rank], inputs[3 if rank % 2 else 2][0])


def test_divergence_names_ranks_and_nodes() -> None:
    """Ranks that start different collectives are told apart by rank, kind and node."""
    program = _program(
        _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("world"), ranks=(0, 1, 2)),
        _op(C10D + "all_reduce.default", Ref(0), "max", GroupArg("world"), ranks=(3,)),
        outputs=(0,),
        divergent=True,
    )
    outcome, _, _ = _run(program)
    error = outcome.ranks[3].error
    assert error is not None and error.type == "Divergence"
    assert "rank 0 starts all_reduce sum" in error.message and "rank 3 starts all_reduce max" in error.message


def test_a_collective_that_some_ranks_never_start() -> None:
    """A collective that a rank leaves out, and nobody waits for, is a divergence that says who lacks."""
    program = _program(
        _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("pairs"), ranks=(0, 2, 3)), outputs=(0,), divergent=True
    )
    outcome, _, _ = _run(program)
    error = outcome.ranks[0].error
    assert error is not None and error.type == "Divergence" and "never by ranks [1]" in error.message


def test_deadlock_says_who_waits_for_what() -> None:
    """Ranks that wait for each other's collectives in crossed order are a deadlock, with every rank's wait named."""
    first = _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("pairs"), ranks=(0,))
    program = _program(
        first,
        _op(C10D + "wait_tensor.default", Ref(1), ranks=(0,)),
        _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("cross"), ranks=(1, 3)),
        outputs=(0,),
        divergent=True,
    )
    outcome, _, _ = _run(program)
    error = outcome.ranks[0].error
    assert error is not None and error.type == "Deadlock"
    assert "rank 0 waits at" in error.message and "lacks ranks [1]" in error.message


def test_memory_in_flight() -> None:
    """Reading a result before its wait, and writing an input before the wait, are seen and named."""
    program = _program(
        _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("world")),
        _op("aten.add.Tensor", Ref(1), Ref(0)),
        _op("aten.zero_.default", Ref(0)),
        _op(C10D + "wait_tensor.default", Ref(1)),
        outputs=(2, 4),
    )
    outcome, _, _ = _run(program)
    assert {f.access for f in outcome.ranks[0].in_flight} == {"read_output", "write_input"}


def test_views_of_memory_in_flight_are_no_reads() -> None:
    """A view of a result in flight reads nothing, and a wait on the view completes the collective."""
    program = _program(
        _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("world")),
        _op("aten.view.default", Ref(1), (2, 2)),
        _op(C10D + "wait_tensor.default", Ref(2)),
        _op("aten.add.Tensor", Ref(3), Ref(3)),
    )
    outcome, _, _ = _run(program)
    assert not outcome.ranks[0].in_flight


def test_unwritten_memory_differs_between_runs() -> None:
    """What nobody wrote differs between two runs with different poison, and only that."""
    program = _program(_op("aten.empty_like.default", Ref(0)), _op("aten.add.Tensor", Ref(1), Ref(0)), outputs=(2, 0))
    lockstep = Lockstep([build(program, 0)], program.groups, 4)
    runs = []
    for poison in (1, 2):
        inputs = draw_inputs(program, "normal", FIELD, 3)
        runs.append(lockstep.run(inputs, FIELD, trial="normal", poison_seed=poison).ranks[0].outputs)
    assert runs[0][0].field_digest != runs[1][0].field_digest
    assert runs[0][1].field_digest == runs[1][1].field_digest


def test_mutation_through_views_is_real() -> None:
    """An in-place operator on a view changes the base in both halves, and counts as a version of the input."""
    program = _program(
        _op("aten.slice.Tensor", Ref(0), 0, 1, 3), _op("aten.mul_.Tensor", Ref(1), 2.0), outputs=(0,)
    )
    outcome, inputs, halves = _run(program)
    concrete, field = _tensors(outcome)
    for rank in range(4):
        assert torch.equal(concrete[rank], inputs[rank][0] * torch.tensor([1, 2, 2, 1]))
        assert torch.equal(field[rank], halves[rank][0] * torch.tensor([1, 2, 2, 1]) % P)
    assert outcome.ranks[0].inputs[0].version == 1
    assert outcome.ranks[0].outputs[0].storage == outcome.ranks[0].inputs[0].storage


def test_an_unknown_operator_is_refused_by_name() -> None:
    """An operator that is not in the table is refused with its name and node; it is never guessed at."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.erfinv.default, (x,)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(Unsupported, match=r"aten\.erfinv\.default at erfinv"):
        Lockstep([gm], (WORLD,), 4)


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_world_sizes(world_size: int) -> None:
    """The same program runs on any number of ranks; a sum over ranks counts them."""
    group = Group("all", (tuple(range(world_size)),))
    program = Program(
        world_size,
        (group,),
        (TensorSpec((3,), "int64", data=((1).to_bytes(8, "little") * 3,) * world_size),),
        (
            _op(C10D + "all_reduce.default", Ref(0), "sum", GroupArg("all")),
            _op(C10D + "wait_tensor.default", Ref(1)),
        ),
        (Ref(2),),
    )
    lockstep = Lockstep([build(program, 0)], program.groups, world_size)
    outcome = lockstep.run(draw_inputs(program, "small", FIELD, 0), FIELD, trial="small", poison_seed=1, keep=True)
    data = outcome.ranks[-1].outputs[0].data
    assert data == world_size.to_bytes(8, "little") * 3


def test_a_dtype_view_to_the_same_dtype_is_an_alias_in_both_halves() -> None:
    """A piece of a buffer seen as its own dtype still lies in the buffer: a strided view from the storage's start sees the start."""
    program = _program(
        _op("aten.view.default", Ref(0), (1, 4)),
        _op("aten.split_with_sizes.default", Ref(1), (1, 3), 1),
        Op("aten.view.dtype", (Ref(2, 1), DTypeArg("float32"))),
        _op("aten.as_strided.default", Ref(3), (2,), (1,), 0),
    )
    outcome, inputs, halves = _run(program)
    concrete, field = _tensors(outcome)
    assert torch.equal(concrete[0], inputs[0][0][:2]) and torch.equal(field[0], halves[0][0][:2])


def test_a_view_that_needs_a_copy_makes_one_only_where_that_is_asked_for() -> None:
    """With ``views_may_copy`` a view that strides forbid is a reshape, and any other view is what it was, version counter too."""
    program = _program(
        _op("aten._unsafe_view.default", Ref(0), (2, 2)), _op("aten.view.default", Ref(0), (2, 2)), outputs=(0, 1, 2)
    )
    runs = [
        Lockstep([build(program, 0)], program.groups, 4, views_may_copy=copies).run(
            draw_inputs(program, "small", FIELD, 3), FIELD, trial="small", poison_seed=1
        )
        for copies in (False, True)
    ]
    assert runs[0] == runs[1]


@given(collective_programs(world_sizes=(2,)))
@settings(max_examples=150, deadline=None)
def test_the_halves_share_no_memory(program: Program) -> None:
    """No value's field half lies in memory of any concrete half, so that writing one leaves the other as it is."""
    seen: list[tuple[list[Any], list[Any]]] = []
    record = lockstep_module._record

    def look(rank: Any, keep: bool) -> Any:
        seen.append((rank.c, rank.f))
        return record(rank, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep_module, "_record", look)
        lockstep = Lockstep(build_all(program), program.groups, program.world_size)
        field = Field(1, lockstep.dtypes)
        lockstep.run(draw_inputs(program, "small", field, 1), field, trial="small", poison_seed=1)
    for concrete, halves in seen:
        assert not _storages(concrete) & _storages(halves)


def _storages(values: list[Any]) -> set[int]:
    tensors = [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}
