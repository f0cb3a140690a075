"""Graphs built from Programs are what torch would have traced, with metadata that is true on every node."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from harness.errors import InvalidProgram, Unsupported
from harness.graph import (
    build,
    collectives,
    emit,
    emit_item,
    fake_mode,
    fake_world,
    is_wait,
    resolve,
    target_name,
    tensor_meta,
)
from harness.ops import TABLE, OpError, infer_program
from harness.spec.program import Arg, DTypeArg, FloatArg, Group, GroupArg, Op, PerRank, Program, Ref, TensorSpec
from harness.strategies.collectives import collective_programs, divergent_programs

C10D = "_c10d_functional."
RUN_BY_TORCH = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
"""Not all_to_all: torch's kernels take empty split sizes literally, and give an empty result."""
PAIR = (Group("pair", ((0, 1),)),)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def single(
    target: str, *args: Arg, inputs: Sequence[TensorSpec] = (TensorSpec((4, 6), "float32"),), **kwargs: Arg
) -> Program:
    """A program of one op on two ranks."""
    return Program(2, PAIR, tuple(inputs), (Op(target, args, kwargs),), ())


def values_of(node: Node) -> list[Tensor]:
    """The node's tensors, however many."""
    value = node.meta["val"]
    return [value] if isinstance(value, Tensor) else list(value or ())


