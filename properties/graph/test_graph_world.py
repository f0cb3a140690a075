"""Inside a fake world torch.distributed answers as one rank; outside everything is as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.errors import Unsupported
from harness.graph import build, collectives, fake_world
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec

ROWS = Group("rows", ((0, 1), (2, 3)))
COLUMNS = Group("columns", ((0, 2), (1, 3)))
ALL = Group("everyone", ((0, 1, 2, 3),))


def seen() -> dict[str, Any]:
    """All that c10d holds: its default group, its maps, and its counter of groups."""
    world = c10d._world
    maps = {name: dict(getattr(world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_to_tag")}
    return {"world": world, "default": world.default_pg, "count": world.group_count, **maps}


def resolves(name: str) -> bool:
    """Whether a group of that name is registered."""
    try:
        c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.fixture
def initialised(tmp_path: Path) -> Iterator[Any]:
    """A process group of the user's own, over gloo, with one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_groups_answer_as_the_rank(rank: int) -> None:
    """Ranks, sizes, names and members of every group are those of the rank's own part."""
    with fake_world(4, rank, (ROWS, COLUMNS, ALL)):
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 4, "fake")
        assert dist.group.WORLD is c10d._resolve_process_group("everyone")
        assert not resolves("world")
        for group in (ROWS, COLUMNS, ALL):
            part = next(p for p in group.parts if rank in p)
            found = c10d._resolve_process_group(group.name)
            assert found.group_name == group.name
            assert (dist.get_rank(found), dist.get_world_size(found)) == (part.index(rank), len(part))
            assert dist.get_process_group_ranks(found) == list(part)
            assert [dist.get_global_rank(found, i) for i in range(len(part))] == list(part)


def test_default_group_never_takes_a_name_that_is_taken() -> None:
    """A partial group called ``world`` keeps its name and size; the default group covers all ranks under another."""
    with fake_world(4, 2, (Group("world", ((0, 1), (2, 3))),)):
        assert dist.get_world_size() == 4
        assert dist.group.WORLD.group_name == "world_1"
        assert dist.get_process_group_ranks(c10d._resolve_process_group("world")) == [2, 3]


def test_groups_of_others_are_not_there() -> None:
    """A group without the rank does not resolve."""
    with fake_world(3, 2, (Group("two", ((0, 1),)),)):
        assert not resolves("two")


def test_nothing_is_left_behind() -> None:
    """After a world, and after an error in one, c10d is as before: no groups, no names, not initialised."""
    before = seen()
    with pytest.raises(KeyError), fake_world(4, 0, (ROWS,)):
        dist.new_group([0, 1])
        raise KeyError
    assert seen() == before
    assert not dist.is_initialized()
    assert not any(resolves(name) for name in ("rows", "world", "0"))


def test_a_user_s_own_group_comes_back(initialised: Any) -> None:
    """A group that the process had initialised is hidden inside a world, and afterwards works as before."""
    name, before = initialised.group_name, seen()
    with fake_world(4, 3, (Group(name, ((0, 1, 2, 3),)),)):
        assert dist.get_rank() == 3
        assert c10d._resolve_process_group(name) is not initialised
    assert seen() == before
    assert c10d._resolve_process_group(name) is initialised
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


def test_destroying_a_world_s_groups_harms_no_one(initialised: Any) -> None:
    """A function that destroys all process groups destroys those of its world only, and the world can be entered
    again.
    """
    before = seen()
    for _ in range(2):
        with fake_world(2, 1):
            assert dist.get_rank() == 1
            dist.destroy_process_group()
            assert not dist.is_initialized()
    assert seen() == before
    assert c10d._resolve_process_group(initialised.group_name) is initialised


def test_a_name_registered_apart_comes_back() -> None:
    """A name that c10d's maps do not know, but its registry does, is held again by whoever held it."""
    with fake_world(2, 0, (Group("mine", ((0, 1),)),)):
        holder = c10d._resolve_process_group("mine")
    c10d._register_process_group("rows", holder)
    try:
        with fake_world(4, 0, (ROWS,)):
            assert c10d._resolve_process_group("rows") is not holder
        assert c10d._resolve_process_group("rows") is holder
    finally:
        c10d._unregister_process_group("rows")


