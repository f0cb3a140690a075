"""What the laws look at, and how a law is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.spec.outcome import Outcome
from harness.spec.program import Program
from harness.spec.verdict import Reason

__all__ = ["Evidence", "Law"]


class Evidence(NamedTuple):
    """One program before and after a subject.

    Attributes:
        program: what was run.
        before, after: one Outcome a trial, in the same order; unwritten memory differed between them.
        after_again: the transformed graphs' first trial once more with other unwritten memory, where a difference is to be explained.
        graphs: the transformed ``fx.GraphModule`` of each rank that the subject was applied for.
        is_exact: whether no operator on any path narrows or is opaque, so that unequal field halves alone prove a difference.
        caps_bytes: the greatest bucket allowed, by bucket index, or None.
        is_ordered: whether reductions add in rank order, so that equal programs give equal floats; a real backend has an order of its own.
        outlines: digests of the transformed graph of rank 0, one a hash seed, where that was tried.
        was_again: how many collectives a second application of the subject changed, or None where that was not tried.
    """

    program: Program
    before: Sequence[Outcome]
    after: Sequence[Outcome]
    graphs: Sequence[Any]
    is_exact: bool = True
    caps_bytes: Callable[[int], int] | None = None
    after_again: Outcome | None = None
    was_again: int | None = None
    is_ordered: bool = True
    outlines: Sequence[str] = ()


Law = Callable[[Evidence], list[Reason]]
