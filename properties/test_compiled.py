"""Passes inside ``torch.compile``, with AOTAutograd's graph run eagerly and with Inductor, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import on_compiler
from harness.casefile import read_case
from harness.check import BUCKETING_LAWS, check, signatures
from harness.executors.ranks import RankPool
from harness.ledger import load_ledger
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.spec.verdict import Reason, Verdict
from harness.subjects.registry import load_subject
from properties.benchmarks.spawned import gathers

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, deadline_s=120.0) as made:
        yield made


def judged(program: Program, name: str, pool: RankPool, **options: str | int | float | bool | None) -> Verdict:
    subject = load_subject(name, feature="bucketing", options=options or None)
    return check(program, subject, ranks=pool, is_compiled=True)


def plain_gathers(count: int) -> Program:
    """Gathers alone, which the compiler needs no kernel for."""
    gather, wait = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
    ops: list[Op] = []
    for i in range(count):
        ops += [Op(gather, (Ref(i), 2, GroupArg("world"))), Op(wait, (Ref(count + 2 * i),))]
    specs = tuple(TensorSpec((2 + i,), "float32") for i in range(count))
    return Program(2, (Group("world", ((0, 1),)),), specs, tuple(ops), tuple(Ref(count + 2 * i + 1) for i in range(count)))


def swap_outputs(gm: object) -> None:
    """A planted fault: the first two outputs change places."""
    output = next(n for n in gm.graph.nodes if n.op == "output")  # type: ignore[attr-defined]
    first, second, *rest = output.args[0]
    output.args = ((second, first, *rest),)


def identity(gm: object) -> None:
    """Changes nothing."""


@pytest.mark.multirank(world_size=2)
@pytest.mark.parametrize("name", ["inductor", pytest.param("reference", marks=pytest.mark.soak)])
def test_bucketing_fires_inside_both_compilers(pool: RankPool, name: str) -> None:
    """Gathers are bucketed inside ``aot_eager`` and inside Inductor, and nothing else changes."""
    verdict = judged(gathers(2), name, pool)
    assert verdict.status == "PASS" and verdict.num_fired >= 1, verdict


@pytest.mark.multirank(world_size=2)
def test_a_planted_fault_is_seen_in_both_compilers(pool: RankPool) -> None:
    """A pass that swaps two outputs is accused, in AOTAutograd's graph and in Inductor's."""
    verdict = judged(plain_gathers(2), "properties.test_compiled:swap_outputs", pool)
    assert verdict.status == "FAIL" and "equal_metadata" in {r.law for r in verdict.reasons}, verdict
    assert all(r.message.startswith("aot_eager and inductor: ") for r in verdict.reasons), verdict


@pytest.mark.multirank(world_size=2)
def test_a_pass_that_does_nothing_is_vacuous(pool: RankPool) -> None:
    """Nothing fired, and the verdict says so."""
    verdict = judged(plain_gathers(2), "properties.test_compiled:identity", pool)
    assert verdict.status == "PASS" and verdict.num_fired == 0


@pytest.mark.soak
@pytest.mark.multirank(world_size=2)
@pytest.mark.parametrize(
    ("case", "options", "fault"),
    [
        ("duplicate_waits", {"pass": "all_gather", "mode": "default", "cap_mb": None}, "bucketing-single-user"),
        ("bucketed_outputs_share_storage", {"pass": "all_reduce", "mode": "all", "cap_mb": None}, "bucketing-shared-storage"),
    ],
)
def test_known_faults_are_known_inside_the_compiler(
    pool: RankPool, case: str, options: dict[str, str | int | float | bool | None], fault: str
) -> None:
    """Faults of torch's passes end a compilation, or change its result, and are found in the ledger."""
    ledger = load_ledger()
    subject = load_subject("inductor", options=options)
    verdict = check(read_case(CASES / f"{case}.py"), subject, ranks=pool, is_compiled=True)
    known = [ledger.match(signature) for _, signature in signatures(verdict, subject)]
    assert verdict.status == "FAIL" and [k.id for k in known if k] == [fault] * len(known), verdict


@pytest.mark.multirank(world_size=2)
def test_what_differs_by_rank_is_not_compiled(pool: RankPool) -> None:
    """A divergence program has another graph on each rank: nothing is judged."""
    world = GroupArg("world")
    ops = (Op("_c10d_functional.all_reduce.default", (Ref(0), "sum", world), ranks=(0,)),)
    program = Program(2, (Group("world", ((0, 1),)),), (TensorSpec((2,), "float32"),), ops, (Ref(0),), divergent=True)
    verdict = judged(program, "reference", pool)
    assert verdict.status == "INCONCLUSIVE" and verdict.reasons[0].kind == "unsupported"


def test_what_the_compiler_shows_alone_accuses_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is the pass's only where the compiler alone passes, and where it is seen again."""
    failed = Verdict("FAIL", (Reason("equal_outputs", "FAIL", "values", "output 0 differs"),), num_fired=1)
    passed = Verdict("PASS", strength="tested", num_fired=1)
    program, subject = gathers(2), load_subject("reference")

    def answers(*given: Verdict) -> Verdict:
        left = list(given)
        monkeypatch.setattr(on_compiler, "_asked", lambda *args, **kwargs: left.pop(0))
        with RankPool(2) as unused:
            monkeypatch.setattr(unused, "ensure", lambda modules: None)
            verdict = on_compiler.check_compiled(program, subject, unused, laws=BUCKETING_LAWS)
        assert not left
        return verdict

    assert answers(failed, failed, passed).reasons[0].kind == "compiler"
    assert answers(failed, passed, passed, passed).reasons[0].kind == "not_repeated"
    assert answers(failed, passed, failed, passed).status == "FAIL"
    assert answers(passed, passed).num_fired == 1
