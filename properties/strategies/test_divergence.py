"""Divergent programs: marked, valid in structure, and divergent in every way that is promised."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from harness.ops import TABLE, infer_program
from harness.spec.program import GroupArg, Program, decode_program, encode_program, structural_faults
from harness.strategies import collective_programs, divergent_programs
from properties.strategies.anatomy import operands

QUICK = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(divergent_programs())
def test_divergent_programs_are_valid_in_structure(program: Program) -> None:
    """A divergent program says so, survives JSON, and meets every operator's preconditions."""
    assert program.divergent
    assert not list(structural_faults(program))
    assert decode_program(encode_program(program)) == program
    infer_program(program)


@QUICK
@given(divergent_programs())
def test_ranks_use_only_what_they_computed(program: Program) -> None:
    """No rank refers to a value that it did not compute, and every rank computes every output."""
    ranks = [set(range(program.world_size))] * len(program.inputs)
    for op in program.ops:
        own = set(range(program.world_size) if op.ranks is None else op.ranks)
        assert own and all(own <= ranks[ref.value] for ref in operands(op))
        ranks.append(own)
    assert all(ranks[ref.value] == set(range(program.world_size)) for ref in program.outputs)


@QUICK
@given(divergent_programs())
def test_ranks_start_only_collectives_of_their_groups(program: Program) -> None:
    """A rank that is in no part of a group starts no collective on it."""
    members = {g.name: {r for part in g.parts for r in part} for g in program.groups}
    for op in program.ops:
        if TABLE[op.target].collective is not None:
            own = set(range(program.world_size) if op.ranks is None else op.ranks)
            assert all(own <= members[arg.name] for arg in op.args if isinstance(arg, GroupArg))


@lru_cache(maxsize=1)
def _ways() -> dict[str, int]:
    counts = dict.fromkeys(("absent", "out of order", "another op", "partial group", "unequal group"), 0)

    @settings(max_examples=600, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(divergent_programs())
    def count(program: Program) -> None:
        sequences = [_collectives(program, rank) for rank in range(program.world_size)]
        longest = max(sequences, key=len)
        counts["absent"] += any(len(s) < len(longest) for s in sequences)
        same_length = [s for s in sequences if len(s) == len(longest)]
        counts["out of order"] += any(s != longest and sorted(s) == sorted(longest) for s in same_length)
        counts["another op"] += any(sorted(s) != sorted(longest) for s in same_length)
        covered = [[r for part in g.parts for r in part] for g in program.groups]
        counts["partial group"] += any(len(c) < program.world_size for c in covered)
        counts["unequal group"] += any(len({len(part) for part in g.parts}) > 1 for g in program.groups)

    count()
    return counts


def _collectives(program: Program, rank: int) -> list[str]:
    """What one rank issues, in order, each in words."""
    return [
        f"{op.target}{op.args}" for op in program.ops if TABLE[op.target].collective is not None and (op.ranks is None or rank in op.ranks)
    ]


@pytest.mark.parametrize("way", ["absent", "out of order", "another op", "partial group", "unequal group"])
def test_every_divergence_is_drawn(way: str) -> None:
    """Collectives that a rank leaves out, starts out of order or starts otherwise, and uneven groups all stand in some drawn programs."""
    assert _ways()[way] >= 5


def test_divergence_shrinks() -> None:
    """The smallest program with a rank that leaves a collective out has that one alone."""
    program = find(
        collective_programs(world_sizes=(2, 4), divergent=True),
        lambda p: any(op.ranks for op in p.ops),
        settings=settings(max_examples=2000, database=None, deadline=None, derandomize=True),
    )
    assert program.world_size == 2 and len(program.ops) == 2 and {op.ranks for op in program.ops} == {(0,)}
