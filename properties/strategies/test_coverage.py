"""The shapes of programs that stress bucketing are all drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness.ops import TABLE
from harness.spec.dtypes import DTYPES
from harness.spec.program import DTypeArg, PerRank, Program, Ref
from harness.strategies import collective_programs
from harness.strategies.collectives import ALL_DTYPES, KINDS, REDUCE_OPS
from properties.strategies.anatomy import Anatomy, Start, operands

NUM_PROGRAMS: Final = 2000
LEAST: Final = 3

Feature = Callable[[Anatomy], bool]


@lru_cache(maxsize=1)
def _counts() -> dict[str, int]:
    """How many of ``NUM_PROGRAMS`` drawn programs have each feature."""
    counts = dict.fromkeys(FEATURES, 0)

    @settings(max_examples=NUM_PROGRAMS, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(collective_programs(world_sizes=(2, 4)))
    def count(program: Program) -> None:
        anatomy = Anatomy(program)
        for name, has in FEATURES.items():
            counts[name] += has(anatomy)

    count()
    return counts


def _pairs(a: Anatomy, *, independent: bool) -> list[tuple[Start, Start]]:
    """Pairs of collectives of one kind and group; ``independent``: no path between them."""
    pairs = []
    for i, x in enumerate(a.starts):
        for y in a.starts[i + 1 :]:
            if (x.kind, x.group) != (y.kind, y.group):
                continue
            depends = any(x.at in a.ancestors(ref) for ref in y.operands)
            if depends != independent:
                pairs.append((x, y))
    return pairs


def _can_share_bucket(a: Anatomy) -> bool:
    return any(
        x.reduce_op == y.reduce_op and a.meta(x.operands[0]).dtype == a.meta(y.operands[0]).dtype for x, y in _pairs(a, independent=True)
    )


def _mixed_gathers(a: Anatomy) -> bool:
    """Two gathers of different item sizes, the smaller not filling whole items of the larger."""
    for x, y in _pairs(a, independent=True):
        one, two = sorted((a.meta(x.operands[0]), a.meta(y.operands[0])), key=lambda m: DTYPES[m.dtype].itemsize)
        if x.kind == "all_gather" and one.size_bytes % DTYPES[two.dtype].itemsize and one.numel and two.numel:
            return True
    return False


def _crosses(a: Anatomy) -> bool:
    used = [a.program.group(name).parts for name in {s.group for s in a.starts}]
    return any(
        any(0 < len(set(p) & set(q)) < min(len(p), len(q)) for p in x for q in y) for i, x in enumerate(used) for y in used[i + 1 :]
    )


def _interleaved(a: Anatomy) -> bool:
    names = [s.group for s in a.starts]
    return any(names[i] == names[k] != names[j] for i in range(len(names)) for j in range(i + 1, len(names)) for k in range(j + 1, len(names)))


def _gathered_twice(a: Anatomy) -> bool:
    return any(x.kind == "all_gather" and x.operands == y.operands for x, y in _pairs(a, independent=True))


def _twins(a: Anatomy) -> bool:
    """Two inputs that are one tensor."""
    specs = a.program.inputs
    return any(s.view_of is not None and a.values[i] == a.values[s.view_of] for i, s in enumerate(specs))


def _overlapping_inputs(a: Anatomy) -> bool:
    return any(s.view_of is not None and a.values[i] != a.values[s.view_of] for i, s in enumerate(a.program.inputs))


def _wait_distance(a: Anatomy, test: Callable[[int], bool]) -> bool:
    return any(test(wait - s.at) for s in a.starts for wait in s.waits)


def _wait_users(a: Anatomy, test: Callable[[int, bool], bool]) -> bool:
    waits = [a.number(w) for s in a.starts for w in s.waits]
    return any(test(len(a.users.get(w, ())), w in a.returned) for w in waits)


def _returns_start_and_wait(a: Anatomy) -> bool:
    return any(a.number(s.at) in a.returned and any(a.number(w) in a.returned for w in s.waits) for s in a.starts)


def _between(a: Anatomy, *targets: str) -> bool:
    """A collective whose operand was made by one of these ops out of another collective's result."""
    for s in a.starts:
        for ref in s.operands:
            ops = [a.program.ops[i] for i in a.ancestors(ref)]
            if any(TABLE[op.target].collective for op in ops) and any(op.target in targets for op in ops):
                return True
    return False


