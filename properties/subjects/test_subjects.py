"""Subjects: found by any of their names, refused clearly, and a user's own pass is judged and shrunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.check import check
from harness.conformance import NonConforming, conforms
from harness.errors import UnknownSubject
from harness.spec.program import Group, GroupArg, Op, Program, Ref, TensorSpec
from harness.subjects.bucketing import PROMISES, functional_until_epilogue
from harness.subjects.registry import load_subject, subject_names
from harness.twin import Twin

SWAP = '''
def swap(gm):
    output = next(reversed(gm.graph.nodes))
    values = list(output.args[0])
    values[:2] = reversed(values[:2])
    output.args = (tuple(values),)
'''


def swap(gm: object) -> None:
    """Return the first two outputs in the other order."""
    output = next(reversed(gm.graph.nodes))  # type: ignore[attr-defined]
    values = list(output.args[0])
    values[:2] = reversed(values[:2])
    output.args = (tuple(values),)


def test_a_swap_of_outputs_is_shrunk() -> None:
    """A five-line pass that swaps two outputs is found and shrunk to two or three outputs and a handful of ops."""
    with pytest.raises(NonConforming) as caught:
        conforms(swap)
    program = caught.value.program
    assert len(program.outputs) <= 3 and len(program.ops) <= 6 and len(program.inputs) <= 3
    assert any(law in str(caught.value) for law in ("equal_outputs", "equal_metadata"))


def test_our_model_conforms() -> None:
    """Our own model conforms, and the number of programs that it changed is told."""
    assert conforms(load_subject("reference"), max_examples=60) > 0


def test_what_does_nothing_does_not_conform() -> None:
    """A pass that never changes anything is not said to conform: all laws held vacuously."""
    with pytest.raises(AssertionError, match="0 changed"):
        conforms(lambda gm: None, max_examples=10)


def test_a_pass_from_a_file(tmp_path: Path) -> None:
    """``path/to/file.py:attribute`` loads a user's pass, which promises every law."""
    file = tmp_path / "mine.py"
    file.write_text(SWAP)
    subject = load_subject(f"{file}:swap")
    assert "*" in subject.promises and subject.label.endswith("mine.py:swap")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no subject 'nothing'; there are aot_autograd, aot_eager, inductor, reference"),
        ("no.such.module:f", "does not import"),
        ("harness.errors:Nothing", "has no attribute"),
        ("harness.errors:__doc__", "a pass"),
        ("missing.py:f", "no file"),
    ],
)
def test_unknown_subjects(name: str, message: str) -> None:
    """A name that leads nowhere is refused with what was looked for."""
    with pytest.raises(UnknownSubject, match=message.replace("(", r"\(")):
        load_subject(name)


def test_options_must_be_known() -> None:
    """Options that a subject does not take are refused with those that it takes."""
    with pytest.raises(UnknownSubject, match="passes and modes are"):
        load_subject("inductor", options={"pass": "all_gather", "mode": "quick"})
    assert {"inductor", "reference"} <= set(subject_names("bucketing"))


def test_every_promise_has_a_source() -> None:
    """Each law that binds one of torch's passes says where torch promises it; strides and idempotence are nowhere promised."""
    for promises in PROMISES.values():
        assert all(promises.values())
        assert not {"equal_strides", "idempotent", "same_aliasing"} & set(promises)


def _program(*ops: Op) -> Program:
    return Program(2, (Group("g", ((0, 1),)),), (TensorSpec((2,), "float32"), TensorSpec((2,), "float32")), ops, (Ref(0),))


def test_torchs_passes_are_held_to_functional_graphs_alone() -> None:
    """A program that writes in place before its end lies outside the contract of torch's passes: INCONCLUSIVE, never FAIL."""
    writes = _program(Op("aten.mul_.Tensor", (Ref(0), 2)), Op("_c10d_functional.all_reduce.default", (Ref(0), "sum", GroupArg("g"))))
    verdict = check(writes, load_subject("inductor"))
    assert (verdict.status, verdict.reasons[0].kind) == ("INCONCLUSIVE", "outside_contract")
    assert functional_until_epilogue(_program(Op("aten.copy_.default", (Ref(0), Ref(1))))) is None


HASHED = '''
def by_hash(gm):
    """Puts an op that depends on the order of a set of strings in front of the output."""
    output = next(reversed(gm.graph.nodes))
    names = list({"first", "second", "third", "fourth", "fifth"})
    with gm.graph.inserting_before(output):
        node = gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], 1.0 + names.index("first")))
    node.meta["val"] = output.args[0][0].meta["val"]


import torch
'''


def test_a_pass_that_depends_on_the_hash_seed(tmp_path: Path) -> None:
    """A pass that makes another graph under another hash seed breaks ``deterministic``; ours and torch's do not."""
    file = tmp_path / "hashed.py"
    file.write_text(HASHED)
    world = GroupArg("world")
    start = "_c10d_functional.all_reduce.default"
    wait = "_c10d_functional.wait_tensor.default"
    ops = tuple(op for i in range(2) for op in (Op(start, (Ref(i), "sum", world)), Op(wait, (Ref(2 + 2 * i),))))
    program = Program(2, (Group("world", ((0, 1),)),), (TensorSpec((4,), "float32"),) * 2, ops, (Ref(3), Ref(5)))
    with Twin(("torch._inductor.fx_passes.post_grad",)) as twin:
        verdict = check(program, load_subject(f"{file}:by_hash"), twin=twin)
        assert [r.law for r in verdict.reasons] == ["deterministic"], verdict
        for name, options in (("reference", None), ("inductor", {"pass": "all_reduce", "mode": "all", "cap_mb": None})):
            subject = load_subject(name, options=options)
            asked = twin.ask(program, subject)
            assert asked is not None and len(set(asked.result())) == 1 and len(asked.result()) == 2
            assert not [r for r in check(program, subject, twin=twin).reasons if r.law == "deterministic"]
