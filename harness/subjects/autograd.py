"""Subjects that compile programs with a backward: torch.compile's backends, AOTAutograd called directly, our model, and a user's backend.

Everything is compiled anew, without caches, in the thread that runs it: torch's configuration lives in context variables.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.fx import GraphModule, Node

from harness.errors import UnknownSubject
from harness.graph.private import private
from harness.reference.mutation import Functionalised, functionalise
from harness.spec.outcome import Counters, JointRecord
from harness.spec.program import Program
from harness.spec.protocols import Compiler, OptionValue

__all__ = ["BACKENDS", "PROMISES", "Backend", "Model", "from_backend", "mutation_aot_autograd", "mutation_aot_eager", "mutation_inductor", "mutation_reference", "torch_compile"]

BACKENDS: Final = ("aot_eager", "aot_eager_decomp_partition", "aot_autograd", "inductor")
"""What the installed torch compiles with; ``aot_autograd`` is ``aot_function`` without Dynamo, which shows its joint graph."""

PROMISES: Final = frozenset(
    {
        "runs",
        "refuses",
        "equal_outputs",
        "equal_inputs",
        "equal_grads",
        "equal_metadata",
        "equal_strides",
        "same_connectivity",
        "same_aliasing",
        "versions_advance",
        "counters_agree",
        "copies_in_their_halves",
        "functional_until_epilogue",
        "one_graph",
    }
)
"""AOTAutograd's own notes promise it to be what eager is, mutations and aliases included: ``torch/_functorch/_aot_autograd`` of 2.13.0, "Note [AOT Autograd: ...]". What eager refuses is
refused by Dynamo, which runs a program on fake tensors first: ``aot_function`` without it does not promise that."""
_CAPTURE: Final = "torch._functorch._aot_autograd.graph_capture"
_HALVES: Final = {"must_be_in_forward": "forward", "must_be_in_backward": "backward"}


class _Session:
    """See ``harness.spec.protocols.Session``."""

    def __init__(self, compiled: Callable[[Callable[..., Any], _Session], Callable[..., Any]]) -> None:
        self._compiled = compiled
        self.num_graphs = 0
        self.joint: JointRecord | None = None
        self.has_raised = False

    def wrap(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        compiled = self._compiled(fn, self)

        def call(*args: Any) -> Any:
            try:
                return compiled(*args)
            except Exception:
                self.has_raised = True
                raise

        return call


class Backend:
    """A backend of ``torch.compile`` as a subject.

    Args:
        name: what ``--subject`` takes.
        feature: ``mutation`` or ``saved_tensors``.
        backend: one of ``BACKENDS``, or a user's callable on a graph module and example inputs.
        siblings: the backends that are the variants; none for this one alone.
        promises: the laws that bind it.
    """

    def __init__(
        self, name: str, feature: str, backend: str | Callable[..., Any], siblings: tuple[str, ...] = (), promises: frozenset[str] = PROMISES
    ) -> None:
        self.name = name
        self.feature = feature
        self.backend = backend
        self.promises = promises - {"refuses"} if backend == "aot_autograd" else promises
        self._siblings = siblings

    def promising(self, *laws: str) -> Backend:
        """The same, held to ``laws`` too, such as ``grad_output_kept``."""
        return Backend(self.name, self.feature, self.backend, self._siblings, self.promises | set(laws))

    @property
    def options(self) -> Mapping[str, OptionValue]:
        """Which backend."""
        return {"backend": self.backend} if isinstance(self.backend, str) else {}

    @property
    def label(self) -> str:
        """``inductor:aot_eager``."""
        return f"{self.name}:{self.backend}" if isinstance(self.backend, str) else self.name

    @property
    def focus(self) -> Mapping[str, Any]:
        """AOTAutograd itself takes functions, not modules."""
        return {"held": False} if self.backend == "aot_autograd" else {}

    @property
    def weight(self) -> int:
        """How often a hunt draws it, beside its siblings: a backend that calls a C++ compiler seldom."""
        return 1 if self.backend == "inductor" else 16

    def variants(self) -> tuple[Compiler, ...]:
        """Every backend."""
        return tuple(Backend(self.name, self.feature, n, self._siblings, self.promises) for n in self._siblings) or (self,)

    def refuses(self, program: Program) -> str | None:
        """What lies outside the contract."""
        if program.autograd is None and program.groups:
            return "a program with collectives; the backend is given programs of one rank"
        if self.backend == "aot_autograd" and any(spec.role != "argument" for spec in program.inputs):
            return "aot_function takes functions, not modules that hold parameters or buffers"
        return None

    def with_options(self, options: Mapping[str, OptionValue]) -> Compiler:
        """Another backend."""
        backend = options.get("backend")
        if set(options) != {"backend"} or backend not in BACKENDS:
            raise UnknownSubject(f"subject {self.name!r} takes backend: {', '.join(BACKENDS)}; not {dict(options)}")
        return Backend(self.name, self.feature, str(backend), (), self.promises)

    @contextmanager
    def session(self, *, num_backward: int) -> Iterator[_Session]:
        """See ``harness.spec.protocols.Compiler``.

        Dispatch keys are put back afterwards: a compile that raises in inference mode leaves them changed when its frames are freed.
        """
        reset = private("torch._dynamo", "reset")
        with ExitStack() as stack:
            stack.enter_context(private("torch._functorch", "config").patch(donated_buffer=num_backward < 2, enable_autograd_cache=False))
            if self.backend == "aot_autograd":
                yield _Session(_aot_autograd)
                return
            stack.enter_context(private("torch._dynamo", "config").patch(fail_on_recompile_limit_hit=True))
            if self.backend == "inductor" or not isinstance(self.backend, str):
                stack.enter_context(private("torch._inductor", "config").patch(force_disable_caches=True, compile_threads=1))
            reset()
            stack.callback(reset)
            include, exclude = (private("torch._C", f"_dispatch_tls_local_{which}_set")() for which in ("include", "exclude"))
            stack.enter_context(private("torch._C", "_ForceDispatchKeyGuard")(include, exclude))
            session = _Session(self._torch_compile)
            yield session
            if session.has_raised:
                gc.collect()

    def _torch_compile(self, fn: Callable[..., Any], session: _Session) -> Callable[..., Any]:
        return torch_compile(fn, self.backend, session)


def torch_compile(fn: Callable[..., Any], backend: str | Callable[..., Any], session: Any, *, is_dynamic: bool = False) -> Callable[..., Any]:
    """``fn`` through ``torch.compile`` as one graph; ``session.num_graphs`` counts graphs, not what Dynamo begins again."""
    own = private("torch._dynamo", "lookup_backend")(backend) if isinstance(backend, str) else backend

    def counted(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        compiled = own(gm, example_inputs, **kwargs)
        session.num_graphs += 1
        return compiled

    return torch.compile(fn, backend=counted, fullgraph=True, dynamic=is_dynamic)


def _aot_autograd(fn: Callable[..., Any], session: _Session) -> Callable[..., Any]:
    """``fn`` through ``aot_function``, the joint graph and its counters taken down on the way."""
    nop, partition = private("functorch.compile", "nop"), private("functorch.compile", "default_partition")
    create = private(_CAPTURE, "create_functionalized_fn")
    wrappers = f"{_CAPTURE}_wrappers"
    count = private(wrappers, "_get_mutation_counters")
    in_graph: list[int] = []
    counted: list[Counters] = []

    def noting_inputs(*args: Any, meta: Any, **kwargs: Any) -> Any:
        in_graph[:] = [i for i, info in enumerate(meta.input_info) if info.mutation_type.name == "MUTATED_IN_GRAPH"]
        counted.clear()
        return create(*args, meta=meta, **kwargs)

    def noting_counters(tensor: Any) -> Any:
        found = count(tensor)
        counted.append(Counters(found.mc_data, found.mc_storage, found.mc_inductor_storage_resized))
        return found

    def forward_compiler(gm: GraphModule, example_inputs: Any) -> Any:
        session.num_graphs += 1
        return nop(gm, example_inputs)

    def inference_compiler(gm: GraphModule, example_inputs: Any) -> Any:
        session.joint = _joint(gm, in_graph, counted, has_backward=False)
        return forward_compiler(gm, example_inputs)

    def noting_joint(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        session.joint = _joint(gm, in_graph, counted, has_backward=True)
        return partition(gm, *args, **kwargs)

    compiled = private("functorch.compile", "aot_function")(
        fn, fw_compiler=forward_compiler, bw_compiler=nop, partition_fn=noting_joint, inference_compiler=inference_compiler, keep_inference_input_mutations=True
    )

    def call(*args: Any) -> Any:
        with patch(f"{_CAPTURE}.create_functionalized_fn", noting_inputs), patch(f"{wrappers}._get_mutation_counters", noting_counters):
            return compiled(*args)

    return call


def _joint(gm: GraphModule, in_graph: list[int], counted: list[Counters], *, has_backward: bool) -> JointRecord:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    primals = [n for n in placeholders if not n.name.startswith("tangents")]
    copies: list[tuple[int, str]] = []
    stray: list[str] = []
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        if node.args and isinstance(node.args[0], Node) and node.args[0] in primals:
            if schema.name == "aten::copy_":
                tag = node.meta.get("partitioner_tag", "")
                copies.append((primals.index(node.args[0]), _HALVES.get(tag, "") if has_backward else "forward"))
        elif not (node.args and node.args[0] in placeholders):
            stray.append(str(node.target))
    half = len(in_graph) if len(counted) == 2 * len(in_graph) else 0
    return JointRecord(has_backward, len(primals), tuple(in_graph), tuple(counted[:half]), tuple(counted[half:]) if half else (), tuple(copies), tuple(stray))


class Model:
    """Our own functionaliser, ``harness.reference.mutation``, as a compiler."""

    name = label = "reference"
    feature = "mutation"
    options: Mapping[str, OptionValue] = {}
    focus: Mapping[str, Any] = {}
    promises = PROMISES

    def variants(self) -> tuple[Compiler, ...]:
        """This one alone."""
        return (self,)

    def refuses(self, program: Program) -> str | None:
        """What lies outside the contract."""
        return "a program with collectives; the model runs programs of one rank" if program.groups else None

    @contextmanager
    def session(self, *, num_backward: int) -> Iterator[_Session]:
        """See ``harness.spec.protocols.Compiler``."""
        yield _Session(_modelled)


def _modelled(fn: Callable[..., Any], session: _Session) -> Callable[..., Any]:
    """``fn`` functionalised once for each geometry of its arguments; a module's tensors are arguments too."""
    held: list[torch.Tensor] = []
    function = fn
    if isinstance(fn, torch.nn.Module):
        named = {**dict(fn.named_parameters(remove_duplicate=False)), **dict(fn.named_buffers(remove_duplicate=False))}
        held = list(named.values())

        def function(*args: Any) -> Any:
            return torch.func.functional_call(fn, dict(zip(named, args[: len(held)], strict=True)), args[len(held) :])

    made: dict[tuple[object, ...], Functionalised] = {}

    def call(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = (*held, *args)
        key = _geometries(given)
        if key not in made:
            made[key] = functionalise(function, given)
            session.num_graphs += 1
            session.joint = made[key].record
        return made[key].run(*given)

    return call


def _geometries(args: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
    """What ``functionalise`` depends on."""
    storages, bases = [t.untyped_storage()._cdata for t in args], [id(t if t._base is None else t._base) for t in args]
    return tuple(
        (t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf, t.untyped_storage().nbytes(), storages.index(s), bases.index(b))
        for t, s, b in zip(args, storages, bases, strict=True)
    )


def mutation_reference() -> Model:
    """Our model of what AOTAutograd has to do."""
    return Model()


def mutation_inductor() -> Backend:
    """The installed torch, through each of ``BACKENDS``."""
    return Backend("inductor", "mutation", BACKENDS[0], BACKENDS)


def mutation_aot_eager() -> Backend:
    """The installed torch's AOTAutograd alone, behind Dynamo."""
    return Backend("inductor", "mutation", "aot_eager")


def mutation_aot_autograd() -> Backend:
    """The installed torch's AOTAutograd alone, called directly."""
    return Backend("inductor", "mutation", "aot_autograd")


def from_backend(name: str, feature: str, found: Callable[..., Any]) -> Backend:
    """A user's backend, as ``torch.compile(backend=...)`` takes it."""
    return Backend(name, feature, found)
