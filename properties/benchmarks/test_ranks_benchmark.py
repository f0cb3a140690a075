"""Cases a second on real gloo ranks: the pool beside torch's own ways to run several ranks, in one run.

Run with ``pytest properties/benchmarks -o addopts=``; the ratios are printed and stored in the benchmark's ``extra_info``. Each of 200
programs is another one; one program repeated is measured apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pytest_benchmark.fixture import BenchmarkFixture

from harness.check import BUCKETING_LAWS
from harness.executors.ranks import RankPool
from harness.on_ranks import check_on_ranks
from harness.spec.program import Program, encode_program
from harness.strategies import collective_programs
from harness.subjects.registry import load_subject
from harness.worker import PRELOAD, Question, decode_answer, encode_question
from properties.benchmarks.spawned import NUM_CONTINUOUS, seconds_of, twenty_nodes

NUM_PROGRAMS = 200
NUM_TOGETHER = 20
IDENTITY = "properties.executors.ranks.test_pool:identity"
MODULES = (*PRELOAD, "torch._inductor.fx_passes.post_grad", "torch._inductor.fx_passes.fsdp")


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, preload=MODULES) as made:
        made.start()
        yield made


def programs(world_size: int) -> list[Program]:
    found: dict[bytes, Program] = {}

    @settings(max_examples=4 * NUM_PROGRAMS, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(collective_programs(world_sizes=(world_size,), mutation="epilogue", dtypes=("float32", "bfloat16", "int64")))
    def collect(program: Program) -> None:
        found[encode_program(program)] = program

    collect()
    return list(found.values())[:NUM_PROGRAMS]


@pytest.mark.parametrize("name", [IDENTITY, "inductor"], ids=["identity", "inductor"])
def test_distinct_programs(benchmark: BenchmarkFixture, pool: RankPool, name: str) -> None:
    """200 distinct programs, judged: beside a spawned case and a case of a continuous class of torch's own."""
    drawn, subject = programs(pool.world_size), load_subject(name)
    verdicts = benchmark.pedantic(lambda: check_on_ranks(drawn, subject, pool, laws=BUCKETING_LAWS), rounds=3, warmup_rounds=1)
    assert len(verdicts) == NUM_PROGRAMS
    ours = benchmark.stats.stats.median / NUM_PROGRAMS
    spawned, continuous = seconds_of("Spawned", pool.world_size), seconds_of("Continuous", pool.world_size) / NUM_CONTINUOUS
    report(benchmark, ours_ms=ours * 1e3, spawned_ms=spawned * 1e3, continuous_ms=continuous * 1e3, times_spawned=spawned / ours, times_continuous=continuous / ours)


def test_one_program_repeated(benchmark: BenchmarkFixture, pool: RankPool) -> None:
    """The same program 200 times, not judged, beside a case of a continuous class that runs it once."""
    if pool.world_size != 4:
        pytest.skip("the continuous class has 4 ranks")
    question = encode_question(Question(twenty_nodes(), "bucketing", IDENTITY, {}))
    benchmark.pedantic(lambda: pool.run("judge", [question] * NUM_PROGRAMS), rounds=3, warmup_rounds=1)
    ours = benchmark.stats.stats.median / NUM_PROGRAMS
    continuous = seconds_of("Continuous") / NUM_CONTINUOUS
    report(benchmark, ours_ms=ours * 1e3, continuous_ms=continuous * 1e3, times_continuous=continuous / ours)


def test_overhead_beside_a_bare_loop(benchmark: BenchmarkFixture, pool: RankPool) -> None:
    """What a case costs beyond building, pass and the collectives of both graphs, which a bare loop on the same ranks issues.

    Both are measured on the same few programs one after the other, many times, so that the machine's moods fall on both.
    """
    drawn = programs(pool.world_size)
    questions = [encode_question(Question(p, "bucketing", IDENTITY, {})) for p in drawn]
    pool.run("judge", questions)
    pool.run("bare", questions)

    def pair(few: list[bytes]) -> tuple[float, float]:
        begin = time.perf_counter()
        pool.run("judge", few)
        middle = time.perf_counter()
        bare = pool.run("bare", few)
        spent = max(sum(float(r.payloads[rank] or 0) for r in bare) for rank in range(pool.world_size))
        return (middle - begin) / len(few) * 1e3, spent / len(few) * 1e3

    parts = [questions[i : i + NUM_TOGETHER] for i in range(0, NUM_PROGRAMS, NUM_TOGETHER)] * 3
    rounds = [pair(part) for part in parts]
    benchmark.pedantic(lambda: pool.run("judge", questions), rounds=1)
    report(benchmark, case_ms=median(w for w, _ in rounds), bare_ms=median(b for _, b in rounds), overhead_ms=median(w - b for w, b in rounds))
    assert all(decode_answer(p).before is not None for r in pool.run("judge", questions[:20]) for p in r.payloads if p)


def test_cold_start_and_restart(benchmark: BenchmarkFixture) -> None:
    """A cold pool of 4 beside one import of torch; and all ranks started anew."""
    imports = [_seconds([sys.executable, "-c", "import torch"]) for _ in range(3)]
    colds, restarts = [], []
    for _ in range(3):
        with RankPool(4) as pool:
            begin = time.perf_counter()
            pool.start()
            colds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            pool.abandon()
            pool.start()
            restarts.append(time.perf_counter() - begin)
    benchmark.pedantic(lambda: None, rounds=1)
    one, cold, restart = (sorted(x)[1] for x in (imports, colds, restarts))
    report(benchmark, import_ms=one * 1e3, cold_ms=cold * 1e3, times_import=cold / one, restart_of_4_ms=restart * 1e3)


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2], env=os.environ)
    return time.perf_counter() - begin


def report(benchmark: BenchmarkFixture, **figures: float) -> None:
    benchmark.extra_info.update(figures)
    print({k: round(v, 2) for k, v in figures.items()})
