"""How long it takes to make a Program's graph: built from the table beside traced by make_fx, on the same program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from harness.graph import Ancestors, build, fake_mode, fake_world
from harness.ops import infer_program
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec

pytest.importorskip("pytest_benchmark")

PAIR = Group("pair", ((0, 1),))
ROUND = 7
"""Ops in one round of ``program``: a gather, its wait, and what packs and unpacks around them."""


def program(num_ops: int) -> Program:
    """A chain of gathers with pointwise operators and views between them; inputs and output make three more nodes."""
    ops: list[Op] = []
    value = 0
    while len(ops) < num_ops:
        first = 2 + len(ops)
        ops += [
            Op("aten.mul.Tensor", (Ref(value), 2.0)),
            Op("_c10d_functional.all_gather_into_tensor.default", (Ref(first), 2, GroupArg("pair"))),
            Op("_c10d_functional.wait_tensor.default", (Ref(first + 1),)),
            Op("aten.slice.Tensor", (Ref(first + 2), 0, 0, 4)),
            Op("aten.view.default", (Ref(first + 3), (6, 4))),
            Op("aten.add.Tensor", (Ref(first + 4), 1.0)),
            Op("aten.view.default", (Ref(first + 5), (4, 6))),
        ]
        value = first + ROUND - 1
    inputs = (TensorSpec((4, 6), "float32"), TensorSpec((8,), "bfloat16"))
    return Program(2, (PAIR,), inputs, tuple(ops[:num_ops]), (Ref(1 + num_ops),))


SMALL, LARGE = program(22), program(10_000)


def traced(gm: GraphModule) -> GraphModule:
    """The same graph by tracing: a call of every operator through Python, over torch's fake kernels."""
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]

    def run(*args: Any) -> Any:
        return torch.fx.Interpreter(gm).run(*args)

    with fake_world(2, 0, (PAIR,)), fake_mode():
        return make_fx(run)(*inputs)


@pytest.mark.benchmark(group="graph of 25 nodes")
def test_build(benchmark: Any) -> None:
    """Building 25 nodes from the table, metadata memoised, takes at most 4 ms (the median)."""
    build(SMALL, 0)
    gm = benchmark(build, SMALL, 0)
    assert len(gm.graph.nodes) == 25
    limit(benchmark, 4e-3)


@pytest.mark.benchmark(group="graph of 25 nodes")
def test_build_with_metadata(benchmark: Any) -> None:
    """Building 25 nodes where the caller has the metadata, as for every rank after the first."""
    metas = infer_program(SMALL)
    assert len(benchmark(build, SMALL, 1, metas).graph.nodes) == 25
    limit(benchmark, 4e-3)


@pytest.mark.benchmark(group="graph of 25 nodes")
def test_make_fx(benchmark: Any) -> None:
    """Tracing the same 25 nodes with make_fx."""
    gm = build(SMALL, 0)
    assert len(benchmark(traced, gm).graph.nodes) == 25


@pytest.mark.benchmark(group="graph of 10,003 nodes")
@pytest.mark.parametrize(
    ("work", "limit_s"),
    [(lambda: build(LARGE, 0), 1.5), (lambda: infer_program(LARGE), 0.5)],
    ids=["build", "infer_program"],
)
def test_large(benchmark: Any, work: Callable[[], Any], limit_s: float) -> None:
    """10,003 nodes are built within 1.5 s, of which their metadata take at most 0.5 s (the best of five rounds)."""
    benchmark.pedantic(work, rounds=5, warmup_rounds=1)
    limit(benchmark, limit_s, of="min")


@pytest.mark.benchmark(group="graph of 10,003 nodes")
def test_large_ancestors(benchmark: Any) -> None:
    """Ancestors of 10,003 nodes, all of them tracked, are found within 0.5 s (the best of five rounds)."""
    graph = build(LARGE, 0).graph
    benchmark.pedantic(Ancestors, (graph,), rounds=5, warmup_rounds=1)
    limit(benchmark, 0.5, of="min")


@pytest.mark.benchmark(group="fake world")
def test_switch(benchmark: Any) -> None:
    """Entering and leaving a fake world that was entered before takes at most 0.2 ms (the median)."""
    groups = (PAIR, Group("each", ((0,), (1,))))

    def switch() -> None:
        with fake_world(2, 1, groups):
            pass

    switch()
    benchmark(switch)
    limit(benchmark, 0.2e-3)


def limit(benchmark: Any, seconds: float, *, of: str = "median") -> None:
    """Fail where the median, or another figure, is above ``seconds``; switched-off benchmarks measure nothing."""
    if benchmark.stats is not None:
        assert getattr(benchmark.stats.stats, of) <= seconds
