"""Cases a second on four ranks: lockstep beside torch's own ways to run several ranks, on the same program in one run.

Run with ``pytest properties/benchmarks -o addopts=``; the ratios are printed and stored in the benchmark's ``extra_info``.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness.check import check
from harness.executors.algebra import Field
from harness.executors.inputs import draw_inputs, fresh
from harness.executors.lockstep import Lockstep
from harness.graph import build, fake_world
from harness.ops import infer_program
from harness.reference.bucketing import BucketingOptions, bucket_collectives
from harness.subjects.registry import load_subject
from properties.benchmarks.spawned import NUM_CONTINUOUS, gathers, seconds_of, twenty_nodes


def test_lockstep_trial(benchmark: BenchmarkFixture) -> None:
    """One trial of 20 nodes on 4 ranks, field and concrete halves together, beside 240 small torch operators, which are a measure of the machine."""
    program = twenty_nodes()
    lockstep = Lockstep([build(program, 0)], program.groups, 4)
    field = Field(1, frozenset({"float32"}))
    inputs = draw_inputs(program, "normal", field, 1)
    floats, ints = torch.randn(8), torch.randint(0, 9, (8,))
    ours: list[float] = []
    bare: list[float] = []

    def both() -> None:
        start = time.perf_counter()
        lockstep.run([fresh(i, program) for i in inputs], field, trial="normal", poison_seed=1, watch=False)
        middle = time.perf_counter()
        for _ in range(80):
            floats.add(1.0)
            ints.add(5).remainder_(7)
        ours.append(middle - start)
        bare.append(time.perf_counter() - middle)

    benchmark.pedantic(both, rounds=500, warmup_rounds=20)
    ms = {"trial_least": min(ours), "trial_median": median(ours), "bare_least": min(bare), "bare_median": median(bare)}
    benchmark.extra_info.update({name: value * 1e3 for name, value in ms.items()}, times_bare=median(ours) / median(bare))
    print({k: round(v, 2) for k, v in benchmark.extra_info.items()})


def test_ten_thousand_nodes(benchmark: BenchmarkFixture) -> None:
    """A graph of 10,000 nodes with 2,000 collectives: the reference's bucketing alone, and a whole check."""
    program = gathers(2_000)
    metas = infer_program(program)

    def bucket() -> None:
        gm = build(program, 0, metas)
        with fake_world(program.world_size, 0, program.groups):
            start = time.perf_counter()
            report = bucket_collectives(gm, BucketingOptions(cap_bytes=1024))
        bucketing.append(time.perf_counter() - start)
        assert sum(len(b.members) for b in report.buckets) == 2_000

    bucketing: list[float] = []
    benchmark.pedantic(bucket, rounds=5)
    start = time.perf_counter()
    verdict = check(program, load_subject("reference"))
    assert verdict.strength == "proved" and verdict.num_fired == 2_000
    benchmark.extra_info.update(bucketing_s=median(bucketing), check_s=time.perf_counter() - start)
    print({k: round(v, 2) for k, v in benchmark.extra_info.items()})


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