@given(st.lists(st.tuples(st.sampled_from(((), (ROWS,), (ROWS, COLUMNS), (ALL,))), st.integers(0, 3)), max_size=5))
@settings(max_examples=30, deadline=None)
def test_worlds_nest(worlds: list[tuple[tuple[Group, ...], int]]) -> None:
    """Leaving the innermost of nested worlds brings back the one around it, at every depth."""
    states: list[tuple[ExitStack, dict[str, Any]]] = []
    for groups, rank in worlds:
        stack = ExitStack()
        states.append((stack, seen()))
        stack.enter_context(fake_world(4, rank, groups))
        assert dist.get_rank() == rank
        assert [resolves(g.name) for g in (ROWS, COLUMNS, ALL)] == [g in groups for g in (ROWS, COLUMNS, ALL)]
    for stack, before in reversed(states):
        stack.close()
        assert seen() == before


def test_new_groups_have_the_same_name_on_every_rank() -> None:
    """Groups that a function makes are numbered anew in each world, so that ranks agree on their names."""
    names = []
    for rank in range(4):
        with fake_world(4, rank, (ROWS,)):
            pair = dist.new_group([0, 3])
            other = dist.new_group([1, 2])
            mine = pair if rank in (0, 3) else other
            assert dist.get_process_group_ranks(mine) == ([0, 3] if rank in (0, 3) else [1, 2])
            names.append((pair if rank in (0, 3) else other).group_name)
    assert names == ["0", "1", "1", "0"]


def test_a_real_backend_is_refused() -> None:
    """Asking for a group with a real backend inside a world is refused at once: nobody would ever come to meet it."""
    start = time.perf_counter()
    with fake_world(2, 0), pytest.raises(Unsupported, match="backend of its own"):
        dist.new_group([0, 1], backend="gloo")
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("rank", range(4))
def test_meshes_can_be_made(rank: int) -> None:
    """A DeviceMesh made inside a world, either way, has the rank's coordinates and parts."""
    with fake_world(4, rank):
        for mesh in (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), DeviceMesh("cpu", [[0, 1], [2, 3]])):
            assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]
            assert dist.get_process_group_ranks(mesh.get_group(0)) == [rank % 2, rank % 2 + 2]
            assert dist.get_process_group_ranks(mesh.get_group(1)) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_functional_collectives_run() -> None:
    """The functional collectives take groups by object, by name and by default, and give results of the right size."""
    with fake_world(4, 1, (ROWS,)):
        rows = c10d._resolve_process_group("rows")
        x = torch.ones(4)
        assert funcol.wait_tensor(funcol.all_gather_tensor(x, 0, rows)).shape == (8,)
        assert funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)).shape == (1,)
        assert funcol.wait_tensor(funcol.all_reduce(x, "sum", "rows")).shape == (4,)


@pytest.mark.parametrize("rank", range(4))
def test_torch_s_own_pass_runs(rank: int) -> None:
    """Torch's bucketing of all_gathers, followed by its topological sort, runs on a built graph as every rank."""
    from torch._inductor.fx_passes.bucketing import bucket_all_gather
    from torch._inductor.fx_passes.post_grad import stable_topological_sort

    gather, wait = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
    ops = tuple(
        op for i in (0, 1) for op in (Op(gather, (Ref(i), 2, GroupArg("columns"))), Op(wait, (Ref(2 + 2 * i),)))
    )
    inputs = (TensorSpec((4,), "float32"), TensorSpec((6,), "float32"))
    program = Program(4, (ROWS, COLUMNS), inputs, ops, (Ref(3), Ref(5)))
    gm = build(program, rank)
    with fake_world(4, rank, program.groups):
        bucket_all_gather(gm, None, "default")
        stable_topological_sort(gm.graph)
    gm.graph.lint()
    assert len(collectives(gm.graph)) == 1
    piece = next(n for n in gm.graph.nodes if n.op == "call_function" and n.target is torch.ops.aten.slice.Tensor)
    assert piece.args[2] == 10 * (rank // 2)


def test_switching_is_cheap() -> None:
    """Entering and leaving a world that was entered before takes less than 0.2 ms (the best of many)."""

    def switch() -> float:
        start = time.perf_counter()
        with fake_world(4, 1, (ROWS, COLUMNS, ALL)):
            pass
        return time.perf_counter() - start

    switch()
    assert min(switch() for _ in range(200)) < 0.2e-3


def test_ranks_outside_the_world_are_refused() -> None:
    """A rank that the world does not have is refused with what it may be."""
    with pytest.raises(ValueError, match="rank 4; must be from 0 to 3"), fake_world(4, 4):
        pass
