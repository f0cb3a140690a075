"""Programs with a backward through the installed torch: the shared cases are found and rightly judged, and planted faults are seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from harness.casefile import read_source
from harness.check import check
from harness.executors.autograd import Case, case_of_program, run_case
from harness.ledger import installed_torch
from harness.spec.program import Autograd, Function, Op, Program, Ref, TensorSpec
from harness.subjects.autograd import PROMISES, Backend
from harness.subjects.registry import load_subject

CASES = Path(__file__).parent / "cases"
STALE = "one of the variables needed for gradient computation"
ADD_ONE = (Op("aten.add_.Tensor", (Ref(0), 1)),)
NON_LEAF = TensorSpec((4,), "float32", requires_grad=True, is_leaf=False)

SEEN = {
    ("created_in_forward_mutated_in_backward", "aot_eager"): ("runs", "AssertionError"),
    ("created_in_forward_mutated_in_backward", "aot_autograd"): ("runs", "AssertionError"),
    ("mincut_saves_mutated_primal", "aot_eager_decomp_partition"): ("runs", "RuntimeError"),
}


def subject(backend: str) -> Backend:
    """One backend of the installed torch."""
    found = load_subject("inductor", feature="mutation", options={"backend": backend})
    assert isinstance(found, Backend)
    return found


def source(name: str) -> Case:
    """A shared case."""
    found = read_source(CASES / f"{name}.py")
    assert isinstance(found, Case)
    return found


@pytest.mark.parametrize(("name", "backend"), sorted(SEEN))
def test_case_is_found_and_rightly_judged(name: str, backend: str) -> None:
    """The installed torch fails the case by the law that is named, and by no other."""
    verdict = check(source(name), subject(backend))
    assert verdict.status == "FAIL"
    assert {(r.law, r.kind) for r in verdict.reasons} == {SEEN[name, backend]}


@pytest.mark.soak
def test_scatter_into_an_input_that_is_overwritten() -> None:
    """Inductor gives the overwritten rows where eager keeps rows 0 and 3 of x and rows 1 and 2 of s."""
    verdict = check(source("scatter_into_overwritten_input"), subject("inductor"))
    assert ("equal_outputs", "values") in {(r.law, r.kind) for r in verdict.reasons}


def test_a_written_grad_output_is_noted_and_accused_on_demand() -> None:
    """That the caller's grad_output is written in eager and not compiled is a note; a subject that promises it is accused."""
    case = source("grad_output_written_in_backward")
    verdict = check(case, subject("aot_eager"))
    assert verdict.status == "PASS" and [r.law for r in verdict.notes] == ["grad_output_kept"]
    strict = check(case, subject("aot_eager").promising("grad_output_kept"))
    assert [(r.law, r.kind) for r in strict.reasons] == [("grad_output_kept", "values")]


@pytest.mark.parametrize(
    ("name", "stage", "field", "number", "expected"),
    [
        ("created_in_forward_mutated_in_backward", 0, "outputs", 1, [0.0, 1.0, 2.0, 3.0]),
        ("scatter_into_overwritten_input", 0, "outputs", 0, [*range(6), *range(-6, 6), *range(18, 24)]),
    ],
)
def test_right_values(name: str, stage: int, field: str, number: int, expected: list[float]) -> None:
    """Eager gives what the case's docstring says."""
    record = getattr(run_case(source(name))[0].stages[stage], field)[number]
    assert torch.frombuffer(bytearray(record.data), dtype=getattr(torch, record.dtype)).tolist() == expected


def mutated_in_backward() -> Program:
    """A buffer that backward adds the gradient to."""
    function = Function(
        2, (Op("aten.mul.Tensor", (Ref(0), 3)),), (Ref(2),), kept=(Ref(1),),
        backward=(Op("aten.add_.Tensor", (Ref(1), Ref(0))), Op("aten.mul.Tensor", (Ref(0), 3))), grads=(Ref(3), None),
    )  # fmt: skip
    inputs = (TensorSpec((4,), "float32", requires_grad=True), TensorSpec((4,), "float32"))
    return Program(1, (), inputs, (Op("autograd.apply", (0, Ref(0), Ref(1))),), (Ref(2, 0),), autograd=Autograd((function,)))


def mutated_in_forward() -> Program:
    """A non-leaf that forward adds one to, and twice of it."""
    return Program(1, (), (NON_LEAF,), (*ADD_ONE, Op("aten.mul.Tensor", (Ref(0), 2))), (Ref(2),), autograd=Autograd())


def view_returned() -> Program:
    """A view of a written input."""
    return Program(1, (), (TensorSpec((4,), "float32"),), (*ADD_ONE, Op("aten.slice.Tensor", (Ref(0), 0, 1, 4))), (Ref(2),), autograd=Autograd(num_backward=0))


def leaf_written() -> Program:
    """A leaf that requires grad written in place, which eager refuses."""
    return Program(1, (), (TensorSpec((4,), "float32", requires_grad=True),), ADD_ONE, (Ref(1),), autograd=Autograd())


