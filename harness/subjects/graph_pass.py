"""A pass over graph modules as a Subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from harness.errors import UnknownSubject
from harness.graph import collectives
from harness.spec.program import Program
from harness.spec.protocols import Applied, OptionValue

__all__ = ["PassSubject", "from_callable", "num_changed"]

ALL_LAWS = frozenset({"*"})


@dataclass(frozen=True, kw_only=True)
class PassSubject:
    """One pass with one setting of its options; see ``harness.spec.protocols.Subject``.

    Attributes:
        function: called with the graph module; changes it in place or returns another. It may return a second value that has
            ``declined``, a sequence of reasons.
        settings: every setting worth testing.
        promises: the names of laws that bind the pass; ``*`` stands for all laws of the feature.
        caps_bytes: the largest bucket allowed, by bucket index.
        views_may_copy: its graphs are for a compiler that lowers ``aten.view`` as a reshape.
        focus: arguments for the feature's strategy that draw programs on which the pass has something to do.
        contract: says why a program lies outside what the pass is documented to take, or None.
        switches: settings of ``torch._inductor.config`` that switch the pass on inside ``torch.compile``; None where Inductor is to be given it as a custom pass.
        modules: what the pass imports when it is first called; real ranks import it before a case's time runs.
        make: gives this subject with other options.
    """

    name: str
    feature: str
    function: Callable[..., Any]
    label: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    promises: frozenset[str] = ALL_LAWS
    caps_bytes: Callable[[int], int] | None = None
    views_may_copy: bool = False
    focus: Mapping[str, Any] = field(default_factory=dict)
    contract: Callable[[Program], str | None] | None = None
    make: Callable[[Mapping[str, OptionValue]], PassSubject] | None = None
    settings: Sequence[Mapping[str, OptionValue]] = ()
    switches: Mapping[str, Any] | None = None
    modules: tuple[str, ...] = ()

    def variants(self) -> tuple[PassSubject, ...]:
        """Every setting worth testing."""
        return tuple(self.with_options(s) for s in self.settings) if self.settings else (self,)

    def with_options(self, options: Mapping[str, OptionValue]) -> PassSubject:
        """This subject with another setting.

        Raises:
            UnknownSubject: it does not take those options.
        """
        if self.make is not None:
            return self.make(options)
        if options:
            raise UnknownSubject(f"subject {self.name!r} takes no options, got {dict(options)}")
        return replace(self, options={})

    def refuses(self, program: Program) -> str | None:
        """Why ``program`` lies outside the pass's documented contract, or None where it does not."""
        return None if self.contract is None else self.contract(program)

    def apply(self, gm: GraphModule, rank: int) -> Applied:
        """Run the pass; what it changed is seen by comparing the graph with what it was."""
        before, shape = collectives(gm.graph), outline(gm.graph)
        returned = self.function(gm)
        result = returned if isinstance(returned, GraphModule) else gm
        declined = tuple(str(reason) for reason in getattr(returned, "declined", ()))
        return Applied(result, num_changed(before, shape, result.graph), declined)


def from_callable(name: str, feature: str, function: Callable[..., Any]) -> PassSubject:
    """A user's callable as a Subject that promises every law of the feature."""
    return PassSubject(name=name, feature=feature, function=function, label=name)


def num_changed(before: Sequence[Node], shape: list[tuple[Any, ...]], graph: Graph) -> int:
    """How many collectives are new or gone; where none, 1 if the graph changed in any other way, else 0."""
    old, new = {id(node) for node in before}, {id(node) for node in collectives(graph)}
    return len(old - new) or len(new - old) or int(outline(graph) != shape)


def outline(graph: Graph) -> list[tuple[Any, ...]]:
    """The graph's nodes with their arguments and metadata, by identity; equal outlines mean nothing changed."""
    return [(id(node), node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in graph.nodes]
