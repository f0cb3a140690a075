"""Our model of bucketing: it keeps every law, explains what it declines, and grows near-linearly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from harness.check import check
from harness.graph import build, collectives, fake_world
from harness.reference.bucketing import BucketingOptions, BucketingReport, DeclineReason, bucket_collectives
from harness.spec.program import Arg, DTypeArg, Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.strategies.collectives import collective_programs
from harness.subjects.registry import load_subject

C10D = "_c10d_functional."
WORLD = Group("world", ((0, 1),))
OTHER = Group("other", ((0,), (1,)))
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def op(target: str, *args: Arg) -> Op:
    return Op(target, args)


def gather(value: int, group: Group = WORLD) -> Op:
    return op(C10D + "all_gather_into_tensor.default", Ref(value), group.size, GroupArg(group.name))


def reduce(value: int, reduce_op: str = "sum") -> Op:
    return op(C10D + "all_reduce.default", Ref(value), reduce_op, GroupArg("world"))


def wait(value: int) -> Op:
    return op(C10D + "wait_tensor.default", Ref(value))


def program(ops: list[Op], outputs: list[int], *dtypes: str) -> Program:
    inputs = tuple(TensorSpec((4,), dtype) for dtype in dtypes or ("float32", "float32"))
    return Program(2, (WORLD, OTHER), inputs, tuple(ops), tuple(Ref(v) for v in outputs))


def applied(p: Program, options: BucketingOptions = BucketingOptions()) -> tuple[BucketingReport, GraphModule]:
    gm = build(p, 0)
    with fake_world(2, 0, p.groups):
        return bucket_collectives(gm, options), gm


def reasons(report: BucketingReport) -> list[DeclineReason]:
    return [d.reason for d in report.declined]


@given(collective_programs(world_sizes=(2, 3, 4)), st.sampled_from(load_subject("reference").variants()), st.integers(0, 3))
@QUICK
def test_every_law_holds(p: Program, variant: object, seed: int) -> None:
    """Our model keeps every law on any program, in every mode, with and without a cap and the FSDP filter."""
    verdict = check(p, variant, seed=seed)  # type: ignore[arg-type]
    assert verdict.status == "PASS", verdict.reasons


@given(collective_programs(), st.sampled_from(["default", "custom_ops", "custom_ops_multidtype", "coalesced"]))
@QUICK
def test_every_collective_is_accounted_for(p: Program, mode: str) -> None:
    """Each collective of the graph is a member of one bucket or declined with a reason, never both and never neither."""
    before = sorted(n.name for n in collectives(build(p, 0).graph))
    report, _ = applied(p, BucketingOptions(mode=mode))  # type: ignore[arg-type]
    named = sorted([name for bucket in report.buckets for name in bucket.members] + [d.node for d in report.declined])
    assert named == before


def test_neighbours_of_one_key_share_a_bucket() -> None:
    """Two gathers of one group and dtype become one."""
    report, gm = applied(program([gather(0), wait(2), gather(1), wait(4)], [3, 5]))
    assert len(report.buckets) == 1 and len(report.buckets[0].members) == 2 and not report.declined
    assert len(collectives(gm.graph)) == 1


@pytest.mark.parametrize(
    ("p", "options", "reason"),
    [
        (program([gather(0), wait(2), gather(3), wait(4)], [3, 5]), BucketingOptions(), DeclineReason.DEPENDS_ON_MEMBER),
        (program([gather(0), wait(2), gather(1), wait(4)], [3, 5], "float32", "bfloat16"), BucketingOptions(), DeclineReason.ONLY_ONE),
        (program([gather(0), wait(2), gather(1), wait(4)], [3, 5]), BucketingOptions(cap_bytes=40), DeclineReason.OVER_CAP),
        (program([gather(0), gather(1), wait(3)], [4]), BucketingOptions(), DeclineReason.NO_WAIT),
        (program([reduce(0), wait(2), reduce(1), wait(4)], [3, 5]), BucketingOptions(fsdp_only=True), DeclineReason.NOT_FSDP),
        (program([reduce(0), wait(2), reduce(1, "max"), wait(4)], [3, 5]), BucketingOptions(), DeclineReason.ONLY_ONE),
        (program([gather(0), wait(2), reduce(1), wait(4)], [3, 5]), BucketingOptions(kinds=("all_gather",)), DeclineReason.KIND_NOT_ASKED_FOR),
        (
            program([gather(0), wait(2), op("aten.mul_.Tensor", Ref(0), 2), gather(1), wait(5)], [3, 6]),
            BucketingOptions(),
            DeclineReason.INPUT_WRITTEN,
        ),
        (
            program([gather(0), wait(2), op("aten.mul_.Tensor", Ref(3), 2), gather(1), wait(5)], [3, 6]),
            BucketingOptions(),
            DeclineReason.RESULT_WRITTEN,
        ),
    ],
)
def test_reasons(p: Program, options: BucketingOptions, reason: DeclineReason) -> None:
    """What is left alone says why: a dependency, another key, a full bucket, no wait, the filter, a write."""
    report, _ = applied(p, options)
    assert not report.buckets and reason in reasons(report)


def test_caps_by_bucket_index() -> None:
    """A cap may differ from bucket to bucket: the first holds one pair, the second all that is left."""
    p = program([o for i in range(5) for o in (gather(0), wait(2 + 2 * i))], [3, 5, 7, 9, 11])
    report, _ = applied(p, BucketingOptions(cap_bytes=lambda index: 64 if index == 0 else 1000))
    assert [len(b.members) for b in report.buckets] == [2, 3]


def test_groups_do_not_mix() -> None:
    """Gathers on two groups, interleaved, make one bucket a group."""
    p = program([gather(0), wait(2), gather(0, OTHER), wait(4), gather(1), wait(6), gather(1, OTHER), wait(8)], [3, 5, 7, 9])
    report, _ = applied(p)
    assert sorted(b.group for b in report.buckets) == ["other", "world"]


def test_a_cast_is_merged_into_copy_in() -> None:
    """A cast in front of a gather that nobody else uses goes; the bucket's dtype is the cast's."""
    cast = "prims.convert_element_type.default"
    p = program([op(cast, Ref(0), DTypeArg("bfloat16")), gather(2), wait(3), op(cast, Ref(1), DTypeArg("bfloat16")), gather(5), wait(6)], [4, 7])
    report, gm = applied(p)
    assert len(report.buckets) == 1
    assert all(str(n.meta["val"].dtype) == "torch.bfloat16" for n in collectives(gm.graph))


def test_buckets_that_would_depend_on_each_other_are_not_both_made() -> None:
    """Two runs whose members depend on each other crosswise: one is bucketed, the other declined."""
    p = program([gather(0, OTHER), gather(1), wait(3), gather(4, OTHER), wait(2), op("aten.slice.Tensor", Ref(6), 0, 0, 4), gather(7), wait(5), wait(8)], [9, 10])
    report, gm = applied(p)
    gm.graph.lint()
    assert len(report.buckets) <= 1


@pytest.mark.parametrize("bad", [{"mode": "fast"}, {"kinds": ("send",)}, {"cap_bytes": 0}])
def test_bad_options(bad: dict[str, object]) -> None:
    """An unknown mode or kind, or a cap below 1, is refused with what there is."""
    with pytest.raises(ValueError, match="must be"):
        BucketingOptions(**bad)  # type: ignore[arg-type]


def test_growth() -> None:
    """Four times the graph takes less than six times the calls: a quadratic step would take sixteen times as many."""

    def num_calls(num: int) -> int:
        ops = [o for i in range(num) for o in (gather(0), wait(2 + 2 * i))]
        gm = build(program(ops, [2 + 2 * num - 1]), 0)
        count = 0

        def counted(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        with fake_world(2, 0, (WORLD, OTHER)):
            sys.setprofile(counted)
            try:
                bucket_collectives(gm, BucketingOptions(cap_bytes=1024))
            finally:
                sys.setprofile(None)
        return count

    num_calls(20)
    assert num_calls(800) < 6 * num_calls(200)


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with different hash seeds bucket the same programs into the same graphs."""
    code = (
        "import hashlib; from hypothesis import given, settings, seed, Phase, HealthCheck\n"
        "from harness.graph import build, fake_world; from harness.reference.bucketing import bucket_collectives\n"
        "from harness.strategies.collectives import collective_programs\n"
        "digest = hashlib.blake2b()\n"
        "@seed(1)\n"
        "@settings(max_examples=60, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))\n"
        "@given(collective_programs())\n"
        "def law(p):\n"
        "    gm = build(p, 0)\n"
        "    with fake_world(p.world_size, 0, p.groups):\n"
        "        bucket_collectives(gm)\n"
        "    digest.update(str(gm.graph).encode())\n"
        "law()\n"
        "print(digest.hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
