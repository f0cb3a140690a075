"""Saved tensor hooks through the installed torch: every pair in every mode is judged rightly, hooks leave nothing behind, and planted faults are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from harness.check import check
from harness.errors import InvalidProgram
from harness.executors.autograd import case_of_program, run_case
from harness.graph.saved_hooks import PAIRS, graph_modules, hooks_around
from harness.oracles.saved_tensors import SAVED_TENSOR_LAWS, HookRuns, Slot
from harness.reference.saved_tensors import Halves, Saved, inlined, saved_tensors
from harness.spec.program import Autograd, Function, Op, Program, Ref, TensorSpec, decode_program, encode_program
from harness.spec.saved_hooks import SAVED_HOOKS
from harness.subjects.registry import load_subject
from harness.subjects.saved_tensors import MODES, THEN, HookBackend

RAISES = ("raises_in_pack", "raises_in_unpack")
CRASHES = {"twice": {"runs", "equal_inlined"}, "buffer": {"runs"}}
"""What torch 2.13.0 and 2.14.1 cannot inline, and the laws that say so."""
HOOKED = {"all": 5, "no_static": 5, "donated": 4}
"""The saved tensors of ``chain`` that hooks are applied to: the input is not donated."""


def chain(*hooks: str, num_backward: int = 1) -> Program:
    """``where(b > 1, a * b, b)`` of ``a = x * x`` and ``b = exp(a)``: saves the input, intermediates, and a mask."""
    ops = (
        Op("aten.mul.Tensor", (Ref(0), Ref(0))),
        Op("aten.exp.default", (Ref(1),)),
        Op("aten.mul.Tensor", (Ref(1), Ref(2))),
        Op("aten.gt.Scalar", (Ref(2), 1)),
        Op("aten.where.self", (Ref(4), Ref(3), Ref(2))),
    )
    inputs = (TensorSpec((3, 3), "float32", requires_grad=True),)
    return Program(1, (), inputs, ops, (Ref(5),), autograd=Autograd((), num_backward, saved_hooks=hooks))


def square(*hooks: str) -> Program:
    """The square of a vector, which is saved."""
    inputs = (TensorSpec((4,), "float32", requires_grad=True),)
    return Program(1, (), inputs, (Op("aten.mul.Tensor", (Ref(0), Ref(0))),), (Ref(1),), autograd=Autograd(saved_hooks=hooks))


def kept_and_written() -> Program:
    """A tensor kept as an attribute of ``ctx``, to which backward adds the gradient: no hook is to reach it, as in eager."""
    function = Function(
        2, (Op("aten.mul.Tensor", (Ref(0), 3)),), (Ref(2),), kept=(Ref(1),),
        backward=(Op("aten.add_.Tensor", (Ref(1), Ref(0))), Op("aten.mul.Tensor", (Ref(0), 3))), grads=(Ref(3), None),
    )  # fmt: skip
    inputs = (TensorSpec((4,), "float32", requires_grad=True), TensorSpec((4,), "float32"))
    return Program(1, (), inputs, (Op("autograd.apply", (0, Ref(0), Ref(1))),), (Ref(2, 0),), autograd=Autograd((function,), saved_hooks=("clone",)))


def subject(backend: str = "aot_autograd", mode: str = "all", then: str = "nothing", dynamic: bool = False) -> HookBackend:
    """One setting of the installed torch, or of the reference."""
    name = "reference" if backend == "reference" else "inductor"
    found = load_subject(name, feature="saved_tensors", options={"backend": backend, "mode": mode, "then": then, "dynamic": dynamic})
    assert isinstance(found, HookBackend)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", PAIRS)
def test_each_pair_in_each_mode(pair: str, mode: str) -> None:
    """The installed torch inlines every pair rightly but those that it cannot, and these fail by the laws that are named."""
    verdict = check(chain(pair), subject(mode=mode))
    assert verdict.num_fired == (HOOKED[mode] if PAIRS[pair].traits.is_inlineable else HOOKED["all"])
    assert {r.law for r in verdict.reasons} <= CRASHES.get(pair, set())
    assert (verdict.status == "FAIL") == (pair in CRASHES)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_reference_inlines_every_pair(pair: str) -> None:
    """Our model in place of torch's inlining has no fault, with those pairs too that torch cannot inline."""
    verdict = check(chain(pair, num_backward=2), subject("reference"))
    assert verdict.status == "PASS" and verdict.num_fired, verdict.reasons


@pytest.mark.parametrize("backend", ["aot_autograd", "aot_eager"])
def test_a_write_in_backward_to_a_hooked_input_is_lost(backend: str) -> None:
    """The installed torch writes into what unpack gave instead of into the input; where the input is not hooked, it writes the input."""
    assert [(r.law, r.kind) for r in check(kept_and_written(), subject(backend)).reasons] == [("equal_inputs", "values")]
    assert check(kept_and_written(), subject(backend, "donated")).status == "PASS"


