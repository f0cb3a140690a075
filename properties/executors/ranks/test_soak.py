"""A long run with seeded faults: each case is reported as what it was, none is lost or counted twice, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.executors.ranks import RankPool
from harness.executors.ranks.pool import CaseResult
from harness.worker import PRELOAD, Question, decode_answer, encode_question
from properties.executors.ranks.test_pool import sums

IDENTITY = "properties.executors.ranks.test_pool:identity"
FAULTS = "harness.subjects.faults.ranks:"
MODULES = (*PRELOAD, "harness.subjects.faults.ranks", "properties.executors.ranks.test_pool")
BATCH = 50
WARM_BATCHES = 2


class Plan(NamedTuple):
    """How many cases, and how many of them go wrong in which way."""

    num_cases: int
    faults: dict[str, int]


SHORT = Plan(500, {"die": 3, "hang": 2, "raise_on_one": 4, "exhaust_memory": 2})
LONG = Plan(20_000, {"die": 50, "hang": 50, "raise_on_one": 50, "exhaust_memory": 20})


def test_short_soak() -> None:
    """500 cases with 11 faults."""
    soak(SHORT, deadline_s=2.0)


@pytest.mark.soak
def test_soak() -> None:
    """20,000 cases with 170 faults; memory grows by less than 5 %, open files do not."""
    soak(LONG, deadline_s=2.0)


def soak(plan: Plan, *, deadline_s: float) -> None:
    order = [name for name, number in plan.faults.items() for _ in range(number)]
    order += ["identity"] * (plan.num_cases - len(order))
    random.Random(0).shuffle(order)
    with RankPool(2, preload=MODULES, deadline_s=deadline_s) as pool:
        names = {"identity": IDENTITY}
        seen: list[str] = []
        num_starved = 0
        start: tuple[int, int] | None = None
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            questions = [encode_question(Question(sums(2), "bucketing", names.get(n, FAULTS + n), {}, seed=first + i)) for i, n in enumerate(batch)]
            results = pool.run("judge", questions)
            assert len(results) == len(batch)
            starved = [i for i, result in enumerate(results) if result.fault is not None and result.fault.kind == "machine"]
            num_starved += len(starved)
            for i in starved:  # the machine was busy with something else, and the pool said so
                (results[i],) = pool.run("judge", [questions[i]])
            seen += [told(result) for result in results]
            if first == BATCH * WARM_BATCHES:
                start = footprint()
        assert start is not None
        end = footprint()
        wrong = [(i, a, b) for i, (a, b) in enumerate(zip(order, seen, strict=True)) if a != b]
        assert not wrong, (wrong[:5], Counter(seen))
        assert num_starved <= len(order) // 100, f"{num_starved} cases said that the machine was at fault"
        assert end[1] == start[1], f"{start[1]} open files became {end[1]}"
        if plan is LONG:
            assert end[0] < start[0] * 1.05, f"the controller's {start[0]} bytes became {end[0]}"
        print(Counter(seen), "healed", pool.num_healed, "controller bytes", start[0], end[0], "files", end[1])


def told(result: CaseResult) -> str:
    """What the pool said that a case was, in the names of the seeded faults."""
    fault = result.fault
    answers = [decode_answer(payload) for payload in result.payloads if payload]
    raised = [a.applied for a in answers if a.applied is not None]
    if fault is None:
        return "identity" if len(answers) == 2 and all(a.before is not None and a.before.error is None and a.after is None for a in answers) else "broken"
    if fault.kind == "rank_died" and [s.signal for s in fault.ranks if s.status == "died"] == [9]:
        return "die"
    if fault.kind == "divergence" and len(raised) == 1:
        return "exhaust_memory" if "allocate memory" in raised[0].message else "raise_on_one"
    return "hang" if fault.kind == "hang" else fault.kind


def footprint() -> tuple[int, int]:
    """This process's resident bytes and its number of open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
