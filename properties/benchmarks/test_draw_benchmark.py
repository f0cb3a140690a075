"""How long drawing a program takes; reported, not judged."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pytest_benchmark.fixture import BenchmarkFixture

from harness.spec.program import Program
from harness.strategies import collective_programs

NUM_PROGRAMS = 500


@pytest.mark.parametrize("mutation", ["any", "epilogue"])
def test_draw(benchmark: BenchmarkFixture, mutation: str) -> None:
    """Draw ``NUM_PROGRAMS`` programs through Hypothesis; ``extra_info`` has the milliseconds, ops and inputs of one."""
    num_ops: list[int] = []

    @settings(max_examples=NUM_PROGRAMS, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(collective_programs(world_sizes=(2, 4), mutation=mutation))  # type: ignore[arg-type]
    def draw(program: Program) -> None:
        num_ops.append(len(program.ops))

    benchmark.pedantic(draw, rounds=3, warmup_rounds=1)
    assert len(num_ops) == 4 * NUM_PROGRAMS
    if benchmark.stats is not None:
        benchmark.extra_info["draw_ms"] = benchmark.stats.stats.mean / NUM_PROGRAMS * 1e3
    benchmark.extra_info["num_ops"] = sum(num_ops) / len(num_ops)
