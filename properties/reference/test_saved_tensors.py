"""The model of inlined hooks against torch: the same tensors selected, the same signature of the rewritten halves, and its own rules."""

from __future__ import annotations

import pytest
import torch

from harness.executors.autograd import case_of_program, run_case
from harness.graph.saved_hooks import LOG, PAIRS, graph_modules, hooks_around, named
from harness.reference.saved_tensors import Halves, copied, inlined, results, saved_nodes, saved_tensors
from harness.spec.program import Autograd, Op, Program, Ref, TensorSpec
from harness.spec.saved_hooks import SAVED_HOOKS
from harness.subjects.registry import load_subject
from harness.subjects.saved_tensors import MODES, Pairing

VALUES = [torch.arange(15.0).reshape(3, 5) - 7, torch.tensor(3.0), torch.zeros(0, 3), torch.arange(21).reshape(3, 7) % 3 == 0, torch.arange(4), torch.ones(4, 6).t(), torch.ones(3).double()]
INLINEABLE = [name for name, traits in SAVED_HOOKS.items() if traits.is_inlineable and name not in ("twice", "buffer")]


def exponential(hook: str) -> Program:
    """``z * exp(z)`` of ``z = x * x``, and ``z`` itself."""
    ops = (Op("aten.mul.Tensor", (Ref(0), Ref(0))), Op("aten.exp.default", (Ref(1),)), Op("aten.mul.Tensor", (Ref(1), Ref(2))))
    return Program(1, (), (TensorSpec((3, 4), "float32", requires_grad=True),), ops, (Ref(3), Ref(1)), autograd=Autograd(saved_hooks=(hook,)))


def pairing(hook: str, *, dynamic: bool = False, backend: str = "aot_autograd", mode: str = "all") -> Pairing:
    """The halves of that program before and after torch inlined a pair."""
    subject = load_subject("inductor", feature="saved_tensors", options={"backend": backend, "mode": mode, "then": "nothing", "dynamic": dynamic})
    with subject.session(num_backward=1) as session:
        run_case(case_of_program(exponential(hook)), session.wrap, around=lambda: hooks_around([graph_modules(PAIRS[hook])]))
    (found,) = session.pairings
    return found


def names(halves: Halves, mode: str) -> list[str]:
    return [one.node.target.__name__ if one.node.op == "call_function" else one.node.op for one in saved_tensors(halves, mode, PAIRS["clone"].pack) if one.is_hooked]


@pytest.fixture(scope="module")
def clones() -> Pairing:
    """With clones packed."""
    return pairing("clone")


def signature(halves: Halves) -> tuple[list[str], list[str]]:
    saved = [str(n.meta["val"].dtype) + str(list(n.meta["val"].shape)) for n in saved_nodes(halves)]
    num = len(results(halves.forward)) - halves.num_outputs
    taken = [n.meta["val"] for n in halves.backward.graph.find_nodes(op="placeholder")[:num]]
    return saved, [str(v.dtype) + str(list(v.shape)) if isinstance(v, torch.Tensor) else "size" for v in taken]


@pytest.mark.parametrize("pair", PAIRS.values(), ids=lambda p: p.name)
def test_pairs_keep_their_promises(pair: object) -> None:
    """Unpack gives back shape and dtype, and every bit where a pair is lossless; as graph modules a pair does the same; what compresses has fewer bytes."""
    pair = named([pair.name])[0]  # type: ignore[attr-defined]
    for value in [VALUES[2]] if pair.traits.raises else VALUES:
        packed = pair.pack(value)
        back = pair.unpack(packed)
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back, value) or not pair.traits.is_lossless
        if pair.traits.is_inlineable:
            pack, unpack = graph_modules(pair)
            assert torch.equal(unpack(pack(value)), back)
        acts = pair.traits.dtypes is not None and str(value.dtype).removeprefix("torch.") in pair.traits.dtypes
        if pair.traits.is_compressing and acts and value.numel() > 1:
            assert sum(t.nbytes for t in torch.utils._pytree.tree_leaves(packed) if isinstance(t, torch.Tensor)) < value.nbytes


