"""Lockstep models gloo: the same program in lockstep and on real ranks agrees bit for bit, over all strategies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.check import BUCKETING_LAWS, check
from harness.executors import lockstep
from harness.executors.ranks import RankPool
from harness.on_ranks import check_on_ranks
from harness.spec.program import Program
from harness.strategies import collective_programs
from harness.subjects.registry import load_subject

IDENTITY = "properties.executors.ranks.test_pool:identity"
REFUSED_BY_GLOO = ("float8",)

SLOW = settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.multirank(2)
def test_two_ranks_agree_with_lockstep(ranks: RankPool) -> None:
    """On 2 ranks no program differs from lockstep; what gloo refuses is said to be unsupported, and is float8 only."""
    agrees(ranks, 2)


@pytest.mark.multirank(4)
def test_four_ranks_agree_with_lockstep(ranks: RankPool) -> None:
    """The same on 4 ranks, whose groups cross."""
    agrees(ranks, 4)


def agrees(ranks: RankPool, world_size: int) -> None:
    kinds: Counter[str] = Counter()

    @SLOW
    @given(st.lists(collective_programs(world_sizes=(world_size,)), min_size=4, max_size=4))
    def agree(programs: list[Program]) -> None:
        for verdict in check_on_ranks(programs, load_subject(IDENTITY), ranks, laws=BUCKETING_LAWS):
            kind = verdict.status if verdict.status == "PASS" else verdict.reasons[0].kind
            kinds[kind] += 1
            assert kind in ("PASS", "unsupported", "not_repeated"), verdict.reasons
            if kind == "unsupported":
                assert any(name in verdict.reasons[0].message for name in REFUSED_BY_GLOO), verdict.reasons

    agree()
    assert kinds["PASS"] > 50 and kinds["not_repeated"] < 3, kinds


@pytest.mark.multirank(2)
def test_a_wrong_lockstep_is_seen(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lockstep adds wrongly, nothing is judged: neither the pass nor the backend is accused."""
    reduce = lockstep._reduce
    monkeypatch.setattr(lockstep, "_reduce", lambda values, op: reduce(values, op) + 1)
    from properties.executors.ranks.test_pool import sums

    verdict = check(sums(2), load_subject(IDENTITY), ranks=ranks)
    assert verdict.status == "INCONCLUSIVE" and verdict.reasons[0].kind == "lockstep_differs", verdict


@pytest.mark.multirank(2)
def test_our_bucketing_keeps_its_laws_on_real_ranks(ranks: RankPool) -> None:
    """The reference fires on real ranks and breaks no law there."""
    keeps(ranks, "reference")


@pytest.mark.multirank(2)
def test_torch_s_bucketing_on_real_ranks(ranks: RankPool) -> None:
    """Torch's bucketing fires on real ranks; whatever it breaks there, it breaks in lockstep too."""
    keeps(ranks, "inductor")


def keeps(ranks: RankPool, name: str) -> None:
    subject = load_subject(name)
    fired = [0]

    @settings(SLOW, max_examples=80)
    @given(st.data())
    def keep(data: st.DataObject) -> None:
        variant = data.draw(st.sampled_from(subject.variants()))
        verdict = check(program := data.draw(collective_programs(world_sizes=(2,), **variant.focus)), variant, ranks=ranks)
        if verdict.status == "FAIL":
            assert name != "reference" and check(program, variant).status == "FAIL", verdict.reasons
        fired[0] += verdict.num_fired > 0

    keep()
    assert fired[0] > 3, "the pass changed next to nothing"