@pytest.mark.parametrize("then", THEN[1:])
@pytest.mark.parametrize("pair", ["bfloat16", "doubled", "logs", "raises_in_unpack"])
def test_hooks_are_keyed_and_stay_where_they_are_set(pair: str, then: str) -> None:
    """The same compiled function with plain, other or no hooks, or in another thread, is compiled anew and is what eager is."""
    verdict = check(chain(pair), subject("aot_eager", "donated", then))
    assert verdict.status == "PASS", verdict.reasons


@pytest.mark.parametrize("hooks", [("float8", "clone"), ("logs", "bfloat16"), ("bfloat16", "logs"), ("raises_in_pack", "identity")])
def test_the_innermost_pair_wins(hooks: tuple[str, ...]) -> None:
    """Of nested pairs the innermost is applied, also where one is inlineable and the other is not."""
    assert check(chain(*hooks), subject()).status == "PASS"


@pytest.mark.parametrize("pair", ["halves", "int8_rows", "bits", "nested"])
def test_symbolic_sizes(pair: str) -> None:
    """Packed values with symbolic sizes are saved and come back."""
    verdict = check(chain(pair), subject("aot_eager", dynamic=True))
    assert verdict.status == "PASS" and verdict.num_fired, verdict.reasons


def test_a_parameter_is_not_hooked_without_static_inputs() -> None:
    """Mode ``no_static`` leaves a parameter as it is, ``all`` does not."""
    inputs = (TensorSpec((3, 3), "float32", requires_grad=True), TensorSpec((3, 3), "float32", requires_grad=True, role="parameter"))
    program = Program(1, (), inputs, (Op("aten.mm.default", (Ref(0), Ref(1))),), (Ref(2),), autograd=Autograd(saved_hooks=("bfloat16",)))
    counts = {mode: check(program, subject("aot_eager", mode)).num_fired for mode in MODES}
    assert counts == {"all": 2, "no_static": 1, "donated": 0}


def test_inlining_is_seen_in_the_graph() -> None:
    """The casts are in both halves, and autograd holds the cast tensors."""
    with subject(mode="all").session(num_backward=1) as session:
        run_case(case_of_program(chain("bfloat16")), session.wrap, around=lambda: hooks_around([graph_modules(PAIRS["bfloat16"])]))
    (pairing,) = session.pairings
    assert "bfloat16" not in str(pairing.before.forward.code) and "bfloat16" in str(pairing.after.forward.code)
    assert "float32" in str(pairing.after.backward.code)


def test_an_unknown_pair_is_refused() -> None:
    """The name of a pair that there is not is told with the names that there are."""
    with pytest.raises(InvalidProgram, match=r"saved_hooks\[1\]: 'zip'; must be one of identity, clone"):
        decode_program(encode_program(chain("identity", "zip")))


@pytest.mark.soak
@pytest.mark.parametrize("pair", [name for name in PAIRS if name not in CRASHES])
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
def test_each_pair_through_each_backend(pair: str, backend: str) -> None:
    """The other backends are as right, with two runs of backward."""
    verdict = check(chain(pair, num_backward=2), subject(backend))
    assert verdict.status == "PASS" and verdict.num_fired, verdict.reasons


class Faulty(HookBackend):
    """Our model with a fault planted: in what is saved, in pack, in unpack, or around the compiled function."""

    def __init__(self, *, backend: str = "reference", then: str = "nothing", saved: Any = None, pack: Any = None, unpack: Any = None, call: Any = None) -> None:
        super().__init__("faulty", backend, "all", then)
        self.saved, self.pack, self.unpack, self.call = saved or same, pack or same, unpack or same, call or same

    def inline(self) -> Callable[..., None]:
        def inline(forward: GraphModule, backward: GraphModule, num_outputs: int, meta: Any, config: Any, static: list[int]) -> None:
            hooks = torch._functorch._aot_autograd.utils.top_saved_tensors_hooks()
            if not hooks or not isinstance(hooks[0], GraphModule):
                return
            halves = Halves(forward, backward, num_outputs, tuple(static))
            pack, unpack = self.pack(hooks[0]), self.unpack(hooks[1])
            new = inlined(halves, self.saved(saved_tensors(halves, self.mode, pack)), pack, unpack)
            forward.graph, backward.graph = new.forward.graph, new.backward.graph

        return inline

    def _aot_function(self, fn: Callable[..., Any], session: Any) -> Callable[..., Any]:
        if self.call is not_cached:
            return lambda *args: super(Faulty, self)._aot_function(fn, session)(*args)
        return self.call(super()._aot_function(fn, session))


def same(value: Any) -> Any:
    return value


def first_packed(unpack: Any) -> Any:
    return lambda value: value[0] if isinstance(value, tuple) else value


def one_too_few(saved: list[Saved]) -> list[Saved]:
    return [saved[0]._replace(is_hooked=False, packed=[saved[0].node.meta["val"]]), *saved[1:]]


def both(pack: Any) -> Any:
    return lambda tensor: (pack(tensor), tensor.clone())


def first_of_both(unpack: Any) -> Any:
    return lambda value: unpack(value[0])


