"""The roles of the harness, as protocols; no torch, so graphs are ``Any`` here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from harness.spec.outcome import JointRecord
from harness.spec.program import Program

__all__ = ["Applied", "Clock", "Compiler", "GraphPass", "OptionValue", "Session", "Subject"]

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


class Session(Protocol):
    """One compilation by a Compiler, and what was seen of it."""

    @property
    def num_graphs(self) -> int:
        """How many graphs were compiled."""

    @property
    def joint(self) -> JointRecord | None:
        """The joint graph, where the compiler shows one."""

    def wrap(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """The compiled form of ``fn``, which takes and returns tensors."""


@runtime_checkable
class Compiler(Protocol):
    """One compiler of programs with a backward, with one setting of its options; beside ``session`` as a Subject."""

    @property
    def name(self) -> str: ...

    @property
    def feature(self) -> str: ...

    @property
    def options(self) -> Mapping[str, OptionValue]: ...

    @property
    def label(self) -> str: ...

    @property
    def promises(self) -> frozenset[str]: ...

    @property
    def focus(self) -> Mapping[str, Any]: ...

    def variants(self) -> tuple[Compiler, ...]: ...

    def refuses(self, program: Program) -> str | None: ...

    def session(self, *, num_backward: int) -> AbstractContextManager[Session]:
        """Compile with it, in this thread, with nothing left of what was compiled before; ``num_backward``: how often backward will run."""


class Clock(Protocol):
    """Measures where the time of a check goes."""

    def phase(self, name: str, /) -> AbstractContextManager[None]:
        """Time spent inside counts for ``name``: ``draw``, ``build``, ``pass``, ``run`` or ``judge``."""