class Faulty:
    """A compiler that runs eagerly, with one fault planted."""

    name = label = "faulty"
    feature = "mutation"
    options: dict[str, Any] = {}
    focus: dict[str, Any] = {}
    promises = PROMISES

    def __init__(self, fault: Callable[[Callable[..., Any]], Callable[..., Any]], num_graphs: int = 1) -> None:
        self.fault = fault
        self.num_graphs = num_graphs

    def variants(self) -> tuple[Faulty, ...]:
        return (self,)

    def refuses(self, program: Program) -> str | None:
        return None

    @contextmanager
    def session(self, *, num_backward: int) -> Iterator[Any]:
        yield SimpleNamespace(num_graphs=self.num_graphs, joint=None, wrap=self.fault)


def on_copies(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*(a.clone() for a in args))


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            fn(*(a.detach() for a in args))
        return fn(*args)

    return call


def detached(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(t.detach() for t in fn(*args))


def parted(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(t.clone() for t in fn(*args))


def behind_data(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        before = [a._version for a in args]
        outputs = fn(*args)
        for arg, version in zip(args, before, strict=True):
            torch._C._autograd._unsafe_set_version_counter((arg,), (version,))
        return outputs

    return call


def doubled_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        outputs = fn(*args)
        for t in outputs:
            t.register_hook(lambda grad: grad * 2)
        return outputs

    return call


def transposed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(torch.empty(2 * t.numel())[::2].copy_(t) for t in fn(*args))


def half(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(t.double() for t in fn(*args))


def unconcerned(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            return fn(*args)

    return call


def raising(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise KeyError("lost")

    return call


FAULTS = [
    (mutated_in_forward, on_copies, "equal_inputs"),
    (mutated_in_backward, on_copies, "equal_inputs"),
    (mutated_in_forward, twice, "equal_outputs"),
    (mutated_in_forward, detached, "same_connectivity"),
    (view_returned, parted, "same_aliasing"),
    (view_returned, behind_data, "versions_advance"),
    (mutated_in_backward, doubled_gradient, "equal_grads"),
    (view_returned, transposed, "equal_strides"),
    (view_returned, half, "equal_metadata"),
    (leaf_written, unconcerned, "refuses"),
    (view_returned, raising, "runs"),
]


@pytest.mark.parametrize(("program", "fault", "law"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_planted_fault_is_seen(program: Callable[[], Program], fault: Any, law: str) -> None:
    """Each law fails on a compiler that breaks it, and passes where nothing is broken."""
    assert law in {r.law for r in check(program(), Faulty(fault)).reasons}
    assert check(program(), Faulty(lambda fn: fn)).status == "PASS"


def test_a_graph_break_is_seen() -> None:
    """A program of which two graphs were made fails, and one of which none was made is not judged."""
    assert [r.law for r in check(mutated_in_forward(), Faulty(lambda fn: fn, 2)).reasons] == ["one_graph"]
    assert check(mutated_in_forward(), Faulty(lambda fn: fn, 0)).status == "INCONCLUSIVE"


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "aot_autograd"])
@pytest.mark.parametrize("program", [mutated_in_forward, mutated_in_backward, view_returned, leaf_written])
def test_right_programs_pass(program: Callable[[], Program], backend: str) -> None:
    """What the installed torch does right passes, and counts as fired."""
    verdict = check(program(), subject(backend))
    assert verdict.status == "PASS" and verdict.num_fired, verdict.reasons


def test_double_backward_is_refused_not_accused() -> None:
    """AOTAutograd's documented lack of a double backward is neither fault nor parity."""
    square = Program(1, (), (TensorSpec((4,), "float32", requires_grad=True),), (Op("aten.mul.Tensor", (Ref(0), Ref(0))),), (Ref(1),), autograd=Autograd(is_double=True))
    verdict = check(square, subject("aot_eager"))
    assert verdict.status == "INCONCLUSIVE" and verdict.reasons[0].kind == "refused"


def test_more_programs_than_the_recompile_limit_are_each_compiled() -> None:
    """Twelve programs in one process make a graph each: none runs eagerly behind the recompile limit."""
    for number in range(12):
        program = Program(1, (), (NON_LEAF,), (Op("aten.add_.Tensor", (Ref(0), number)),), (Ref(1),), autograd=Autograd(num_backward=0))
        made: list[int] = []
        case = case_of_program(program)
        with subject("aot_eager").session(num_backward=0) as session:
            run_case(case, session.wrap, after_call=lambda made=made, session=session: made.append(session.num_graphs))
        assert made == [1]


SCALAR = """
import torch

def program(x):
    x.add_(2)

x = torch.ones((), dtype=torch.float64)
torch.compile(program, backend="aot_eager")(x)
assert x.item() == 3
"""


def test_a_write_to_a_float64_scalar_is_lost_or_ends_the_process() -> None:
    """Torch 2.13 takes a 0-d float64 input for a Python scalar: its write is lost, or the process dies of SIGFPE; 2.14.1 is right."""
    done = subprocess.run([sys.executable, "-c", SCALAR], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (Version(installed_torch()) >= Version("2.14")), done.stderr