def _written_between(a: Anatomy) -> bool:
    """An op in place between two collectives, on memory that one of them reads or gave."""
    ats = [s.at for s in a.starts]
    storages = {a.meta(ref).storage for s in a.starts for ref in s.operands}
    return any(
        spec.writes and spec.collective is None and min(ats, default=i) < i < max(ats, default=i) and any(a.meta(r).storage in storages for r in operands(op)[:1])
        for i, op in enumerate(a.program.ops)
        for spec in (TABLE[op.target],)
    )


def _outputs_alias(a: Anatomy) -> bool:
    storages = [a.meta(ref).storage for ref in dict.fromkeys(a.program.outputs)]
    return len(set(storages)) < len(storages)


def _output_aliases_input(a: Anatomy) -> bool:
    inputs = {a.meta(Ref(i)).storage for i in range(a.num_inputs)}
    return any(ref.value >= a.num_inputs and a.meta(ref).storage in inputs for ref in a.program.outputs)


def _input_used_after(a: Anatomy) -> bool:
    return any(
        ref.value < a.num_inputs and (ref.value in a.returned or max(a.users[ref.value]) > s.at) for s in a.starts for ref in s.operands
    )


def _operand(a: Anatomy, test: Callable[[tuple[int, ...]], bool]) -> bool:
    return any(test(a.meta(ref).shape) for s in a.starts for ref in s.operands)


def _is_cast(a: Anatomy, ref: Ref) -> bool:
    op = a.op_of(ref)
    return op is not None and op.target == "prims.convert_element_type.default"


def _fsdp_gathers(a: Anatomy) -> bool:
    """Two independent gathers of one group, each of a narrowed placeholder."""

    def is_narrowed(s: Start) -> bool:
        op = a.op_of(s.operands[0])
        return op is not None and _is_cast(a, s.operands[0]) and isinstance(op.args[0], Ref) and op.args[0].value < a.num_inputs

    return any(x.kind == "all_gather" and is_narrowed(x) and is_narrowed(y) for x, y in _pairs(a, independent=True))


def _fsdp_scatters(a: Anatomy) -> bool:
    """Two independent scatters of one group, each result cast and returned."""

    def is_returned(s: Start) -> bool:
        casts = [u for w in s.waits for u in a.users.get(a.number(w), ()) if isinstance(a.program.ops[u].args[-1], DTypeArg)]
        return any(a.number(u) in a.returned for u in casts)

    return any(x.kind == "reduce_scatter" and is_returned(x) and is_returned(y) for x, y in _pairs(a, independent=True))


def _run_of_three(a: Anatomy) -> bool:
    keys = [(s.kind, s.group, s.reduce_op, a.meta(s.operands[0]).dtype) for s in a.starts]
    return any(keys[i] == keys[i + 1] == keys[i + 2] for i in range(len(keys) - 2))


def _uses(a: Anatomy, *targets: str) -> bool:
    return any(op.target in targets for op in a.program.ops)


