"""One graph through ``torch.compile`` on this process's rank: with ``aot_eager`` or Inductor, and with a pass switched on inside it.

Caches are off, and every graph is compiled by a fresh Dynamo, so that nothing is judged that another case compiled. Torch's configuration
lives in context variables: it is set in the thread that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from harness.errors import Unsupported
from harness.executors.field_rules import dtype_name
from harness.executors.record import record
from harness.graph import is_collective, target_name
from harness.graph.private import private
from harness.ops import TABLE
from harness.spec.outcome import CollectiveRecord, ErrorRecord, RankOutcome

__all__ = ["COMPILERS", "MODULES", "CompiledRun", "Compiler", "run_compiled"]

Compiler = Literal["aot_eager", "inductor"]
COMPILERS: Final[tuple[Compiler, ...]] = ("aot_eager", "inductor")
MODULES: Final = ("torch._dynamo.backends.common", "torch._inductor.compile_fx")
"""What compiling imports."""

_COMPILE_FX: Final = "torch._inductor.compile_fx"
_CONFIG: Final[Mapping[str, Any]] = {"force_disable_caches": True, "compile_threads": 1}

Pass = Callable[[GraphModule], tuple[GraphModule, int]]


class CompiledRun(NamedTuple):
    """What a compiled graph did.

    Attributes:
        outcome: as of an eager run; its collectives are those of the graph that the compiler went on with after the pass.
        num_fired: what the pass changed: as it says itself, or, where torch's configuration switched it on, how many collectives fewer there are.
        in_pass: the exception that ended the pass, where one did.
    """

    outcome: RankOutcome
    num_fired: int = 0
    in_pass: Exception | None = None


class _Seen:
    """What the compiler was seen to do."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_fired = 0
        self.collectives: tuple[CollectiveRecord, ...] = ()
        self.in_pass: Exception | None = None

    def applied(self, own_pass: Pass, gm: GraphModule) -> GraphModule:
        try:
            result, num_fired = own_pass(gm)
        except Exception as error:
            self.in_pass = error
            raise
        self.num_fired += num_fired
        return result


def run_compiled(
    gm: GraphModule,
    inputs: Sequence[Tensor],
    *,
    compiler: Compiler,
    own_pass: Pass | None,
    switches: Mapping[str, Any] | None,
    at: Callable[[str], None],
) -> CompiledRun:
    """Compile ``gm`` and run it once; ``inputs`` are written to where the graph does.

    Args:
        gm: straight-line tensor code.
        inputs: this rank's.
        compiler: ``aot_eager``, where the pass is applied to the graph that AOTAutograd made; or ``inductor``.
        own_pass: what is applied; it gives the graph and how much it changed. None for no pass.
        switches: settings of ``torch._inductor.config`` that switch the pass on within Inductor; where None it is given to
            Inductor as ``post_grad_custom_post_pass``.
        at: told where it is.

    Raises:
        Unsupported: the compiler made none, or several, of the graph; or the installed torch lacks what is needed.
    """
    seen = _Seen()
    versions = [t._version for t in inputs]
    plain = GraphModule(torch.nn.Module(), gm.graph)  # whose code is its own, so that Dynamo traces it anew
    backend = _aot_eager(seen, own_pass) if compiler == "aot_eager" else _inductor(seen)
    private("torch._dynamo", "reset")()
    at(f"compiling with {compiler}")
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for context in _settings(seen, compiler, own_pass, switches, at):
            stack.enter_context(context)
        try:
            outputs = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)(*inputs)
        except Exception as raised:
            if isinstance(raised, Unsupported):
                raise
            inner = _inner(raised)
            place = "compiled code" if seen.num_graphs else "the compiler"
            error = ErrorRecord(type(inner).__name__, str(inner), f"{place} ({compiler})")
            return CompiledRun(RankOutcome(error=error), seen.num_fired, seen.in_pass)
        finally:
            private("torch._dynamo", "reset")()
    if seen.num_graphs != 1:
        raise Unsupported(compiler, None, f"torch.compile made {seen.num_graphs} graphs of this program, not one")
    tensors = [t for t in outputs if isinstance(t, Tensor)]
    seen_inputs, seen_outputs = record(inputs, tensors, versions, keep=True)
    return CompiledRun(RankOutcome(outputs=seen_outputs, inputs=seen_inputs, collectives=seen.collectives), seen.num_fired)


def _aot_eager(seen: _Seen, own_pass: Pass | None) -> Callable[..., Any]:
    boxed = private("functorch.compile", "make_boxed_func")

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        result = gm if own_pass is None else seen.applied(own_pass, gm)
        result.recompile()
        seen.num_graphs += 1
        seen.collectives = _issued(result)
        return boxed(result.forward)

    backend: Callable[..., Any] = private("torch._dynamo.backends.common", "aot_autograd")(
        fw_compiler=compiler, keep_inference_input_mutations=True
    )
    return backend


def _inductor(seen: _Seen) -> Callable[..., Any]:
    compile_fx = private(_COMPILE_FX, "compile_fx")

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_fx(gm, example_inputs)

    return backend


def _settings(
    seen: _Seen, compiler: Compiler, own_pass: Pass | None, switches: Mapping[str, Any] | None, at: Callable[[str], None]
) -> list[Any]:
    """The contexts to compile in: torch's configuration, and a look at the graph before and after Inductor's passes."""
    if compiler == "aot_eager":
        return []
    config = dict(_CONFIG)
    if own_pass is not None:
        config.update({"post_grad_custom_post_pass": _custom(seen, own_pass)} if switches is None else switches)
    whole = private(_COMPILE_FX, "post_grad_passes")

    def looked_at(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        before = len(_issued(gm))
        try:
            result = whole(gm, *args, **kwargs)
        except Exception as error:
            seen.in_pass = seen.in_pass or error
            raise
        seen.num_graphs += 1
        seen.collectives = _issued(gm)
        if switches is not None and own_pass is not None:
            seen.num_fired += max(before - len(seen.collectives), 0)
        at(f"compiled with {compiler}")
        return result

    return [private("torch._inductor", "config").patch(**config), patch(f"{_COMPILE_FX}.post_grad_passes", looked_at)]


def _custom(seen: _Seen, own_pass: Pass) -> Callable[[Any], None]:
    """The pass as Inductor calls it: with a graph, which it changes in place."""

    def run(graph: Any) -> None:
        owner = graph.owning_module
        result = seen.applied(own_pass, owner)
        if result is not owner:
            raise Unsupported("a pass that returns another module", None, "Inductor takes only passes that change the graph in place")
        private("torch._inductor.fx_passes.post_grad", "stable_topological_sort")(owner.graph)

    return run


def _inner(error: Exception) -> Exception:
    """What a compiler's own exception was raised for."""
    while isinstance(cause := getattr(error, "inner_exception", None), Exception):
        error = cause
    return error


def _issued(gm: GraphModule) -> tuple[CollectiveRecord, ...]:
    """The collectives of a graph, by its metadata."""
    return tuple(_record(node) for node in gm.graph.nodes if node.op == "call_function" and is_collective(node))


def _record(node: Node) -> CollectiveRecord:
    spec = TABLE[target_name(node)].collective
    assert spec is not None
    operands: Any = node.args[0] if spec.coalesced else [node.args[0]]
    values = [n.meta["val"] for n in operands]
    return CollectiveRecord(
        spec.kind,
        str(node.args[spec.group]),
        None if spec.reduce_op is None else str(node.args[spec.reduce_op]),
        tuple(dtype_name(v.dtype) for v in values),
        sum(v.numel() * v.element_size() for v in values),
        node.name,
    )