@pytest.mark.parametrize("name", ["raises_in_pack", "raises_in_unpack"])
def test_raising_pairs_raise(name: str) -> None:
    """In the half that they name, on every tensor with elements."""
    pair = PAIRS[name]
    with pytest.raises(RuntimeError, match=f"no {pair.traits.raises}"):
        pair.unpack(pair.pack(VALUES[0]))


def test_the_logging_pair_logs() -> None:
    """Each half by itself."""
    LOG.clear()
    PAIRS["logs"].unpack(PAIRS["logs"].pack(VALUES[3]))
    assert list(LOG) == ["pack bool[3, 7]", "unpack bool[3, 7]"]


def test_modes_select(clones: Pairing) -> None:
    """``all`` selects the input and intermediates, ``donated`` only what is neither input nor output, ``no_static`` all but static inputs."""
    before = clones.before
    everything = names(before, "all")
    assert "placeholder" in everything and names(before, "no_static") == everything
    assert "placeholder" not in names(before, "donated") and 0 < len(names(before, "donated")) < len(everything)
    assert names(before._replace(static=(0,)), "no_static") == [n for n in everything if n != "placeholder"]


def test_a_returned_tensor_is_not_donated(clones: Pairing) -> None:
    """A tensor that is saved and returned is hooked in mode ``all`` alone."""
    before = clones.before
    returned = {n.meta["val"].untyped_storage()._cdata for n in results(before.forward)[: before.num_outputs]}
    donated = [one for one in saved_tensors(before, "donated", PAIRS["clone"].pack) if one.is_hooked]
    assert not [one for one in donated if one.node.meta["val"].untyped_storage()._cdata in returned]
    assert returned & {n.meta["val"].untyped_storage()._cdata for n in saved_nodes(before)}


@pytest.mark.parametrize("mode", ["all", "donated"])
@pytest.mark.parametrize("name", INLINEABLE)
def test_the_rewritten_halves_have_the_signature_of_torch(name: str, mode: str) -> None:
    """What forward saves and backward takes is the same by our rewriting and by torch's."""
    found = pairing(name, mode=mode)
    pack, unpack = PAIRS[name][1:3]
    ours = inlined(found.before, saved_tensors(found.before, mode, pack), pack, unpack)
    assert found.after is not None
    assert signature(ours) == signature(found.after)
    assert signature(ours)[0] == [s for s in signature(ours)[1] if s != "size"]


def test_symbolic_sizes_come_before_tensors() -> None:
    """Packed sizes are saved after the tensors and taken before them, then the sizes that were saved anyway; numbers and texts are not saved."""
    found = pairing("halves", dynamic=True, backend="aot_eager")
    pack, unpack = PAIRS["halves"][1:3]
    ours = inlined(found.before, saved_tensors(found.before, "all", pack), pack, unpack)
    saved, taken = signature(ours)
    num_sizes = taken.count("size")
    assert num_sizes and taken[:num_sizes] == ["size"] * num_sizes and taken[num_sizes:] == saved
    assert found.after is not None and len(signature(found.after)[1]) == len(taken)


def test_constants_stay_in_the_graph() -> None:
    """Of a packed dictionary only the tensor is saved."""
    found = pairing("nested")
    one = saved_tensors(found.before, "all", PAIRS["nested"].pack)[0]
    assert [type(leaf).__name__ for leaf in one.packed if not isinstance(leaf, torch.Tensor)] == ["int", "NoneType", "str"]
    assert found.after is not None and len(saved_nodes(found.after)) == len(saved_nodes(found.before))


def test_rewriting_leaves_the_original(clones: Pairing) -> None:
    """The halves are as they were, and so is a copy when the original is changed."""
    before = clones.before
    text = before.forward.code + before.backward.code
    copy = copied(before)
    pack, unpack = PAIRS["bfloat16"][1:3]
    inlined(before, saved_tensors(before, "all", pack), pack, unpack)
    assert before.forward.code + before.backward.code == text == copy.forward.code + copy.backward.code


def test_modes_are_those_of_the_installed_torch() -> None:
    """The default of torch's setting is one of the modes."""
    assert torch._functorch.config.saved_tensors_hooks_filtering_mode in MODES
