"""Graphs read back are the Programs they were built from; traced functions are Programs that say what the function
did.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule, Node

from harness.errors import InvalidProgram, Unsupported
from harness.executors.algebra import Field
from harness.executors.inputs import draw_inputs
from harness.graph import build, fake_world, program_from_graphs, resolve, target_name, tensor_meta, trace
from harness.graph.align import align
from harness.spec.program import (
    FloatArg,
    Group,
    GroupArg,
    Op,
    PerRank,
    Program,
    Ref,
    TensorSpec,
    contiguous_stride,
    storage_numel,
    structural_faults,
)
from harness.strategies.collectives import collective_programs, divergent_programs

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
C10D = "_c10d_functional."
ops = torch.ops._c10d_functional

Function = Callable[..., Any]


def built(program: Program) -> list[GraphModule]:
    """The graph of every rank."""
    return [build(program, rank) for rank in range(program.world_size)]


def plain(program: Program) -> Program:
    """The program without what its graphs do not hold: values of inputs, requests for gradients, constants given a rank
    that are the same on all."""

    def geometry(spec: TensorSpec) -> TensorSpec:
        stride = None if spec.stride == contiguous_stride(spec.shape) else spec.stride
        return TensorSpec(spec.shape, spec.dtype, stride, spec.storage_offset, False, spec.view_of)

    def settled(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(settled(a) for a in arg)
        return arg.values[0] if isinstance(arg, PerRank) and len(set(arg.values)) == 1 else arg

    inputs = tuple(geometry(spec) for spec in program.inputs)
    ops = tuple(
        Op(op.target, settled(op.args), {k: settled(v) for k, v in op.kwargs.items()}, op.ranks) for op in program.ops
    )
    return Program(program.world_size, program.groups, inputs, ops, program.outputs, program.divergent)


def outline(gm: GraphModule) -> list[Any]:
    """A graph's calls and outputs, with numbers for nodes."""
    numbers = {node: i for i, node in enumerate(gm.graph.nodes)}

    def number(arg: Any) -> Any:
        if isinstance(arg, Node):
            return f"%{numbers[arg]}"
        return [number(a) for a in arg] if isinstance(arg, (list, tuple)) else repr(arg)

    return [
        (
            n.op,
            target_name(n) if n.op == "call_function" else "",
            number(n.args),
            sorted((k, number(v)) for k, v in n.kwargs.items()),
        )
        for n in gm.graph.nodes
    ]


def with_rank_constants(program: Program) -> Program:
    """The program with a different number to add on every rank, wherever it adds a number."""
    changed = []
    for op in program.ops:
        is_number = len(op.args) == 2 and type(op.args[1]) is int and op.target.split(".")[1] in ("add", "mul", "sub")
        args = (op.args[0], PerRank(tuple(range(1, program.world_size + 1)))) if is_number else op.args
        changed.append(Op(op.target, args, op.kwargs))
    return Program(program.world_size, program.groups, program.inputs, tuple(changed), program.outputs)


@given(collective_programs(world_sizes=(1, 2, 3, 4)), st.booleans())
@QUICK
def test_reading_inverts_building(program: Program, by_rank: bool) -> None:
    """Reading the graphs that a Program was built to, one a rank, gives the Program."""
    program = with_rank_constants(program) if by_rank else program
    assert program_from_graphs(built(program), groups=program.groups) == plain(program)


@given(divergent_programs())
@QUICK
def test_reading_keeps_every_rank_s_graph(program: Program) -> None:
    """A Program read from graphs that differ between ranks builds those graphs, up to an alias before an output."""
    graphs = built(program)
    read = program_from_graphs(graphs, groups=program.groups)
    assert not list(structural_faults(read))
    assert [outline(unaliased(gm)) for gm in built(read)] == [outline(unaliased(gm)) for gm in graphs]


def unaliased(gm: GraphModule) -> GraphModule:
    """The graph, returning what it returned an alias of."""
    output = next(reversed(gm.graph.nodes))
    for node in output.all_input_nodes:
        if target_name(node) == "aten.alias.default" and len(node.users) == 1:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    return gm


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=8), min_size=1, max_size=4))
def test_aligned_rows_keep_every_order(sequences: list[list[str]]) -> None:
    """Each item of each rank stands in one row, rows hold equal items, and going down the rows keeps every rank's
    order.
    """
    rows = align(sequences)
    for rank, items in enumerate(sequences):
        assert [row[rank] for row in rows if rank in row] == list(range(len(items)))
    assert all(row and len({sequences[rank][i] for rank, i in row.items()}) == 1 for row in rows)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_equal_sequences_align_whole(items: list[str], num_ranks: int) -> None:
    """Equal sequences share every row."""
    assert align([items] * num_ranks) == [dict.fromkeys(range(num_ranks), i) for i in range(len(items))]


