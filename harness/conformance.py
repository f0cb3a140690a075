"""For the author of a pass: test it against all our laws in three lines.

    from harness.conformance import conforms

    def test_my_pass():
        conforms(my_pass, feature="bucketing")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import sampled_from

from harness.check import check
from harness.spec.program import Program, encode_program
from harness.spec.protocols import Subject
from harness.spec.verdict import Reason, Verdict
from harness.subjects.registry import FEATURES, adapt, resolve

__all__ = ["NonConforming", "conforms"]


class NonConforming(AssertionError):
    """A pass broke a law. Attributes: ``program`` (minimal) and ``verdict``; the message has both."""

    def __init__(self, program: Program, verdict: Verdict) -> None:
        self.program = program
        self.verdict = verdict
        lines = [_sentence(reason) for reason in verdict.reasons]
        super().__init__("\n".join([*lines, "the smallest program found:", encode_program(program).decode()]))


def conforms(
    subject: Subject | Callable[[Any], Any], *, feature: str = "bucketing", max_examples: int = 200, seed: int = 0
) -> int:
    """Check ``subject`` on drawn programs against every law that it promises (a bare callable promises all).

    Args:
        subject: a Subject, all of whose variants are drawn, or a callable that changes a graph module in place or returns one.
        feature: whose programs and laws to use.
        max_examples: how many programs to draw.
        seed: of the inputs' values.

    Returns:
        The number of programs on which the subject changed something.

    Raises:
        NonConforming: a law broke, shrunk to the smallest program found; or nothing was judged or nothing changed, so that
            all laws held vacuously.
    """
    adapted = adapt(getattr(subject, "__name__", type(subject).__name__), subject, feature)
    variants = adapted.variants()
    programs = resolve(FEATURES[feature].strategy)
    counts = {"judged": 0, "fired": 0, "drawn": 0}
    undecided: dict[str, Verdict] = {}

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], database=None)
    @given(programs(), sampled_from(variants))
    def law(program: Program, variant: Subject) -> None:
        counts["drawn"] += 1
        verdict = check(program, variant, seed=seed)
        if verdict.status == "FAIL":
            raise NonConforming(program, verdict)
        if verdict.status == "INCONCLUSIVE":
            undecided.setdefault(verdict.reasons[0].message, verdict)
        else:
            counts["judged"] += 1
            counts["fired"] += verdict.num_fired > 0

    law()
    if not counts["judged"] or not counts["fired"]:
        why = "; ".join(undecided) or "it changed no program"
        raise AssertionError(f"{counts['drawn']} programs drawn, {counts['judged']} judged, {counts['fired']} changed: {why}")
    return counts["fired"]


def _sentence(reason: Reason) -> str:
    return f"{reason.law}: {reason.message}"
