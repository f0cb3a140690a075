"""Every operator of the table is drawn by a strategy, runs in both arithmetics, and has a shape rule that agrees with what executes."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from harness.executors.algebra import Field
from harness.executors.inputs import draw_inputs
from harness.executors.lockstep import Lockstep
from harness.graph import build_all, fake_world, target_name
from harness.ops import TABLE
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.strategies import collective_programs
from harness.subjects.registry import load_subject

MADE_BY_PASSES = {"bucketing._pre_bucket_all_gather.default"}


def test_every_operator_is_drawn_and_runs() -> None:
    """Of 6,000 drawn programs, those that have an operator not seen before run, in both halves, as their metadata says."""
    seen: set[str] = set()

    @settings(max_examples=6_000, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(collective_programs(world_sizes=(2,)))
    def run_what_is_new(program: Program) -> None:
        targets = {op.target for op in program.ops}
        if targets - seen:
            run(Lockstep(build_all(program), program.groups, 2), program)
            seen.update(targets)

    run_what_is_new()
    assert set(TABLE) - seen == MADE_BY_PASSES


def test_the_operators_that_only_passes_make() -> None:
    """Torch's bucketing with custom operators makes the others; they run in both halves too."""
    world = GroupArg("world")
    ops = tuple(
        op
        for i in range(2)
        for op in (Op("_c10d_functional.all_gather_into_tensor.default", (Ref(i), 2, world)), Op("_c10d_functional.wait_tensor.default", (Ref(2 + 2 * i),)))
    )
    program = Program(2, (Group("world", ((0, 1),)),), (TensorSpec((4,), "float32"), TensorSpec((2, 3), "float32")), ops, (Ref(3), Ref(5)))
    subject = load_subject("inductor", options={"pass": "all_gather", "mode": "custom_ops", "cap_mb": None})
    graphs = build_all(program)
    for rank, gm in enumerate(graphs):
        with fake_world(2, rank, program.groups):
            subject.apply(gm, rank)
    assert MADE_BY_PASSES <= {target_name(node) for node in graphs[0].graph.nodes if node.op == "call_function"}
    run(Lockstep(graphs, program.groups, 2, views_may_copy=True), program)


def run(lockstep: Lockstep, program: Program) -> None:
    field = Field(1, lockstep.dtypes)
    outcome = lockstep.run(draw_inputs(program, "small", field, 1), field, trial="small", poison_seed=1)
    for rank in outcome.ranks:
        assert rank.error is None and not rank.untrue, (rank.error, rank.untrue)
