"""Subjects that inline saved tensor hooks: the installed torch through each backend and filtering mode, our model in place of it, and a user's backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from torch.fx import GraphModule

from harness.errors import UnknownSubject
from harness.graph.private import private
from harness.reference.saved_tensors import Halves, copied, inlined, saved_tensors
from harness.spec.outcome import JointRecord
from harness.spec.program import Program
from harness.spec.protocols import Compiler, OptionValue
from harness.subjects.autograd import BACKENDS, torch_compile

__all__ = ["MODES", "PROMISES", "THEN", "HookBackend", "Pairing", "from_backend", "saved_aot_autograd", "saved_aot_eager", "saved_inductor", "saved_reference"]

MODES: Final = ("all", "donated", "no_static")
"""Of ``torch._functorch.config.saved_tensors_hooks_filtering_mode``."""

THEN: Final = ("nothing", "plain", "bare", "other", "thread")
"""What the same compiled function is called with after two calls with the hooks: no further call; the hooks as plain functions; none; those of another pair; in another thread."""

PROMISES: Final = frozenset(
    {
        "runs",
        "raises_alike",
        "equal_outputs",
        "equal_inputs",
        "equal_grads",
        "equal_metadata",
        "equal_inlined",
        "equal_plain",
        "equal_after",
        "packed_as_modelled",
        "held_as_modelled",
        "none_bypasses",
        "calls_counted",
        "bytes_as_modelled",
        "nothing_left",
        "keyed",
    }
)
"""Inlined hooks are to be what hooks are, but for which tensors they are applied to; ``torch/_functorch/config.py`` of 2.13.0 says that."""

_GRAPH_COMPILE: Final = "torch._functorch._aot_autograd.graph_compile"
_ONLY_TWO_CALLS: Final = ("aot_autograd", "reference")
_INEXACT: Final = frozenset({"equal_plain", "bytes_as_modelled"})


class Pairing(NamedTuple):
    """A partitioned graph before and after hooks were inlined; after is the same where none were, and None where that raised."""

    before: Halves
    after: Halves | None


class _Session:
    """See ``harness.spec.protocols.Session``; ``pairings``: of each graph with a backward."""

    joint: JointRecord | None = None

    def __init__(self, compiled: Callable[[Callable[..., Any], _Session], Callable[..., Any]]) -> None:
        self._compiled = compiled
        self.num_graphs = 0
        self.pairings: list[Pairing] = []

    def wrap(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        return self._compiled(fn, self)


class HookBackend:
    """A backend with one filtering mode as a subject.

    Args:
        name: what ``--subject`` takes.
        backend: one of ``BACKENDS``, ``reference`` for our model within AOTAutograd, or a user's callable on a graph module and example inputs.
        mode, then: of ``MODES`` and ``THEN``.
        is_dynamic: whether sizes are symbolic.
        weight: how often a hunt draws it, beside its siblings.
        siblings: the variants; none for this one alone.
        promises: the laws that bind it.
    """

    feature = "saved_tensors"

    def __init__(
        self,
        name: str,
        backend: str | Callable[..., Any],
        mode: str = "all",
        then: str = "nothing",
        is_dynamic: bool = False,
        weight: int = 1,
        siblings: tuple[HookBackend, ...] = (),
        promises: frozenset[str] = PROMISES,
    ) -> None:
        self.name = name
        self.backend = backend
        self.mode = mode
        self.then = then
        self.is_dynamic = is_dynamic
        self.weight = weight
        self.promises = promises - _INEXACT if backend == "inductor" or not isinstance(backend, str) else promises
        self._siblings = siblings

    @property
    def options(self) -> Mapping[str, OptionValue]:
        """Backend, mode, what follows, and whether sizes are symbolic."""
        backend = {"backend": self.backend} if isinstance(self.backend, str) else {}
        return {**backend, "mode": self.mode, "then": self.then, "dynamic": self.is_dynamic}

    @property
    def label(self) -> str:
        """``inductor:aot_eager``."""
        return f"{self.name}:{self.backend}" if isinstance(self.backend, str) else self.name

    @property
    def focus(self) -> Mapping[str, Any]:
        """AOTAutograd itself takes functions, not modules."""
        return {"held": self.backend not in _ONLY_TWO_CALLS}

    def variants(self) -> tuple[Compiler, ...]:
        """Every setting."""
        return self._siblings or (self,)

    def refuses(self, program: Program) -> str | None:
        """What lies outside the contract."""
        if program.autograd is None or not program.autograd.saved_hooks:
            return "a program without saved tensor hooks"
        if self.backend in _ONLY_TWO_CALLS and any(spec.role != "argument" for spec in program.inputs):
            return "aot_function takes functions, not modules that hold parameters or buffers"
        if self.backend == "reference" and any(function.kept for function in program.autograd.functions):
            return "a tensor kept as an attribute of ctx, which eager does not hook; a partitioned graph does not tell it from others"
        return None

    def with_options(self, options: Mapping[str, OptionValue]) -> Compiler:
        """Another setting."""
        backend = options.get("backend", self.backend if not isinstance(self.backend, str) else None)
        mode, then, is_dynamic = options.get("mode", "all"), options.get("then", "nothing"), options.get("dynamic", False)
        known = (*BACKENDS, "reference") if isinstance(self.backend, str) else (self.backend,)
        if backend not in known or mode not in MODES or then not in THEN or not isinstance(is_dynamic, bool) or set(options) - {"backend", "mode", "then", "dynamic"}:
            raise UnknownSubject(f"subject {self.name!r} takes backend: {', '.join(map(str, known))}; mode: {', '.join(MODES)}; then: {', '.join(THEN)}; dynamic; not {dict(options)}")
        if backend in _ONLY_TWO_CALLS and (then != "nothing" or is_dynamic):
            raise UnknownSubject(f"subject {self.name!r}: {backend} compiles once, whatever it is called with; it takes then: nothing and no dynamic")
        return HookBackend(self.name, backend, str(mode), str(then), is_dynamic, promises=self.promises)  # type: ignore[arg-type]

    @contextmanager
    def session(self, *, num_backward: int) -> Iterator[_Session]:
        """See ``harness.spec.protocols.Compiler``."""
        reset = private("torch._dynamo", "reset")
        session = _Session(self._aot_function if self.backend in _ONLY_TWO_CALLS else self._torch_compile)
        with ExitStack() as stack:
            functorch = private("torch._functorch", "config")
            stack.enter_context(functorch.patch(donated_buffer=num_backward < 2, enable_autograd_cache=False, saved_tensors_hooks_filtering_mode=self.mode))
            stack.enter_context(patch(f"{_GRAPH_COMPILE}.maybe_inline_graph_saved_tensors_hooks", self._inlining(session)))
            if self.backend not in _ONLY_TWO_CALLS:
                stack.enter_context(private("torch._dynamo", "config").patch(fail_on_recompile_limit_hit=True))
                if self.backend == "inductor" or not isinstance(self.backend, str):
                    stack.enter_context(private("torch._inductor", "config").patch(force_disable_caches=True, compile_threads=1))
                reset()
                stack.callback(reset)
            yield session

    def inline(self) -> Callable[..., None]:
        """Torch's inlining, or that of our model."""
        return _by_model(self.mode) if self.backend == "reference" else private(_GRAPH_COMPILE, "maybe_inline_graph_saved_tensors_hooks")

    def _inlining(self, session: _Session) -> Callable[..., None]:
        """The same, with the graphs taken down before and after."""
        inline = self.inline()

        def noting(forward: GraphModule, backward: GraphModule, num_outputs: int, meta: Any, config: Any, static: list[int]) -> None:
            halves = Halves(forward, backward, num_outputs, tuple(static))
            session.pairings.append(Pairing(copied(halves), None))
            inline(forward, backward, num_outputs, meta, config, static)
            session.pairings[-1] = session.pairings[-1]._replace(after=copied(halves))

        return noting

    def _torch_compile(self, fn: Callable[..., Any], session: _Session) -> Callable[..., Any]:
        return torch_compile(fn, self.backend, session, is_dynamic=self.is_dynamic)

    def _aot_function(self, fn: Callable[..., Any], session: _Session) -> Callable[..., Any]:
        nop = private("functorch.compile", "nop")

        def compiler(gm: GraphModule, example_inputs: Any) -> Any:
            session.num_graphs += 1
            return nop(gm, example_inputs)

        partition = private("functorch.compile", "default_partition")
        return private("functorch.compile", "aot_function")(
            fn, fw_compiler=compiler, bw_compiler=nop, partition_fn=partition, inference_compiler=compiler, keep_inference_input_mutations=True
        )


