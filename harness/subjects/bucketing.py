"""Subjects of the feature ``bucketing``: our reference model, and the installed torch's passes as Inductor itself calls them.

``PROMISES`` says which laws bind torch's passes, and where torch says so. Sources are modules of torch 2.13.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch.fx import GraphModule

from harness.errors import UnknownSubject, Unsupported
from harness.ops import TABLE
from harness.spec.program import Program, Ref
from harness.spec.protocols import OptionValue
from harness.subjects.graph_pass import PassSubject

__all__ = ["PROMISES", "functional_until_epilogue", "inductor", "reference"]

_SMALL_CAP_MB: Final = 48 / 2**20
_BUCKETING: Final = "torch._inductor.fx_passes.bucketing"
_FSDP: Final = "torch._inductor.fx_passes.fsdp"

_COMMON: Final[Mapping[str, str]] = {
    "applies": "torch._inductor.fx_passes.post_grad calls the pass unguarded: what it raises ends the compilation",
    "runs": "torch.compile: a compiled function returns what the eager function returns",
    "equal_outputs": "torch.compile: a compiled function returns what the eager function returns",
    "equal_metadata": "torch.compile: outputs have the dtype and shape of the eager function",
    "equal_inputs": "torch.compile: mutations of inputs are those of the eager function",
    "own_storage": "torch.compile: outputs alias each other exactly where the eager function's do (AOTAutograd fixes aliasing before this pass)",
    "in_flight": "torch.distributed._functional_collectives: a result is valid after wait_tensor, an input may be reused after it",
    "graph_valid": "torch.fx.Graph.lint; post_grad sorts topologically after bucketing",
    "ranks_agree": "bucketing.greedy_bucket_collective_by_mb: buckets only adjacent collectives, so that ranks keep one order",
    "order_kept": "bucketing.greedy_bucket_collective_by_mb: non-adjacent collectives are not bucketed, as this would change their order",
    "collectives_conserved": "bucketing: each member's data goes through exactly one bucket",
    "metadata_true": "bucketing._recompute_changed_user_metadata: metadata of users is repaired where a layout changed",
    "deterministic": "torch/_inductor uses OrderedSet for sets, so that ranks, each with a hash seed of its own, compile the same graph",
    "caps_respected": "bucketing.bucket_all_gather_by_mb: groups them into buckets based on a size limit",
}
PROMISES: Final[Mapping[str, Mapping[str, str]]] = {
    name: _COMMON
    for name in (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "fsdp_all_gather",
        "fsdp_reduce_scatter",
        "fsdp_all_reduce",
        "post_grad",
    )
}
"""Pass to law to source.

Measured only: ``idempotent``, which torch nowhere promises, and ``equal_strides``, since ``bucketing._recompute_changed_user_metadata``
says that a result may be replaced by a layout-different equivalent. A view of such a result then needs a copy, which Inductor makes (it
lowers ``aten.view`` as a reshape), so their graphs run that way; and ``same_aliasing``, since AOTAutograd keeps outputs that are views of each
other out of these graphs and regenerates them.
"""


_CONTRACT_SOURCE: Final = (
    "torch._inductor.fx_passes.post_grad runs bucketing on functional graphs: mutation is brought in by the all_gather pass, which therefore comes"
    " last, and by copy_ into graph inputs at the end"
)


def functional_until_epilogue(program: Program) -> str | None:
    """Why a program lies outside the contract of torch's post-grad passes: it writes in place elsewhere than at its end into inputs."""
    num_inputs = len(program.inputs)
    in_epilogue = True
    for i, op in reversed(list(enumerate(program.ops))):
        spec = TABLE.get(op.target)
        writes = spec is not None and bool(spec.writes)
        target = op.args[0] if op.args else None
        is_epilogue = op.target == "aten.copy_.default" and isinstance(target, Ref) and target.value < num_inputs
        if writes and not (is_epilogue and in_epilogue):
            return f"op {i} ({op.target}) writes in place; {_CONTRACT_SOURCE}"
        in_epilogue = in_epilogue and is_epilogue
    return None


class _TorchPass(NamedTuple):
    module: str
    function: str
    modes: tuple[str, ...]
    kinds: tuple[str, ...]


_PASSES: Final[Mapping[str, _TorchPass]] = {
    "all_gather": _TorchPass(_BUCKETING, "bucket_all_gather", ("default", "custom_ops", "custom_ops_multidtype"), ("all_gather",)),
    "reduce_scatter": _TorchPass(_BUCKETING, "bucket_reduce_scatter", ("default", "custom_ops", "coalesced"), ("reduce_scatter",)),
    "all_reduce": _TorchPass(_BUCKETING, "bucket_all_reduce", ("all",), ("all_reduce",)),
    "fsdp_all_gather": _TorchPass(_FSDP, "bucket_fsdp_all_gather", ("default", "custom_ops", "custom_ops_multidtype"), ("all_gather",)),
    "fsdp_reduce_scatter": _TorchPass(_FSDP, "bucket_fsdp_reduce_scatter", ("default", "custom_ops", "custom_ops_multidtype"), ("reduce_scatter",)),
    "fsdp_all_reduce": _TorchPass(_FSDP, "bucket_fsdp_all_reduce", ("all",), ("all_reduce",)),
    "post_grad": _TorchPass(_BUCKETING, "bucket_all_gather", ("default", "custom_ops"), ("all_gather", "reduce_scatter", "all_reduce")),
}
_KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_PIPELINE: Final = ("reduce_scatter", "all_reduce", "all_gather")
"""The order in which ``torch._inductor.fx_passes.post_grad.post_grad_passes`` calls them."""


