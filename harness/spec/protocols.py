"""The roles of the harness, as protocols; no torch, so graphs are ``Any`` here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from harness.spec.program import Program

__all__ = ["Applied", "Clock", "GraphPass", "OptionValue", "Subject"]

OptionValue = str | int | float | bool | None


@runtime_checkable
class GraphPass(Protocol):
    """What a user brings: a callable that changes an ``fx.GraphModule`` in place, or returns a changed one."""

    def __call__(self, gm: Any, /) -> Any: ...


class Applied(NamedTuple):
    """What one application of a subject did on one rank.

    Attributes:
        graph: the transformed ``fx.GraphModule``.
        num_fired: how many things the subject says, or is seen, to have changed.
        declined: a reason for each thing it left alone, where the subject gives any.
    """

    graph: Any
    num_fired: int
    declined: tuple[str, ...] = ()


class Subject(Protocol):
    """One implementation of one feature, with one setting of its options."""

    @property
    def name(self) -> str:
        """What ``--subject`` takes: ``reference``, ``inductor`` or a user's ``module:attribute``."""

    @property
    def feature(self) -> str:
        """The feature it implements."""

    @property
    def options(self) -> Mapping[str, OptionValue]:
        """The setting, as a Finding stores it."""

    @property
    def label(self) -> str:
        """The name with the pass that runs, as Signature.subject has it."""

    @property
    def promises(self) -> frozenset[str]:
        """The names of the laws that bind it; other laws are measured and noted, never an accusation."""

    def variants(self) -> tuple[Subject, ...]:
        """Every setting worth testing, this one's included."""

    def refuses(self, program: Program) -> str | None:
        """Why ``program`` lies outside the subject's documented contract, or None where it does not."""

    @property
    def focus(self) -> Mapping[str, Any]:
        """Arguments for the feature's strategy that draw programs on which this variant has something to do."""

    @property
    def switches(self) -> Mapping[str, Any] | None:
        """Settings of ``torch._inductor.config`` that switch it on inside ``torch.compile``; None where it is to be given to Inductor as a custom pass."""

    def apply(self, gm: Any, rank: int) -> Applied:
        """Transform ``gm`` as rank ``rank``; may change it in place. Called inside a fake world of that rank."""


class Clock(Protocol):
    """Measures where the time of a check goes."""

    def phase(self, name: str, /) -> AbstractContextManager[None]:
        """Time spent inside counts for ``name``: ``draw``, ``build``, ``pass``, ``run`` or ``judge``."""
