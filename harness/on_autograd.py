"""The same judgement on programs with a backward: eager against a Compiler, stage by stage, twice in a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from harness.executors.autograd import Case, case_of_program, run_case
from harness.on_ranks import undecided
from harness.oracles.mutation import MUTATION_LAWS, MutationLaw, Runs
from harness.spec.outcome import ErrorRecord, JointRecord, RankOutcome
from harness.spec.program import Autograd, Program
from harness.spec.protocols import Clock, Compiler
from harness.spec.verdict import Reason, Verdict
from harness.subjects.autograd import Model

__all__ = ["REFUSALS", "Refusal", "check_autograd", "refusal_of"]

_NUM_CALLS: Final = 2


class Refusal(NamedTuple):
    """What a compiler is documented not to support: the exception's type and message, and where that is said."""

    type: str
    message: str
    why: str


REFUSALS: Final = (
    Refusal("Unsupported", "unsupported .*: ", "outside what the model knows (harness.reference.mutation)"),
    Refusal("Unsupported", ".*", "Dynamo breaks the graph here, which fullgraph forbids (torch._dynamo.exc.Unsupported)"),
    Refusal("RuntimeError", "(torch.compile with aot_autograd does not currently|the model does not) support double backward", "double backward (the message says so)"),
    Refusal("AssertionError", "a backward input that had data mutated in an autograd-aware way. This is not supported", "a gradient that backward writes with grad mode on (the message says so)"),
    Refusal("AssertionError", r"aot_autograd\(\) does not yet handle non-differentiable view input mutations", "writes to inputs that share memory but not a base (the message says so)"),
    Refusal("AssertionError", r"Encountered a (set_|resize_) on a graph input, but the input has other mutations", "set_ or resize_ beside writes that cannot stay in the graph (the message says so)"),
    Refusal("RuntimeError", "During torch.compile, encountered a mutation on a view chain .* as_strided", "a write through as_strided of a view (the message says that it is banned)"),
)
"""What counts neither as a fault nor as parity."""


def check_autograd(case: Case | Program, subject: Compiler, *, seed: int = 0, clock: Clock, laws: Mapping[str, MutationLaw] = MUTATION_LAWS) -> Verdict:
    """Judge what ``subject`` makes of a program with a backward, or of a user's file.

    Eager and compiled run from the same source, each executed anew; the compiled form is called twice, so that a cache hit is judged too.

    Args:
        case: valid.
        subject: with the setting to test.
        seed: of the inputs.
        clock: measures the phases ``build``, ``pass`` and ``judge``; compiling and the compiled run are one, ``pass``.
        laws: by name; those that the subject promises make the verdict, others become notes.

    Returns:
        FAIL with every promised law that broke; INCONCLUSIVE where the subject refuses what is documented as unsupported; else PASS,
        ``tested``. ``num_fired`` is the number of inputs and outputs that eager was seen to write.
    """
    with clock.phase("build"):
        if isinstance(case, Program):
            outside = subject.refuses(case)
            if outside is not None:
                return undecided("outside_contract", outside)
            case = case_of_program(case, seed=seed)
        eager = run_case(case, num_calls=_NUM_CALLS)
    with clock.phase("pass"), subject.session(num_backward=case.autograd.num_backward) as session:
        graphs: list[int] = []
        compiled = run_case(case, session.wrap, num_calls=_NUM_CALLS, after_call=lambda: graphs.append(session.num_graphs))
        joint = session.joint
    error = compiled[-1].error
    if error is not None and (refusal := refusal_of(error)) is not None:
        return undecided("refused", refusal.why)
    if error is None and not graphs[0]:
        return undecided("no_graph", "the compiler made no graph of this program")
    with clock.phase("judge"):
        if _is_ahead_of_time(case, eager, error):
            return Verdict("PASS", strength="tested", num_trials=1, notes=(Reason("refuses", "PASS", "ahead_of_time", "what eager refuses in backward is refused already while compiling"),))
        expected = None if joint is None or subject.name == "reference" else _expected(case, joint)
        said: dict[str, list[Reason]] = {}
        for number, (old, new) in enumerate(zip(eager, compiled, strict=False)):
            runs = Runs(old, new, graphs[0] if graphs else 0, joint, expected)
            for name, law in laws.items():
                found = law(runs)
                if found and name not in said:
                    said[name] = found if not number else [replace(r, message=f"{r.message} (second call)", detail=f"{r.detail} second call".strip()) for r in found]
    reasons = tuple(r for name, found in said.items() if name in subject.promises for r in found)
    notes = tuple(r for name, found in said.items() if name not in subject.promises for r in found)
    return Verdict(
        "FAIL" if reasons else "PASS", reasons, strength=None if reasons else "tested", num_fired=_num_written(eager[0]), notes=notes, num_trials=len(compiled)
    )


def refusal_of(error: ErrorRecord) -> Refusal | None:
    """The refusal that ``error`` is, or None."""
    return next((r for r in REFUSALS if r.type == error.type and re.match(r.message, error.message, re.DOTALL)), None)


def _is_ahead_of_time(case: Case, eager: list[RankOutcome], error: ErrorRecord | None) -> bool:
    """Whether compiling refused what eager would refuse in a backward that this case does not run."""
    if error is None or error.node != "forward" or eager[0].error is not None or case.autograd.num_backward:
        return False
    with_backward = case._replace(autograd=Autograd(case.autograd.functions, num_backward=1))
    return run_case(with_backward)[0].error is not None


def _expected(case: Case, joint: JointRecord) -> JointRecord | None:
    """What our model makes of the case; None where it does not know it, or where inputs are not numbered alike because they share memory."""
    if case.program is not None and any(spec.view_of is not None or spec.same_as is not None for spec in case.program.inputs):
        return None
    with Model().session(num_backward=case.autograd.num_backward) as session:
        run_case(case._replace(autograd=replace(case.autograd, num_backward=0)), session.wrap)
    found = session.joint
    return found if found is not None and (found.num_inputs, found.has_backward) == (joint.num_inputs, joint.has_backward) else None


def _num_written(eager: RankOutcome) -> int:
    """The inputs and outputs that eager wrote; an error that it raised counts as one, for refusing it as well is something."""
    if not eager.stages:
        return int(eager.error is not None)
    last = eager.stages[-1]
    return sum(t.version > 0 for t in (*last.inputs, *last.outputs))