def per_rank(*values: Sequence[float]) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Inputs: each a vector, the rank added to it."""
    return lambda rank, world_size: tuple(torch.tensor(v) + rank for v in values)


def name() -> str:
    """The default group's name."""
    return str(dist.group.WORLD.group_name)


def test_misaligned_gathers_are_read() -> None:
    """Two gathers of a bf16 and an fp32 tensor are read with their values, bit for bit, on each rank."""

    def program(narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD
        gathered = [ops.all_gather_into_tensor(t, group.size(), group.group_name) for t in (narrow, wide)]
        return tuple(ops.wait_tensor(t) for t in gathered)

    def inputs(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        return torch.arange(3, dtype=torch.bfloat16) + rank, torch.arange(4, dtype=torch.float32) - rank

    read = trace(program, inputs, 2)
    gather, wait, world = C10D + "all_gather_into_tensor.default", C10D + "wait_tensor.default", GroupArg("world")
    floats = tuple(struct.pack("<4f", *(i - rank for i in range(4))) for rank in range(2))
    bfloats = (bytes.fromhex("0000803f0040"), bytes.fromhex("803f00404040"))
    assert read == Program(
        2,
        (Group("world", ((0, 1),)),),
        (TensorSpec((3,), "bfloat16", data=bfloats), TensorSpec((4,), "float32", data=floats)),
        (Op(gather, (Ref(0), 2, world)), Op(gather, (Ref(1), 2, world)), Op(wait, (Ref(2),)), Op(wait, (Ref(3),))),
        (Ref(4), Ref(5)),
    )


def test_duplicate_waits_are_read() -> None:
    """Two waits on one start stay two, each with its own user."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD
        first = ops.all_gather_into_tensor(a, group.size(), group.group_name)
        second = ops.all_gather_into_tensor(b, group.size(), group.group_name)
        return ops.wait_tensor(first) + 1, ops.wait_tensor(first) * 2, ops.wait_tensor(second)

    read = trace(program, per_rank([0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]), 2)
    waits = [op.args for op in read.ops if op.target == C10D + "wait_tensor.default"]
    assert waits == [(Ref(2),), (Ref(2),), (Ref(3),)]
    assert read.outputs == (Ref(5), Ref(7), Ref(8))


def test_a_returned_start_is_read() -> None:
    """A start that is returned beside its wait is an output of its own."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD
        start = ops.all_gather_into_tensor(a, group.size(), group.group_name)
        done = ops.wait_tensor(start)
        return start, done, ops.wait_tensor(ops.all_gather_into_tensor(b, group.size(), group.group_name))

    read = trace(program, per_rank([0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]), 2)
    assert read.outputs == (Ref(2), Ref(3), Ref(5))


def test_large_inputs_are_read() -> None:
    """Inputs of 16 bytes and 4 MiB are read whole."""

    def program(small: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.wait_tensor(ops.all_reduce(t, "sum", name())) for t in (small, large))

    read = trace(program, lambda rank, world_size: (torch.ones(4) + rank, torch.ones(1 << 20)), 2)
    assert [[len(entry) for entry in spec.data or ()] for spec in read.inputs] == [[16, 16], [1 << 22, 1 << 22]]
    assert [op.target for op in read.ops] == [C10D + "all_reduce.default", C10D + "wait_tensor.default"] * 2


def test_a_functional_write_is_read() -> None:
    """An index_put of a collective's input keeps its list of indices, and integer inputs keep their values."""

    def program(a: Tensor, b: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        x = a * 2
        first = ops.wait_tensor(ops.all_reduce(x, "sum", name()))
        written = torch.index_put(x, (index,), values)
        return first, ops.wait_tensor(ops.all_reduce(b, "sum", name())), written

    def inputs(rank: int, world_size: int) -> tuple[Tensor, ...]:
        return torch.arange(8.0), torch.arange(4.0), torch.tensor([0, 3]), torch.tensor([-1000.0, -2000.0])

    read = trace(program, inputs, 2)
    assert Op("aten.index_put.default", (Ref(4), (Ref(2),), Ref(3))) in read.ops
    assert read.inputs[2] == TensorSpec((2,), "int64", data=(struct.pack("<2q", 0, 3),) * 2)


def targets(program: Program) -> list[tuple[str, tuple[int, ...] | None]]:
    """Each op's name, and the ranks that run it."""
    return [(op.target, op.ranks) for op in program.ops]


def one(function: Function, world_size: int = 2) -> Program:
    """The program of a function of one vector of four."""
    return trace(function, per_rank([0.0, 1.0, 2.0, 3.0]), world_size)


def test_rank_dependent_numbers_fold() -> None:
    """A number that differs by rank becomes one op with a constant for each rank, signs of zero included."""
    assert one(lambda x: x + dist.get_rank()).ops == (Op("aten.add.Tensor", (Ref(0), PerRank((0, 1)))),)
    zeros = one(lambda x: x * (-0.0 if dist.get_rank() else 0.0)).ops[0].args[1]
    assert isinstance(zeros, PerRank) and [str(v) for v in zeros.values] == ["0.0", "-0.0"]


def test_numbers_that_json_lacks_are_kept() -> None:
    """Infinities and NaN are FloatArg; where only one rank has one, each rank gets its own op."""
    assert one(lambda x: x * float("-inf")).ops == (Op("aten.mul.Tensor", (Ref(0), FloatArg("-inf"))),)
    mixed = one(lambda x: x * (float("nan") if dist.get_rank() else 1.0))
    assert [(op.args[1], op.ranks) for op in mixed.ops] == [(1.0, (0,)), (FloatArg("nan"), (1,))]


def test_constants_become_inputs() -> None:
    """A tensor made from Python values, different on each rank, and one found outside the function, are inputs with
    data.
    """
    outside = torch.tensor([9.0, 8.0, 7.0, 6.0])
    read = one(lambda x: x[torch.tensor([0, 3 * dist.get_rank()])] + outside[:2])
    assert [spec.dtype for spec in read.inputs] == ["float32", "int64", "float32"]
    assert read.inputs[1].data == (struct.pack("<2q", 0, 0), struct.pack("<2q", 0, 3))
    assert read.inputs[2].data == (struct.pack("<4f", 9, 8, 7, 6),) * 2
    assert read.ops[0] == Op("aten.index.Tensor", (Ref(0), (Ref(1),)))


def test_a_written_constant_is_copied() -> None:
    """A constant that the function writes or returns is copied first, so that the input keeps its value."""

    def program(x: Tensor) -> Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
        constant.add_(x)
        return constant

    assert [op.target for op in one(program).ops] == ["aten.clone.default", "aten.add_.Tensor"]
    assert [op.target for op in one(lambda x: torch.tensor([1.0])).ops] == ["aten.clone.default"]


def test_a_constant_of_one_rank_is_an_input_of_all() -> None:
    """A constant that only one rank makes is an input on all ranks, zero where it is not used."""
    read = one(lambda x: x + torch.tensor([1.0, 1.0, 1.0, 1.0]) if dist.get_rank() else x * 2)
    assert read.inputs[1].data == (struct.pack("<4f", 0, 0, 0, 0), struct.pack("<4f", 1, 1, 1, 1))
    assert read.divergent


def test_rank_dependent_control_flow_diverges() -> None:
    """A collective that one rank alone starts is an op of that rank, the program is divergent, and each rank returns
    its own.
    """

    def program(x: Tensor) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(x, "sum", name())) if dist.get_rank() == 0 else x

    read = one(program)
    assert read.divergent
    assert targets(read) == [
        (C10D + "all_reduce.default", (0,)),
        (C10D + "wait_tensor.default", (0,)),
        ("aten.alias.default", (1,)),
    ]
    returned = [[n.name for n in next(reversed(build(read, rank).graph.nodes)).args[0]] for rank in range(2)]
    assert returned == [["wait_tensor"], ["alias"]]


def test_ranks_that_return_in_another_order_do_so() -> None:
    """Where ranks return the same values in different orders, each rank's graph returns them in its own."""
    read = trace(lambda x, y: (x, y) if dist.get_rank() else (y, x), per_rank([1.0], [2.0]), 2)

    def source(node: Node) -> str:
        return node.args[0].name if node.op == "call_function" else node.name

    returned = [[source(n) for n in next(reversed(build(read, r).graph.nodes)).args[0]] for r in range(2)]
    assert returned == [["arg1_1", "arg0_1"], ["arg0_1", "arg1_1"]]


@pytest.mark.parametrize(
    ("function", "op", "node"),
    [
        (lambda x: torch.erfinv(x), "aten.erfinv.default", "erfinv"),
        (lambda x: x * x.sum().item(), "aten._local_scalar_dense.default", "_local_scalar_dense"),
        (lambda x: (dist.all_reduce(x), x)[1], "c10d.allreduce_.default", "allreduce_"),
        (lambda x: (x, 3), "int", "output"),
    ],
)
def test_what_is_not_in_the_table_is_refused(function: Function, op: str, node: str) -> None:
    """An operator or output that a Program cannot hold is refused with its name and its node."""
    with pytest.raises(Unsupported) as caught:
        one(function)
    assert (caught.value.op, caught.value.node) == (op, node)


def test_broken_preconditions_name_the_node() -> None:
    """A collective on a transposed tensor, which tracing lets through, is refused with the node that starts it."""
    with pytest.raises(InvalidProgram, match=r"\$\.ops\[1\].*must be contiguous \(node all_reduce\)"):
        trace(lambda x: ops.all_reduce(x.t(), "sum", name()), lambda r, w: (torch.ones(2, 3),), 2)


def test_what_tracing_adds_is_taken_out() -> None:
    """Detaches that tracing adds where autograd saves a tensor are no ops of the program; a user's own stays."""
    with_gradient = trace(lambda x: (x * 2).relu(), lambda r, w: (torch.ones(3, requires_grad=True),), 2)
    assert [op.target for op in with_gradient.ops] == ["aten.mul.Tensor", "aten.relu.default"]
    assert with_gradient.inputs[0].requires_grad
    assert len(one(lambda x: x.detach() * 2).ops) == 2


def test_outputs_are_flattened() -> None:
    """None is no output; tuples, lists and dicts are taken in order."""
    read = one(lambda x: (x, None, {"a": x * 2, "b": [x * 3]}))
    assert read.outputs == (Ref(0), Ref(1), Ref(2))


def partitions(program: Program) -> list[tuple[tuple[int, ...], ...]]:
    """The parts of every group."""
    return [group.parts for group in program.groups]


def test_groups_fold_to_partitions() -> None:
    """Groups that ranks call by different names in one statement are one partition; equal parts under two names are
    two.
    """

    def halves(x: Tensor) -> tuple[Tensor, ...]:
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = low if dist.get_rank() < 2 else high
        return ops.wait_tensor(ops.all_reduce(x, "sum", mine.group_name)), ops.all_reduce(x, "max", name())

    def twice(x: Tensor) -> tuple[Tensor, ...]:
        same = dist.new_group([0, 1])
        return ops.all_reduce(x, "sum", same.group_name), ops.all_reduce(x, "sum", name())

    read = one(halves, 4)
    assert partitions(read) == [((0, 1), (2, 3)), ((0, 1, 2, 3),)] and not read.divergent
    assert partitions(one(twice)) == [((0, 1),)] * 2
    assert len({group.name for group in one(twice).groups}) == 2


def test_crossing_groups_stay_apart() -> None:
    """Ranks that run one statement on groups that overlap get a statement each."""

    def chain(x: Tensor) -> Tensor:
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        mine = first if dist.get_rank() == 0 else second
        return ops.wait_tensor(ops.all_reduce(x, "sum", mine.group_name))

    read = one(chain, 3)
    assert [op.ranks for op in read.ops if "all_reduce" in op.target] == [(0,), (1, 2)]
    assert partitions(read) == [((0, 1),), ((1, 2),)] and read.divergent


def test_uneven_groups_diverge() -> None:
    """Groups of different sizes in one statement make a divergent program, with each rank's size."""

    def uneven(x: Tensor) -> Tensor:
        pair, alone = dist.new_group([0, 1]), dist.new_group([2])
        mine = pair if dist.get_rank() < 2 else alone
        return ops.wait_tensor(ops.all_gather_into_tensor(x, mine.size(), mine.group_name))

    read = one(uneven, 3)
    assert read.divergent and partitions(read) == [((0, 1), (2,))]
    assert read.ops[0].args[1] == PerRank((2, 2, 1))


def test_meshes_are_read() -> None:
    """A mesh made in the function from lists, or before it by ``inputs``, gives its dimensions as groups."""
    held: dict[str, DeviceMesh] = {}

    def made_here(x: Tensor) -> tuple[Tensor, ...]:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        return funcol.all_reduce(x, "sum", mesh["dp"].get_group()), funcol.all_reduce(x, "sum", (mesh, 1))

    def made_before(x: Tensor) -> tuple[Tensor, ...]:
        return funcol.all_reduce(x, "sum", held["mesh"].get_group("dp")), funcol.all_reduce(x, "sum", (held["mesh"], 1))

    def inputs(rank: int, world_size: int) -> tuple[Tensor, ...]:
        held["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return (torch.ones(4),)

    for function, given_by in ((made_here, per_rank([0.0] * 4)), (made_before, inputs)):
        assert partitions(trace(function, given_by, 4)) == [((0, 2), (1, 3)), ((0, 1), (2, 3))]
    with pytest.raises(Unsupported, match="must be made before, by inputs"):
        trace(lambda x: (init_device_mesh("cpu", (2,)), x)[1], per_rank([0.0]), 2)


def test_shared_memory_is_read() -> None:
    """Inputs that share memory are views of the first that covers it, or of an unused input before them where none
    does.
    """

    def covering(rank: int, world_size: int) -> tuple[Tensor, ...]:
        base = torch.arange(8.0) + rank
        return base, base[2:5]

    def gapped(rank: int, world_size: int) -> tuple[Tensor, ...]:
        base = torch.arange(8.0) + rank
        return base[::2], base[1::2]

    first = trace(lambda a, b: (a, b), covering, 2)
    assert [(s.shape, s.storage_offset, s.view_of) for s in first.inputs] == [((8,), 0, None), ((3,), 2, 0)]
    second = trace(lambda a, b: (a + b, b), gapped, 2)
    assert [(s.shape, s.stride, s.storage_offset, s.view_of) for s in second.inputs] == [
        ((8,), None, 0, None),
        ((4,), (2,), 0, 0),
        ((4,), (2,), 1, 0),
    ]
    assert second.inputs[0].data == tuple(struct.pack("<8f", *(i + rank for i in range(8))) for rank in range(2))
    assert second.ops[0].args == (Ref(1), Ref(2)) and second.outputs == (Ref(3), Ref(2))


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, tuple[int, ...], tuple[int, ...], int]]]:
    """Sizes of storages, and tensors in them: the storage's number, shape, stride and offset; gaps and overlaps
    included.
    """
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(0, len(sizes) - 1))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        stride = tuple(draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape))))
        reach = storage_numel(shape, stride)
        if reach <= sizes[number]:
            found.append((number, shape, stride, draw(st.integers(0, sizes[number] - reach))))
    return sizes, found