def interpreted(gm: GraphModule, program: Program, rank: int, mode: AbstractContextManager[Any]) -> dict[Node, Any]:
    """What torch makes of every node inside ``mode``, from zeros of the inputs' geometry and over a backend that
    moves nothing.
    """
    results: dict[Node, Any] = {}

    def load(arg: Any) -> Any:
        if isinstance(arg, Node):
            return results[arg]
        return [load(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    with fake_world(program.world_size, rank, program.groups), mode:
        for node, spec in zip(placeholders, program.inputs, strict=True):
            meta = tensor_meta(node.meta["val"])
            base = torch.zeros(1 << 12, dtype=getattr(torch, meta.dtype))
            base = base if spec.view_of is None else results[placeholders[spec.view_of]]
            results[node] = base.as_strided(meta.shape, meta.stride, meta.offset)
        for node in gm.graph.nodes:
            if node.op == "call_function":
                results[node] = node.target(*load(node.args), **{k: load(v) for k, v in node.kwargs.items()})
        for start in collectives(gm.graph):
            for value in [results[start]] if isinstance(results[start], Tensor) else results[start]:
                torch.ops._c10d_functional.wait_tensor(value)
    return results


def storages(values: Sequence[Tensor], same: Iterable[tuple[Tensor, Tensor]] = ()) -> list[int]:
    """For each tensor the first that shares its storage, where those of the pairs ``same`` count as one storage."""
    root: dict[int, int] = {}

    def find(key: int) -> int:
        while key in root:
            key = root[key]
        return key

    for one, other in same:
        left, right = find(tensor_meta(one).storage), find(tensor_meta(other).storage)
        if left != right:
            root[left] = right
    seen: dict[int, int] = {}
    return [seen.setdefault(find(tensor_meta(v).storage), i) for i, v in enumerate(values)]


def paired(gm: GraphModule, truth: dict[Node, Any]) -> Iterator[tuple[Node, Tensor, Tensor]]:
    """Every tensor of the graph, as its node says and as torch made it."""
    for node in gm.graph.nodes:
        if node.op != "output":
            result = truth[node]
            made = [result] if isinstance(result, Tensor) else list(result or ())
            yield from ((node, ours, theirs) for ours, theirs in zip(values_of(node), made, strict=True))


@given(collective_programs(world_sizes=(2, 3, 4), kinds=RUN_BY_TORCH), st.data())
@QUICK
def test_metadata_is_what_executes(program: Program, data: st.DataObject) -> None:
    """On every node metadata is exactly what torch's CPU kernels give, collectives included (an empty tensor's strides
    aside), and storages are shared where those share them, a wait counting as its operand.
    """
    rank = data.draw(st.integers(0, program.world_size - 1))
    gm = build(program, rank)
    triples = list(paired(gm, interpreted(gm, program, rank, nullcontext())))
    for node, ours, theirs in triples:
        if ours.numel():
            assert tensor_meta(ours)[:4] == tensor_meta(theirs)[:4], node.format_node()
        assert reaching(ours) == reaching(theirs), node.format_node()
    waited = [(n.meta["val"], n.args[0].meta["val"]) for n in gm.graph.nodes if is_wait(n)]
    assert storages([ours for _, ours, _ in triples], waited) == storages([theirs for _, _, theirs in triples])


@given(collective_programs(world_sizes=(2, 3, 4), kinds=RUN_BY_TORCH), st.data())
@QUICK
def test_metadata_is_what_torch_fakes(program: Program, data: st.DataObject) -> None:
    """On every node sizes, strides that reach something, dtype and shared storages are those of torch's own fake kernels.

    These stray from what executes where a collective has ``out``, which they do not return, and where a wait's operand
    has an offset, which they drop; there a graph has what executes.
    """
    rank = data.draw(st.integers(0, program.world_size - 1))
    gm = build(program, rank)
    truth = interpreted(gm, program, rank, fake_mode())
    triples = list(paired(gm, truth))
    for node, ours, theirs in triples:
        assert reaching(ours)[:3] == reaching(theirs)[:3], node.format_node()
    into_out = [(truth[n], truth[n.kwargs["out"]]) for n in gm.graph.nodes if "out" in n.kwargs]
    assert storages([ours for _, ours, _ in triples]) == storages([theirs for _, _, theirs in triples], into_out)


def reaching(value: Tensor) -> tuple[Any, ...]:
    """Metadata without the strides along which there is no second element."""
    meta = tensor_meta(value)
    strides = [step for size, step in zip(meta.shape, meta.stride, strict=True) if size > 1 and meta.numel]
    return meta.shape, strides, meta.dtype, meta.offset


@given(collective_programs(world_sizes=(2, 3)), st.integers(0, 1))
@QUICK
def test_graph_is_whole(program: Program, rank: int) -> None:
    """A built graph lints, has a fake tensor of its own on every node, and the output's metadata is its operands'."""
    gm = build(program, rank)
    gm.graph.lint()
    nodes = list(gm.graph.nodes)
    placeholders = [n.name for n in nodes if n.op == "placeholder"]
    assert placeholders == [f"arg{i}_1" for i in range(len(program.inputs))]
    own = [v for n in nodes if n.op != "output" and n.target is not operator.getitem for v in values_of(n)]
    assert len({id(v) for v in own}) == len(own)
    assert all(isinstance(v, FakeTensor) and v.fake_mode is fake_mode() and v.device.type == "cpu" for v in own)
    output = nodes[-1]
    assert len(output.meta["val"]) == len(program.outputs) == len(output.args[0])
    assert all(n.meta["val"] is v for n, v in zip(output.args[0], output.meta["val"], strict=True))


@given(collective_programs(world_sizes=(2,), kinds=RUN_BY_TORCH))
@QUICK
def test_graph_reads_as_a_traced_one(program: Program) -> None:
    """Tracing a built graph with make_fx gives the same operators, on the same operands, with arguments of the same
    types, where no operator is one that tracing takes apart, adds of its own accord, or renames.
    """
    gm = build(program, 0)
    assume(not any(is_composite(n.target) or is_detach(n) for n in gm.graph.nodes if n.op == "call_function"))
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with fake_world(2, 0, program.groups), fake_mode():
        traced = make_fx(gm)(*inputs)
    for node in reversed(list(traced.graph.nodes)):
        if is_detach(node) and not node.users:
            traced.graph.erase_node(node)
    assert described(traced.graph) == described(gm.graph)
    names = [n.name for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert names == [n.name for n in traced.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def is_detach(node: Node) -> bool:
    """Whether the node is a detach, which some versions trace as an alias."""
    return node.op == "call_function" and target_name(node) in ("aten.detach.default", "aten.alias.default")


def is_composite(target: Any) -> bool:
    """Whether torch runs the operator as several others, whatever the device."""
    is_overload = isinstance(target, torch._ops.OpOverload)
    return is_overload and target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def described(graph: Graph) -> list[Any]:
    """Every call that is no unused ``getitem``: its operator, and its arguments with defaults, and numbers for nodes.

    The result of an in-place operator is what it writes: tracing knows no difference.
    """
    nodes = [n for n in graph.nodes if n.op != "call_function" or n.target is not operator.getitem or n.users]
    numbers: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        spec = TABLE.get(target_name(node)) if node.op == "call_function" else None
        written = node.args[spec.writes[0]] if spec is not None and spec.writes else None
        numbers[node] = numbers[written] if isinstance(written, Node) else i

    def plain(arg: Any) -> Any:
        if isinstance(arg, Node):
            return f"%{numbers[arg]}"
        if isinstance(arg, (list, tuple)):
            return ["list" if isinstance(arg, list) else "tuple", *(plain(a) for a in arg)]
        return (type(arg).__name__, repr(arg))

    def whole(node: Node) -> list[Any]:
        if not isinstance(node.target, torch._ops.OpOverload):
            return list(node.args)
        parameters = [a for a in node.target._schema.arguments if not a.kwarg_only]
        return [*node.args, *(a.default_value for a in parameters[len(node.args) :])]

    return [
        (n.target, [plain(a) for a in whole(n)], {k: plain(v) for k, v in n.kwargs.items()})
        for n in nodes
        if n.op == "call_function"
    ]


def test_factories_say_what_traced_ones_say() -> None:
    """A factory names its device, one made like another tensor does not, as in torch's own traces."""
    shaped = single("aten.zeros.default", (3,), dtype=DTypeArg("int64"))
    like = single("aten.zeros_like.default", Ref(0))
    new = single("aten.new_empty.default", Ref(0), (3,))
    cpu = torch.device("cpu")
    assert call(shaped).kwargs == {"dtype": torch.int64, "device": cpu, "pin_memory": False}
    assert call(like).kwargs == call(new).kwargs == {"pin_memory": False}
    assert call(shaped).args == ([3],) and isinstance(call(shaped).args[0], list)


def call(program: Program, rank: int = 0) -> Node:
    """The first call of the program's graph."""
    return next(n for n in build(program, rank).graph.nodes if n.op == "call_function")


def test_several_results_come_in_torch_s_form() -> None:
    """A list of tensors stays a list, several returns are a tuple, and no return is None."""
    eight = (TensorSpec((8,), "float32"), TensorSpec((8,), "float32"))
    copy_in = single(
        "fsdp.all_gather_copy_in.default",
        (Ref(0),),
        Ref(1),
        (8,),
        8,
        0,
        inputs=(eight[0], TensorSpec((16,), "float32")),
    )
    assert isinstance(call(single("aten.split.Tensor", Ref(0), 2)).meta["val"], list)
    assert isinstance(call(copy_in).meta["val"], tuple)
    assert call(single("aten._foreach_copy_.default", (Ref(0),), (Ref(1),), inputs=eight)).meta["val"] is None


def test_only_used_items_are_taken() -> None:
    """Items of a tuple that nobody uses have no ``getitem``; the others follow their operator."""
    ops = (Op("aten.split.Tensor", (Ref(0), 1)), Op("aten.neg.default", (Ref(1, 2),)))
    program = Program(1, (), (TensorSpec((4, 6), "float32"),), ops, (Ref(1, 0), Ref(2)))
    names = [n.name for n in build(program, 0).graph.nodes]
    assert names == ["arg0_1", "split", "getitem", "getitem_1", "neg", "output"]


def test_views_of_a_wait_share_its_fake_storage() -> None:
    """A wait has a fresh fake storage, which its views share and the start does not, as torch's kernels give it."""
    ops = (
        Op(C10D + "all_reduce.default", (Ref(0), "sum", GroupArg("pair"))),
        Op(C10D + "wait_tensor.default", (Ref(1),)),
        Op("aten.view.default", (Ref(2), (24,))),
        Op("aten.mul_.Tensor", (Ref(3), 2)),
    )
    nodes = list(build(Program(2, PAIR, (TensorSpec((4, 6), "float32"),), ops, ()), 0).graph.nodes)
    start, wait, view, written = (tensor_meta(n.meta["val"]).storage for n in nodes[1:5])
    assert start != wait == view == written


def test_an_output_returned_twice_has_metadata_twice() -> None:
    """The output's metadata has one entry a returned value, repeated ones included."""
    program = Program(1, (), (TensorSpec((2,), "float32"),), (), (Ref(0), Ref(0)))
    assert len(next(reversed(build(program, 0).graph.nodes)).meta["val"]) == 2


def test_per_rank_constants_give_per_rank_metadata() -> None:
    """Where a constant differs by rank, so do the offsets and shapes that follow from it."""
    piece = Op("aten.slice.Tensor", (Ref(0), 0, PerRank((0, 3)), PerRank((3, 4))))
    program = Program(2, (), (TensorSpec((4,), "float32"),), (piece,), (Ref(1),))
    wrong_for_rank_1 = infer_program(program)
    seen = [tensor_meta(call_of(build(program, rank, wrong_for_rank_1)).meta["val"]) for rank in range(2)]
    assert [(m.shape, m.offset) for m in seen] == [((3,), 0), ((1,), 3)]
    assert [call_of(build(program, rank)).args[2] for rank in range(2)] == [0, 3]


def call_of(gm: GraphModule) -> Node:
    """The first call of a graph."""
    return next(n for n in gm.graph.nodes if n.op == "call_function")


def test_uneven_parts_give_per_rank_shapes() -> None:
    """In a divergent program a gather is as large as the part of the rank that builds it."""
    group = Group("uneven", ((0, 1), (2,)))
    gather = Op(C10D + "all_gather_into_tensor.default", (Ref(0), PerRank((2, 2, 1)), GroupArg("uneven")))
    program = Program(3, (group,), (TensorSpec((4,), "float32"),), (gather,), (Ref(1),), divergent=True)
    shapes = [tuple(call_of(build(program, rank)).meta["val"].shape) for rank in range(3)]
    assert shapes == [(8,), (8,), (4,)]


@given(divergent_programs())
@QUICK
def test_divergent_graphs_have_their_own_statements(program: Program) -> None:
    """A rank's graph has as many calls as the program has statements for that rank, and lints."""
    for rank in range(program.world_size):
        gm = build(program, rank)
        gm.graph.lint()
        calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        assert len(calls) == sum(op.ranks is None or rank in op.ranks for op in program.ops)


def test_a_rank_returns_what_it_computes() -> None:
    """An output that a rank of a divergent program does not compute is not among those it returns."""
    ops = (Op("aten.neg.default", (Ref(0),), ranks=(0,)), Op("aten.abs.default", (Ref(0),)))
    program = Program(2, (), (TensorSpec((2,), "float32"),), ops, (Ref(1), Ref(2)), divergent=True)
    returned = [[n.name for n in next(reversed(build(program, r).graph.nodes)).args[0]] for r in range(2)]
    assert returned == [["neg", "abs_1"], ["abs_1"]]


def test_a_value_that_a_rank_lacks_is_refused() -> None:
    """Using what another rank alone computes is refused with value, op and rank; so is a group of others."""
    ops = (Op("aten.neg.default", (Ref(0),), ranks=(0,)), Op("aten.abs.default", (Ref(1),)))
    lacking = Program(2, (), (TensorSpec((2,), "float32"),), ops, (), divergent=True)
    with pytest.raises(Unsupported, match=r"value 1 at \$\.ops\[1\]: rank 1 does not compute it"):
        build(lacking, 1)
    reduce = Op(C10D + "all_reduce.default", (Ref(0), "sum", GroupArg("one")))
    alien = Program(2, (Group("one", ((0,),)),), (TensorSpec((2,), "float32"),), (reduce,), (), divergent=True)
    with pytest.raises(Unsupported, match=r"group 'one' at \$\.ops\[0\]: rank 1 is no member"):
        build(alien, 1)


def test_broken_preconditions_are_named_by_rank() -> None:
    """A precondition that breaks on one rank only is reported with the op's own path and the rank."""
    ops = (
        Op("aten.abs.default", (Ref(0),), ranks=(0,)),
        Op("aten.view.default", (Ref(0), (PerRank((4, 5)),))),
    )
    program = Program(2, (), (TensorSpec((4,), "float32"),), ops, (), divergent=True)
    build(program, 0)
    with pytest.raises(InvalidProgram, match=r"\$\.ops\[1\].*\(on rank 1\)"):
        build(program, 1)
    with pytest.raises(ValueError, match="rank 2; must be from 0 to 1"):
        build(program, 2)


def test_no_code_is_generated() -> None:
    """Building leaves code generation to the first call, which then computes what the program says."""
    program = Program(
        1, (), (TensorSpec((3,), "float32"),), (Op("aten.mul.Tensor", (Ref(0), FloatArg("inf"))),), (Ref(1),)
    )
    gm = build(program, 0)
    assert "_code" not in vars(gm)
    assert gm(torch.ones(3))[0].tolist() == [float("inf")] * 3
    assert "_code" in vars(gm)


@pytest.mark.parametrize("in_world", [True, False])
def test_emit_gives_true_metadata(in_world: bool) -> None:
    """``emit`` knows the size of a group from the call, from the process, or else takes the least that fits."""
    gm = build(single("aten.neg.default", Ref(0), inputs=(TensorSpec((4,), "float32"),)), 0)
    graph, x = gm.graph, next(iter(gm.graph.nodes))
    with graph.inserting_after(x):
        with fake_world(2, 0, PAIR if in_world else ()):
            sent = emit(graph, C10D + "broadcast.default", (x, 1, "pair"))
            split = emit(graph, C10D + "all_to_all_single.default", (x, [1, 3], [2, 2], "pair"))
            gathered = emit(graph, resolve(C10D + "all_gather_into_tensor.default"), (x, 2, "pair"))
            several = emit(graph, C10D + "all_gather_into_tensor_coalesced.default", ([x, x], 2, "pair"))
            item = emit_item(graph, several, 1)
        outside = emit(graph, "aten.erfinv.default", (x,))
        written = emit(graph, "aten.erfinv_.default", (x,))
    shapes = [tuple(n.meta["val"].shape) for n in (sent, split, gathered, item, outside)]
    assert shapes == [(4,), (4,), (8,), (8,), (4,)]
    assert written.meta["val"] is not x.meta["val"]
    assert tensor_meta(written.meta["val"]) == tensor_meta(x.meta["val"])


@given(collective_programs(world_sizes=(2,)))
@QUICK
def test_emit_agrees_with_build(program: Program) -> None:
    """A graph copied call by call with ``emit`` has the metadata that ``build`` gave it, shared storages included."""
    gm = build(program, 0)
    copy, nodes = Graph(), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = copy.placeholder(node.name)
            nodes[node].meta["val"] = node.meta["val"]
        elif node.target is operator.getitem:
            nodes[node] = emit_item(copy, nodes[node.args[0]], node.args[1])
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, nodes.__getitem__)
            nodes[node] = emit(
                copy, node.target, args, dict(node.kwargs) | torch.fx.map_arg(node.kwargs, nodes.__getitem__)
            )
    ours = [v for node in nodes.values() for v in values_of(node)]
    theirs = [v for node in nodes for v in values_of(node)]
    assert [tensor_meta(v)[:4] for v in ours] == [tensor_meta(v)[:4] for v in theirs]
    assert storages(ours) == storages(theirs)


def test_refused_calls_leave_the_graph_alone() -> None:
    """``emit`` of a call that cannot be, by itself or in the process's group of that name, leaves no node behind."""
    gm = build(single("aten.neg.default", Ref(0)), 0)
    x, before = next(iter(gm.graph.nodes)), len(gm.graph.nodes)
    with gm.graph.inserting_after(x):
        with fake_world(2, 0, PAIR), pytest.raises(OpError, match="source 2; must be from 0 to 1"):
            emit(gm.graph, C10D + "broadcast.default", (x, 2, "pair"))
        with pytest.raises(OpError, match="hold"):
            emit(gm.graph, "aten.view.default", (x, [5]))
        with pytest.raises(Unsupported, match=r"aten\.no_such_operator\.default"):
            emit(gm.graph, "aten.no_such_operator.default", (x,))
    assert len(gm.graph.nodes) == before
    assert not collectives(gm.graph)