def _by_model(mode: str) -> Callable[..., None]:
    def inline(forward: GraphModule, backward: GraphModule, num_outputs: int, meta: Any, config: Any, static: list[int]) -> None:
        utils = "torch._functorch._aot_autograd.utils"
        hooks = private(utils, "top_saved_tensors_hooks")()
        if not private(utils, "saved_tensors_hooks_are_inlineable")(hooks):
            return
        halves = Halves(forward, backward, num_outputs, tuple(static))
        pack, unpack = hooks
        rewritten = inlined(halves, saved_tensors(halves, mode, pack), pack, unpack)
        for gm, new in ((forward, rewritten.forward), (backward, rewritten.backward)):
            gm.graph = new.graph
            gm.recompile()

    return inline


def saved_inductor() -> HookBackend:
    """The installed torch, through each backend, filtering mode, and what may follow."""
    settings = [("aot_autograd", mode, "nothing", False, 20) for mode in MODES]
    settings += [("aot_eager", mode, "nothing", False, 8) for mode in MODES]
    settings += [("aot_eager_decomp_partition", mode, "nothing", False, 4) for mode in MODES]
    settings += [("aot_eager", mode, then, False, 1) for mode in ("all", "donated") for then in THEN[1:]]
    settings += [("aot_eager", "all", "nothing", True, 1), ("inductor", "all", "nothing", False, 1)]
    return _with_siblings("inductor", settings)


def saved_aot_eager() -> HookBackend:
    """The installed torch's AOTAutograd alone, behind Dynamo."""
    return _with_siblings("inductor", [("aot_eager", mode, "nothing", False, 1) for mode in MODES])


def saved_aot_autograd() -> HookBackend:
    """The installed torch's AOTAutograd alone, called directly."""
    return _with_siblings("inductor", [("aot_autograd", mode, "nothing", False, 1) for mode in MODES])


def saved_reference() -> HookBackend:
    """Our model in place of torch's inlining, within AOTAutograd."""
    return _with_siblings("reference", [("reference", mode, "nothing", False, 1) for mode in MODES])


def _with_siblings(name: str, settings: list[tuple[str, str, str, bool, int]]) -> HookBackend:
    siblings = tuple(HookBackend(name, *setting) for setting in settings)
    return HookBackend(name, *settings[0], siblings=siblings)


def from_backend(name: str, feature: str, found: Callable[..., Any]) -> HookBackend:
    """A user's backend, as ``torch.compile(backend=...)`` takes it, in each filtering mode."""
    return HookBackend(name, found, siblings=tuple(HookBackend(name, found, mode) for mode in MODES))