FEATURES: Final[dict[str, Feature]] = {
    **{f"kind {k}": lambda a, k=k: any(s.kind == k for s in a.starts) for k in KINDS},
    **{f"reduce op {o}": lambda a, o=o: any(s.reduce_op == o for s in a.starts) for o in REDUCE_OPS},
    **{f"{d} moved": lambda a, d=d: any(not s.reduce_op and a.meta(r).dtype == d for s in a.starts for r in s.operands) for d in ALL_DTYPES},
    "int64 reduced": lambda a: any(s.reduce_op and a.meta(s.operands[0]).dtype == "int64" for s in a.starts),
    "can share a bucket": _can_share_bucket,
    "run of three with one key": _run_of_three,
    "chain": lambda a: any(TABLE[a.program.ops[i].target].collective for s in a.starts for r in s.operands for i in a.ancestors(r)),
    "chain of one kind and group": lambda a: bool(_pairs(a, independent=False)),
    "groups interleaved": _interleaved,
    "groups cross": _crosses,
    "singletons": lambda a: any(a.program.group(s.group).size == 1 for s in a.starts),
    "two groups of the same ranks": lambda a: len({s.group for s in a.starts}) > len({a.program.group(s.group).parts for s in a.starts}),
    "mixed gathers, sizes that do not fit": _mixed_gathers,
    "duplicated inputs": _twins,
    "inputs that overlap": _overlapping_inputs,
    "one value gathered twice": _gathered_twice,
    "wait directly behind": lambda a: _wait_distance(a, lambda d: d == 1),
    "wait far behind": lambda a: _wait_distance(a, lambda d: d >= 6),
    "wait without user": lambda a: _wait_users(a, lambda n, returned: n == 0 and not returned),
    "wait with many users": lambda a: _wait_users(a, lambda n, _: n >= 3),
    "several waits of one start": lambda a: any(len(s.waits) >= 2 for s in a.starts),
    "start and wait returned": _returns_start_and_wait,
    "collective never waited for": lambda a: any(not s.waits and a.number(s.at) not in a.returned and s.op.target.endswith("tensor.default") for s in a.starts),
    "view between": lambda a: _between(a, "aten.view.default", "aten.reshape.default", "aten.slice.Tensor", "aten.select.int", "aten.unsqueeze.default"),
    "transpose between": lambda a: _between(a, "aten.transpose.int", "aten.t.default", "aten.permute.default"),
    "cast between": lambda a: _between(a, "prims.convert_element_type.default", "aten._to_copy.default"),
    "clone between": lambda a: _between(a, "aten.clone.default"),
    "computation between": lambda a: _between(a, "aten.add.Tensor", "aten.mul.Tensor", "aten.neg.default", "aten.relu.default"),
    "op in place between": _written_between,
    "outputs alias": _outputs_alias,
    "output aliases an input": _output_aliases_input,
    "one value returned twice": lambda a: len(set(a.program.outputs)) < len(a.program.outputs),
    "input returned": lambda a: any(v < a.num_inputs for v in a.returned),
    "input used after": _input_used_after,
    "empty operand": lambda a: _operand(a, lambda shape: 0 in shape),
    "0-d operand": lambda a: _operand(a, lambda shape: shape == ()),
    "odd number of elements": lambda a: _operand(a, lambda shape: shape in ((3,), (5,), (7,), (33,))),
    "input with strides": lambda a: any(s.stride is not None for s in a.program.inputs),
    "input with offset": lambda a: any(s.storage_offset for s in a.program.inputs),
    "FSDP gathers": _fsdp_gathers,
    "FSDP scatters": _fsdp_scatters,
    "coalesced": lambda a: any("coalesced" in s.op.target for s in a.starts),
    "collective in place": lambda a: _uses(a, "_c10d_functional.all_reduce_.default", "_c10d_functional.broadcast_.default"),
    "collective into given memory": lambda a: any("out" in s.op.kwargs for s in a.starts),
    "all_to_all with uneven splits": lambda a: any(s.kind == "all_to_all" and any(isinstance(x, PerRank) for x in s.op.args[2] or ()) for s in a.starts),  # type: ignore[union-attr]
    "two collectives in flight": lambda a: any(x.waits and y.at < x.waits[0] for x, y in pairwise(a.starts)),
    "waits out of order": lambda a: any(x.waits and y.waits and y.waits[0] < x.waits[0] for x, y in pairwise(a.starts)),
}


@pytest.mark.parametrize("feature", list(FEATURES))
def test_feature_is_drawn(feature: str) -> None:
    """Each shape of program that the strategy promises stands in several of two thousand drawn programs."""
    assert _counts()[feature] >= LEAST


def test_programs_differ() -> None:
    """Nearly all drawn programs have something to bucket or to decline, and they are of many sizes."""
    sizes: list[int] = []

    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(collective_programs())
    def measure(program: Program) -> None:
        sizes.append(len(Anatomy(program).starts))

    measure()
    assert sum(n >= 2 for n in sizes) >= 0.6 * len(sizes)
    assert {1, 2, 3, 4, 5, 6} <= set(sizes)