def nothing(hook: Any) -> Any:
    return same


def raising(compiled: Any) -> Any:
    def call(*args: Any) -> Any:
        raise KeyError("lost")

    return call


def leaking(compiled: Any) -> Any:
    def call(*args: Any) -> Any:
        torch._C._autograd._push_saved_tensors_default_hooks(same, same)
        return compiled(*args)

    return call


def disabling(compiled: Any) -> Any:
    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        torch._C._autograd._saved_tensors_hooks_disable("left", False)
        return outputs

    return call


def calling(compiled: Any) -> Any:
    def call(*args: Any) -> Any:
        hooks = torch._functorch._aot_autograd.utils.top_saved_tensors_hooks()
        hooks[0](torch.ones(2))
        return compiled(*args)

    return call


def doubling_outputs(compiled: Any) -> Any:
    return lambda *args: tuple(t * 2 for t in compiled(*args))


def in_double(compiled: Any) -> Any:
    return lambda *args: tuple(t.double() for t in compiled(*args))


def writing_inputs(compiled: Any) -> Any:
    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        args[0].data.add_(1)
        return outputs

    return call


def not_cached(compiled: Any) -> Any:
    return compiled


def wrong_third_time(compiled: Any) -> Any:
    calls: list[int] = []

    def call(*args: Any) -> Any:
        calls.append(1)
        outputs = compiled(*args)
        return tuple(t * 2 for t in outputs) if len(calls) == 3 else outputs

    return call


FAULTS = [
    ("runs", "clone", {"call": raising}),
    ("raises_alike", "raises_in_pack", {"call": raising}),
    ("raises_alike", "raises_in_pack", {"pack": nothing}),
    ("raises_alike", "raises_in_unpack", {"unpack": nothing}),
    ("equal_outputs", "clone", {"call": doubling_outputs}),
    ("equal_metadata", "clone", {"call": in_double}),
    ("equal_inputs", "clone", {"call": writing_inputs}),
    ("equal_grads", "doubled", {"unpack": first_packed}),
    ("equal_inlined", "doubled", {"unpack": first_packed}),
    ("equal_inlined", "float8", {"saved": one_too_few}),
    ("packed_as_modelled", "bfloat16", {"saved": one_too_few}),
    ("held_as_modelled", "bfloat16", {"saved": one_too_few}),
    ("none_bypasses", "bfloat16", {"saved": one_too_few}),
    ("bytes_as_modelled", "bfloat16", {"saved": one_too_few}),
    ("none_bypasses", "bfloat16", {"pack": both, "unpack": first_of_both}),
    ("packed_as_modelled", "bfloat16", {"pack": both, "unpack": first_of_both}),
    ("held_as_modelled", "bits", {"pack": both, "unpack": first_of_both}),
    ("bytes_as_modelled", "identity", {"pack": both, "unpack": first_of_both}),
    ("calls_counted", "bfloat16", {"call": calling}),
    ("nothing_left", "clone", {"call": leaking}),
    ("nothing_left", "clone", {"call": disabling}),
    ("keyed", "clone", {"call": not_cached}),
    ("keyed", "clone", {"then": "other"}),
    ("keyed", "bfloat16", {"then": "bare"}),
    ("keyed", "bfloat16", {"then": "thread"}),
    ("equal_plain", "doubled", {"backend": "aot_eager", "then": "plain", "unpack": first_packed}),
    ("equal_after", "clone", {"then": "plain"}),
    ("equal_after", "clone", {"then": "bare", "call": wrong_third_time}),
]


@pytest.mark.parametrize(("law", "pair", "fault"), FAULTS, ids=lambda v: v if isinstance(v, str) else " ".join(getattr(f, "__name__", f) for f in v.values()))
def test_a_planted_fault_is_seen(law: str, pair: str, fault: dict[str, Any]) -> None:
    """Each law fails on a compiler that breaks it."""
    verdict = check(square(pair), Faulty(**fault))
    assert law in {r.law for r in verdict.reasons}, verdict.reasons
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def test_bytes_must_be_fewer_where_a_pair_compresses() -> None:
    """As many bytes as without hooks are too many, even where the model agrees; for a lossless copy they are not."""
    law, slot = SAVED_TENSOR_LAWS["bytes_as_modelled"], Slot("float32", (8,))
    runs = HookRuns(SAVED_HOOKS["float8"], True, "all", (), (), num_hooked=1, before=(slot,), plain_bytes=32, expected_bytes=32, held_bytes=(32,))
    assert [r.kind for r in law(runs)] == ["not_lower"]
    assert not law(runs._replace(traits=SAVED_HOOKS["clone"])) and not law(runs._replace(expected_bytes=8, held_bytes=(8,)))


@pytest.mark.parametrize("pair", ["clone", "bfloat16", "doubled", "float8", "bits", "identity", *RAISES])
def test_without_a_fault_it_passes(pair: str) -> None:
    """The same compiler with nothing planted passes."""
    assert check(square(pair), Faulty()).status == "PASS"