def placed(drawn: tuple[list[int], list[Any]], rank: int) -> tuple[Tensor, ...]:
    """The tensors that ``views`` describes, with other values on every rank."""
    sizes, found = drawn
    storages = [torch.arange(float(size)) + 100 * i + 1000 * rank for i, size in enumerate(sizes)]
    return tuple(storages[number].as_strided(*geometry) for number, *geometry in found)


def sharing(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the first that shares its storage."""
    seen: dict[int, int] = {}
    return [seen.setdefault(tensor_meta(t).storage, i) for i, t in enumerate(tensors)]


@given(views())
@example(([8], [(0, (4,), (2,), 0), (0, (3,), (2,), 1)]))
@QUICK
def test_inputs_come_back_as_they_were(drawn: tuple[list[int], list[Any]]) -> None:
    """Whatever memory inputs share, a run of the traced program is given the same values, geometry and sharing on
    each rank.
    """
    program = trace(lambda *tensors: tensors, lambda rank, world_size: placed(drawn, rank), 2)
    assert not list(structural_faults(program))
    for rank, held in enumerate(draw_inputs(program, "normal", Field(0, frozenset({"float32"})), 0)):
        came, were = [held.concrete[ref.value] for ref in program.outputs], placed(drawn, rank)
        assert [(t.tolist(), tensor_meta(t)[:4]) for t in came] == [(t.tolist(), tensor_meta(t)[:4]) for t in were]
        assert sharing(came) == sharing(were)


@given(views())
@QUICK
def test_geometry_without_values_is_read_back(drawn: tuple[list[int], list[Any]]) -> None:
    """Reading a built graph of inputs alone gives the same geometry and sharing, with an unused input at most where
    none reaches far enough.
    """
    program = trace(lambda *tensors: tensors, lambda rank, world_size: placed(drawn, rank), 1)
    read = program_from_graphs(built(program))
    assert plain(read) == plain(program)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (lambda r, w: (torch.ones(2 + r),), r"input 0 of rank 1: shape \(3,\); on rank 0 it is \(2,\)"),
        (lambda r, w: (torch.ones(2, 2) if r else torch.ones(2, 2).t(),), r"input 0 of rank 1: stride"),
        (lambda r, w: (torch.ones(2),) * (1 + r), "rank 1: 2 tensors; rank 0 has 1"),
        (lambda r, w: (torch.ones(2, requires_grad=bool(r)),), "requires_grad True; on rank 0 it is False"),
        (lambda r, w: (torch.ones(2, dtype=torch.complex64),), "complex64 at input 0"),
        (lambda r, w: (torch.ones(2).to_sparse(),), "sparse_coo at input 0"),
        (lambda r, w: (3,), "int at input 0 of rank 0"),
        (lambda r, w: (lambda t: (t, t.view(torch.int32)))(torch.ones(2)), "input 1: it shares memory with input 0"),
    ],
)
def test_inputs_that_no_program_has_are_refused(inputs: Callable[[int, int], Any], reason: str) -> None:
    """Inputs that differ between ranks in more than values, or that no TensorSpec describes, are refused with which
    and why.
    """
    with pytest.raises(Unsupported, match=reason):
        trace(lambda *tensors: tensors[0] + 1, inputs, 2)


def test_the_function_s_own_error_comes_out() -> None:
    """What the function raises is raised, and the process is no longer in a fake world then."""

    def failing(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the function's own")

    with pytest.raises(ZeroDivisionError, match="the function's own"):
        one(failing)
    assert not dist.is_initialized()


def test_unknown_groups_are_refused() -> None:
    """A graph that names a group which is not given is refused with the name and the node."""
    program = Program(
        2,
        (Group("pair", ((0, 1),)),),
        (TensorSpec((2,), "float32"),),
        (Op(C10D + "all_reduce.default", (Ref(0), "sum", GroupArg("pair"))),),
        (),
    )
    with pytest.raises(Unsupported, match=r"group 'pair' at all_reduce"):
        program_from_graphs(built(program))


def test_arguments_by_name_are_read_by_position() -> None:
    """A pass may give arguments by name; a Program has them by position, with defaults between, as the dispatcher
    records them.
    """
    program = Program(1, (), (TensorSpec((4, 6), "float32"),), (Op("aten.slice.Tensor", (Ref(0), 0, 0, 2)),), (Ref(1),))
    gm = build(program, 0)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args, node.kwargs = (node.args[0],), {"end": 2}
    assert program_from_graphs([gm]).ops == (Op("aten.slice.Tensor", (Ref(0), 0, None, 2)),)


def test_the_old_name_of_wait_is_read() -> None:
    """The wait of the old namespace is that of the present one."""
    program = Program(1, (), (TensorSpec((4,), "float32"),), (Op(C10D + "wait_tensor.default", (Ref(0),)),), (Ref(1),))
    gm = build(program, 0)
    old = torch.ops.c10d_functional.wait_tensor.default
    next(n for n in gm.graph.nodes if n.op == "call_function").target = old
    assert old is not resolve(C10D + "wait_tensor.default")
    assert program_from_graphs([gm]) == plain(program)


def longest(program: Program) -> Iterable[int]:
    """The lengths of the data of each input."""
    return (len(entry) for spec in program.inputs for entry in spec.data or ())


def test_values_round_trip_in_every_layout() -> None:
    """Values are stored row-major, whatever the strides, for every kind of element, and empty ones are empty."""
    transposed = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    read = trace(lambda *t: t, lambda r, w: (transposed, torch.tensor([True, False]), torch.ones(0, 3)), 2)
    assert read.inputs[0].stride == (1, 3)
    assert read.inputs[0].data == (struct.pack("<6h", 0, 3, 1, 4, 2, 5),) * 2
    assert read.inputs[1].data == (b"\x01\x00",) * 2
    assert list(longest(read)) == [12, 12, 2, 2, 0, 0]


def test_worlds_do_not_leak_into_inputs() -> None:
    """``inputs`` is called once a rank, inside that rank's world."""
    seen: list[tuple[int, int, int]] = []

    def inputs(rank: int, world_size: int) -> tuple[Tensor, ...]:
        seen.append((rank, dist.get_rank(), dist.get_world_size()))
        return (torch.ones(1),)

    trace(lambda x: x + 1, inputs, 3)
    assert seen == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    with fake_world(2, 1):
        trace(lambda x: x + 1, inputs, 1)
        assert dist.get_rank() == 1
