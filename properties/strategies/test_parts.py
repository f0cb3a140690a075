"""The parts that programs are made of: groups, input tensors, and what bytes stand for."""

from __future__ import annotations

from hypothesis import find, given, settings
from hypothesis import strategies as st

from harness.spec.program import Group, Program, TensorSpec, contiguous_stride, structural_faults
from harness.strategies import group_lists, tensor_specs
from harness.strategies.groups import partitions
from harness.strategies.tensors import ALL_DTYPES, Table

QUICK = settings(max_examples=100, deadline=None, database=None)


@QUICK
@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), group_lists(n))))
def test_groups_are_partitions(drawn: tuple[int, tuple[Group, ...]]) -> None:
    """Groups are different partitions of all ranks into equal parts, and the first is the whole world."""
    world_size, groups = drawn
    assert groups[0].parts == (tuple(range(world_size)),)
    assert len(set(groups)) == len(groups) and len({g.name for g in groups}) == len(groups)
    assert not list(structural_faults(Program(world_size, groups, (), (), ())))


def test_all_partitions_of_few_ranks_are_there() -> None:
    """Four ranks are parted in all three ways into pairs; eight ranks along every axis of a mesh."""
    pairs = {g.parts for g in partitions(4) if g.size == 2}
    assert pairs == {((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))}
    assert {((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))} <= {g.parts for g in partitions(8)}
    assert {g.size for g in partitions(6)} == {1, 2, 3, 6}
    assert [g.parts for g in partitions(1)] == [((0,),)] * 2


def test_group_lists_shrink_to_the_world() -> None:
    """The simplest list of groups is the world alone."""
    assert find(group_lists(4), lambda _: True) == (Group("world", ((0, 1, 2, 3),)),)


@QUICK
@given(tensor_specs())
def test_tensor_specs_are_valid(spec: TensorSpec) -> None:
    """Every drawn input is valid, and small."""
    assert not list(structural_faults(Program(1, (Group("world", ((0,),)),), (spec,), (), ())))
    assert max((0, *spec.shape)) <= 64


def test_tensor_specs_have_every_layout_and_dtype() -> None:
    """Inputs that are transposed, have gaps, an offset, no element or no dimension are drawn, and every dtype; the simplest is one float."""
    contiguous = lambda s: s.stride is None or s.stride == contiguous_stride(s.shape)  # noqa: E731
    assert find(tensor_specs(), lambda s: not contiguous(s) and s.stride[-1] == 1).shape
    assert find(tensor_specs(), lambda s: not contiguous(s) and s.stride[-1] == 2).shape
    assert find(tensor_specs(), lambda s: s.storage_offset == 3)
    assert find(tensor_specs(), lambda s: 0 in s.shape) and find(tensor_specs(), lambda s: s.shape == ())
    assert {find(tensor_specs(), lambda s, d=dtype: s.dtype == d).dtype for dtype in ALL_DTYPES} == set(ALL_DTYPES)
    assert find(tensor_specs(), lambda _: True) == TensorSpec((1,), "float32")


@QUICK
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200))
def test_tables_have_every_choice(weights: list[int]) -> None:
    """A table of up to 200 choices has each of them, in order, for all 256 bytes; the first for byte 0."""
    table: Table[int] = Table(*enumerate(weights))
    assert len(table.entries) == 256 and table[0] == 0
    assert table.entries == sorted(table.entries) and set(table.entries) == set(range(len(weights)))
