"""Cases a second on four ranks: lockstep beside torch's own ways to run several ranks, on the same program in one run.

Run with ``pytest properties/benchmarks -o addopts=``; the ratios are printed and stored in the benchmark's ``extra_info``.
"""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from harness.executors.algebra import Field
from harness.executors.inputs import draw_inputs, fresh
from harness.executors.lockstep import Lockstep
from harness.graph import build
from properties.benchmarks.spawned import NUM_CONTINUOUS, seconds_of, twenty_nodes

def test_lockstep_trial(benchmark: BenchmarkFixture) -> None:
    """One trial of 20 nodes on 4 ranks, field and concrete halves together."""
    program = twenty_nodes()
    lockstep = Lockstep([build(program, 0)], program.groups, 4)
    field = Field(1, frozenset({"float32"}))
    inputs = draw_inputs(program, "normal", field, 1)
    benchmark(lambda: lockstep.run([fresh(i, program) for i in inputs], field, trial="normal", poison_seed=1, watch=False))


def test_cases_a_second(benchmark: BenchmarkFixture) -> None:
    """A whole case - build, two graphs, two trials each - beside a spawned case and a case of a continuous class."""
    program = twenty_nodes()

    def case() -> None:
        field = Field(1, frozenset({"float32"}))
        pair = [Lockstep([build(program, 0)], program.groups, 4) for _ in range(2)]
        for trial in range(2):
            inputs = draw_inputs(program, "normal", field, trial)
            for lockstep in pair:
                lockstep.run([fresh(i, program) for i in inputs], field, trial="normal", poison_seed=1, watch=trial == 0)

    benchmark(case)
    ours = benchmark.stats.stats.median
    spawned, continuous = seconds_of("Spawned"), seconds_of("Continuous") / NUM_CONTINUOUS
    benchmark.extra_info.update(
        ours_ms=ours * 1e3, spawned_ms=spawned * 1e3, continuous_ms=continuous * 1e3, times_spawned=spawned / ours, times_continuous=continuous / ours
    )
    print({k: round(v, 1) for k, v in benchmark.extra_info.items()})
