"""Questions about graphs have the answers that a plain search gives."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import Graph, Node

from harness.errors import Unsupported
from harness.graph import (
    Ancestors,
    build,
    collectives,
    is_collective,
    is_wait,
    resolve,
    start_of,
    target_name,
    tensor_meta,
    waits,
)
from harness.graph.private import private
from harness.ops import TABLE
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.strategies.collectives import collective_programs

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def above(node: Node) -> set[Node]:
    """All that ``node`` depends on, by a plain search."""
    found: set[Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source not in found:
            found.add(source)
            todo.extend(source.all_input_nodes)
    return found


@given(collective_programs(world_sizes=(2,), max_collectives=4))
@QUICK
def test_ancestors_are_those_of_a_search(program: Program) -> None:
    """One node reaches another where a search upwards finds it, whether all nodes are tracked or the collectives
    only.
    """
    graph = build(program, 0).graph
    everything, starts = Ancestors(graph), Ancestors(graph, collectives(graph))
    for node in graph.nodes:
        found = above(node)
        assert {n for n in graph.nodes if everything.reaches(n, node)} == found
        assert {n for n in collectives(graph) if starts.reaches(n, node)} == {n for n in found if is_collective(n)}


def test_ancestors_of_a_long_graph_come_quickly() -> None:
    """Ancestors of 10,000 nodes in a chain, all tracked, are found within a second."""
    graph = Graph()
    node = first = graph.placeholder("x")
    for _ in range(10_000):
        node = graph.call_function(torch.ops.aten.neg.default, (node,))
    start = time.perf_counter()
    ancestors = Ancestors(graph)
    assert time.perf_counter() - start < 1
    assert ancestors.reaches(first, node) and not ancestors.reaches(node, first) and not ancestors.reaches(node, node)


@given(collective_programs(world_sizes=(2, 3)))
@QUICK
def test_starts_and_waits_find_each_other(program: Program) -> None:
    """Each wait that a start lists names that start, and a wait without a view between is listed by its start."""
    graph = build(program, 0).graph
    for start in collectives(graph):
        assert all(is_wait(wait) and start_of(wait) is start for wait in waits(start))
    for wait in filter(is_wait, graph.nodes):
        source = wait.args[0]
        if is_collective(source) or (target_name(source) == "getitem" and is_collective(source.args[0])):
            assert wait in waits(start_of(wait))


def test_waits_are_found_through_items_and_starts_through_views() -> None:
    """Coalesced collectives are found through their items, and the start of a wait on a view through the view."""
    name, group = "_c10d_functional.", GroupArg("pair")
    ops = (
        Op(name + "all_gather_into_tensor_coalesced.default", ((Ref(0), Ref(0)), 2, group)),
        Op(name + "wait_tensor.default", (Ref(1, 1),)),
        Op("aten.view.default", (Ref(1, 0), (2, 4))),
        Op(name + "wait_tensor.default", (Ref(3),)),
        Op(name + "wait_tensor.default", (Ref(0),)),
        Op("aten.neg.default", (Ref(1, 0),)),
        Op(name + "wait_tensor.default", (Ref(6),)),
    )
    program = Program(2, (Group("pair", ((0, 1),)),), (TensorSpec((4,), "float32"),), ops, ())
    graph = build(program, 0).graph
    (start,) = collectives(graph)
    of_item, of_view, of_input, of_other = filter(is_wait, graph.nodes)
    assert waits(start) == [of_item]
    assert [start_of(w) for w in (of_item, of_view, of_input, of_other)] == [start, start, None, None]


def test_names_and_overloads_are_inverse() -> None:
    """Every operator of the table that the installed torch has resolves to an overload of that very name."""
    for target in TABLE:
        node = Graph().create_node("call_function", resolve(target))
        assert target_name(node) == target


@pytest.mark.parametrize(
    "name", ["aten.add", "aten", "aten.add.NoSuch", "no_such.op.default", "aten..", "bucketing.x.default"]
)
def test_what_torch_lacks_is_refused_by_name(name: str) -> None:
    """A name that is no overload of the installed torch is refused with the name."""
    with pytest.raises(Unsupported) as caught:
        resolve(name)
    assert caught.value.op == name


def test_private_names_that_moved_are_refused() -> None:
    """A private module or name that torch lacks is refused with that name and torch's version."""
    for module, name in (("torch._no_such_module", "x"), ("torch.fx", "_no_such_name")):
        with pytest.raises(Unsupported, match=torch.__version__.split("+")[0]) as caught:
            private(module, name)
        assert caught.value.op == f"{module}.{name}"


def test_metadata_of_a_tensor() -> None:
    """Sizes, strides and offset are in elements, the dtype is a name, and views have their base's storage."""
    base = torch.zeros(4, 6, dtype=torch.bfloat16)
    meta = tensor_meta(base[1:, ::2])
    assert meta[:4] == ((3, 3), (6, 2), "bfloat16", 6)
    assert meta.storage == tensor_meta(base).storage != tensor_meta(base.clone()).storage