def inductor() -> PassSubject:
    """The installed torch's bucketing passes; the first variant is ``all_gather`` in mode ``default``."""
    return _inductor(_inductor_settings()[0])


def _inductor_settings() -> tuple[Mapping[str, OptionValue], ...]:
    return tuple(
        {"pass": name, "mode": mode, "cap_mb": cap}
        for cap in (None, _SMALL_CAP_MB)
        for name, torch_pass in _PASSES.items()
        for mode in torch_pass.modes
    )


def _inductor(options: Mapping[str, OptionValue]) -> PassSubject:
    settings = _inductor_settings()
    name, mode, cap_mb = options.get("pass"), options.get("mode"), options.get("cap_mb")
    if name not in _PASSES or mode not in _PASSES[str(name)].modes or set(options) - {"pass", "mode", "cap_mb"}:
        known = "; ".join(f"{p}: {', '.join(t.modes)}" for p, t in _PASSES.items())
        raise UnknownSubject(f"subject 'inductor' does not take {dict(options)}; passes and modes are {known}")
    if cap_mb is not None and (isinstance(cap_mb, (str, bool)) or cap_mb <= 0):
        raise UnknownSubject(f"cap_mb {cap_mb!r}; must be a number above 0, or null for torch's own cap")
    cap = None if cap_mb is None else float(cap_mb)
    steps = [_step(p, str(mode) if p != "all_reduce" else "all", cap) for p in (_PIPELINE if name == "post_grad" else (str(name),))]

    def run(gm: GraphModule) -> None:
        for step in steps:
            step(gm)
        _torch_function("torch._inductor.fx_passes.post_grad", "stable_topological_sort", parameters=("graph",))(gm.graph)

    return PassSubject(
        name="inductor",
        feature="bucketing",
        function=run,
        label=f"inductor:{name}/{mode}",
        options={"pass": name, "mode": mode, "cap_mb": cap},
        promises=frozenset(PROMISES[str(name)]),
        views_may_copy=True,
        caps_bytes=lambda _index: int((2000.0 if cap is None else cap) * 2**20),
        focus={"kinds": (*_PASSES[str(name)].kinds, *(k for k in _KINDS if k not in _PASSES[str(name)].kinds)), "mutation": "epilogue"},
        contract=functional_until_epilogue,
        make=_inductor,
        switches=_switches(str(name), str(mode), cap),
        modules=("torch._inductor.fx_passes.post_grad", _BUCKETING, _FSDP),
        settings=settings,
    )


def _switches(name: str, mode: str, cap_mb: float | None) -> Mapping[str, Any] | None:
    """What in ``torch._inductor.config`` makes Inductor call this pass; None where it has no switch for it."""
    if name == "fsdp_all_reduce":
        return None
    settings: dict[str, Any] = {}
    for kind in _PIPELINE if name == "post_grad" else (name.removeprefix("fsdp_"),):
        settings[f"bucket_{kind}s_fx"] = "only_fsdp" if name.startswith("fsdp_") else "all"
        settings[f"bucket_{kind}s_fx_bucket_size_determinator"] = None if cap_mb is None else (lambda _index: cap_mb)
        if kind != "all_reduce":
            settings[f"bucket_{kind}s_bucket_mode"] = mode
    return settings


def _step(name: str, mode: str, cap_mb: float | None) -> Callable[[GraphModule], None]:
    """One of torch's passes, called as ``post_grad`` calls it."""
    torch_pass = _PASSES[name]
    cap = None if cap_mb is None else (lambda _index: cap_mb)

    def call(gm: GraphModule) -> None:
        function = _torch_function(torch_pass.module, torch_pass.function, parameters=("gm", "bucket_cap_mb_by_bucket_idx"))
        if name == "fsdp_all_reduce":
            function(gm, cap)
        else:
            function(gm, cap, mode)

    return call


def _torch_function(module: str, name: str, *, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the installed torch, after looking whether it is there and begins with the parameters we give it."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{module}.{name}", None, f"the installed torch has no such function ({error})") from error
    seen = tuple(inspect.signature(found).parameters)
    if seen[: len(parameters)] != parameters:
        raise Unsupported(f"{module}.{name}", None, f"its parameters are {seen}, expected {parameters} first")
    return found


def reference() -> PassSubject:
    """Our own model of bucketing; it promises every law."""
    return _reference(_reference_settings()[0])


def _reference_settings() -> tuple[Mapping[str, OptionValue], ...]:
    modes = ("default", "custom_ops", "custom_ops_multidtype", "coalesced")
    return tuple(
        {"mode": mode, "cap_bytes": cap, "fsdp_only": fsdp_only}
        for cap in (None, 48)
        for fsdp_only in (False, True)
        for mode in modes
    )


def _reference(options: Mapping[str, OptionValue]) -> PassSubject:
    from harness.reference.bucketing import BucketingOptions, bucket_collectives

    if set(options) != {"mode", "cap_bytes", "fsdp_only"}:
        raise UnknownSubject(f"subject 'reference' takes mode, cap_bytes and fsdp_only, not {dict(options)}")
    cap = options["cap_bytes"]
    try:
        parsed = BucketingOptions(mode=options["mode"], cap_bytes=cap, fsdp_only=bool(options["fsdp_only"]))  # type: ignore[arg-type]
    except ValueError as error:
        raise UnknownSubject(f"subject 'reference': {error}") from None
    return PassSubject(
        name="reference",
        feature="bucketing",
        function=lambda gm: bucket_collectives(gm, parsed),
        label=f"reference/{options['mode']}",
        options=dict(options),
        caps_bytes=None if cap is None else (lambda _index: int(cap)),
        make=_reference,
        settings=_reference_settings(),
    )
