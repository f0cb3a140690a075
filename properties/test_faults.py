"""The harness sees every seeded fault, by a law that the fault names, and sees nothing where there is none."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from harness.check import check
from harness.spec.program import Program
from harness.spec.protocols import Subject
from harness.strategies.collectives import collective_programs
from harness.subjects.faults import FAULTS
from harness.subjects.graph_pass import from_callable

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
SEARCH = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
FIND = settings(SEARCH, phases=[Phase.generate])
SHRUNK = frozenset({"swap_outputs", "drop_wait", "duplicate_collective", "write_input"})


def _identity(gm: object) -> None:
    """Change nothing."""


def _fails(program: Program, subject: Subject) -> bool:
    return check(program, subject).status == "FAIL"


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_fault_is_found_by_its_law(name: str) -> None:
    """A seeded fault is found, a law that it names breaks, and no law breaks that it does not name."""
    fault = FAULTS[name]
    subject = from_callable(name, "bucketing", fault.function)
    try:
        program = find(collective_programs(max_collectives=3, max_ops=10), lambda p: _fails(p, subject), settings=SEARCH if name in SHRUNK else FIND)
    except NoSuchExample:
        pytest.fail(f"the fault {name} was not found")
    broken = {reason.law for reason in check(program, subject).reasons}
    assert broken & fault.laws, f"{name} broke {broken}, not {set(fault.laws)}"
    assert name not in SHRUNK or len(program.ops) <= 6, f"{name} was not shrunk: {len(program.ops)} ops"


@given(collective_programs(), st.integers(0, 3))
@QUICK
def test_no_change_is_no_fault(program: Program, seed: int) -> None:
    """A pass that changes nothing breaks no law on any program, and is known to have changed nothing."""
    verdict = check(program, from_callable("identity", "bucketing", _identity), seed=seed, skip_unchanged=False)
    assert verdict.status == "PASS", verdict.reasons
    assert verdict.is_vacuous
