"""The one line that decides what is right: ``check(program, subject)``.

Program -> graphs -> Subject -> lockstep on both -> laws -> Verdict. Hunting, replaying, bisecting and the property tests all call
this; nothing else judges.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

from torch.fx import Graph, GraphModule

from harness.errors import Unsupported
from harness.executors.algebra import Field, error_bound, trials_needed
from harness.executors.autograd import Case
from harness.executors.inputs import TrialKind, draw_inputs, fresh, trial_seed
from harness.executors.lockstep import Lockstep
from harness.executors.ranks import Pool
from harness.graph import build_all, collectives, fake_world, module_of
from harness.on_autograd import check_autograd
from harness.on_compiler import check_compiled
from harness.on_ranks import applies_reason, check_on_ranks, promised_laws, undecided
from harness.on_saved_tensors import check_saved_tensors
from harness.ops import infer_program
from harness.oracles import aliasing, equivalence, graphs, schedule
from harness.oracles.evidence import Evidence, Law
from harness.spec.outcome import Outcome
from harness.spec.program import PerRank, Program
from harness.spec.protocols import Clock, Compiler, Subject
from harness.spec.verdict import Reason, Signature, Verdict, normalise_message
from harness.subjects.saved_tensors import HookBackend
from harness.twin import Twin
from harness.worker import error_record

__all__ = ["BUCKETING_LAWS", "check", "signatures"]

BUCKETING_LAWS: Final[Mapping[str, Law]] = {
    "runs": equivalence.runs,
    "equal_metadata": equivalence.equal_metadata,
    "equal_strides": equivalence.equal_strides,
    "equal_outputs": equivalence.equal_outputs,
    "equal_inputs": equivalence.equal_inputs,
    "own_storage": aliasing.own_storage,
    "same_aliasing": aliasing.same_aliasing,
    "in_flight": schedule.in_flight,
    "graph_valid": graphs.graph_valid,
    "metadata_true": graphs.metadata_true,
    "ranks_agree": schedule.ranks_agree,
    "order_kept": schedule.order_kept,
    "collectives_conserved": schedule.collectives_conserved,
    "caps_respected": schedule.caps_respected,
    "idempotent": graphs.idempotent,
    "deterministic": graphs.deterministic,
}
"""The laws of the feature ``bucketing``; ``applies`` (the pass itself raises nothing) is judged before them."""

_ORIGINAL_POISON: Final = 1
_TRANSFORMED_POISON: Final = 2
_OTHER_POISON: Final = 3


class _NoClock:
    def phase(self, name: str, /) -> AbstractContextManager[None]:
        return nullcontext()


class _Transformed(NamedTuple):
    graphs: list[GraphModule]
    num_fired: int
    failure: Reason | None


def check(
    program: Program | Case,
    subject: Subject | Compiler,
    *,
    seed: int = 0,
    clock: Clock | None = None,
    laws: Mapping[str, Law] = BUCKETING_LAWS,
    skip_unchanged: bool = True,
    ranks: Pool | None = None,
    is_compiled: bool = False,
    twin: Twin | None = None,
) -> Verdict:
    """Judge what ``subject`` does to ``program``.

    The subject is applied once for every rank, inside a fake world of that rank; both graphs run in lockstep with the same
    inputs, as often as the error bound asks for. Laws that the subject promises make the verdict; the others become notes.

    Args:
        program: valid, see ``harness.ops.read_program``; for a Compiler also a user's file as a Case.
        subject: with the setting to test. What a Compiler makes of a program is judged by ``harness.on_autograd``, in this process.
        seed: of the inputs and the field's keys; the same seed gives the same verdict.
        clock: measures the phases ``build``, ``pass``, ``run`` and ``judge``.
        laws: by name.
        skip_unchanged: do not run what the subject left exactly as it was; the verdict is PASS and vacuous. A divergent program
            is always run.
        ranks: run on these real ranks instead of in lockstep, see ``harness.on_ranks``.
        is_compiled: through ``torch.compile`` on these ranks, see ``harness.on_compiler``.
        twin: also apply the subject under other hash seeds, for the law ``deterministic``.

    Returns:
        FAIL with every promised law that broke (``applies`` and ``graph_valid`` end the check at once); INCONCLUSIVE where the program lies outside the subject's contract or has an unsupported operator, where it does not run itself, or the harness failed; else PASS, ``proved`` or ``tested``.
    """
    timer = clock or _NoClock()
    try:
        if isinstance(subject, HookBackend):
            return check_saved_tensors(program, subject, seed=seed, clock=timer)
        if isinstance(subject, Compiler):
            return check_autograd(program, subject, seed=seed, clock=timer)
        if not isinstance(program, Program) or program.autograd is not None:
            return undecided("unsupported", f"{subject.feature} is about graphs without a backward")
        refusal = subject.refuses(program)
        if refusal is not None:
            return undecided("outside_contract", refusal)
        if ranks is not None and is_compiled:
            return check_compiled(program, subject, ranks, seed=seed, laws=laws)
        if ranks is not None:
            return check_on_ranks([program], subject, ranks, seed=seed, laws=laws)[0]
        return _check(program, subject, seed, timer, laws, skip_unchanged, twin)
    except Unsupported as error:
        return undecided("unsupported", str(error))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        return undecided("harness_failed", f"the harness itself failed: {type(error).__name__}: {error} ({where})")


def signatures(verdict: Verdict, subject: Subject | Compiler) -> tuple[tuple[Reason, Signature], ...]:
    """Each failing reason of ``verdict`` with what makes it the same fault as another."""
    return tuple((reason, _signature(reason, subject)) for reason in verdict.reasons if reason.status == "FAIL")


def _signature(reason: Reason, subject: Subject | Compiler) -> Signature:
    is_exception = reason.law in ("applies", "runs")
    detail = normalise_message(reason.seen or "") if is_exception else reason.detail
    return Signature(subject.feature, subject.label, reason.law, reason.kind, detail)


def _check(
    program: Program, subject: Subject, seed: int, timer: Clock, laws: Mapping[str, Law], skip_unchanged: bool, twin: Twin | None
) -> Verdict:
    with timer.phase("build"):
        metas = infer_program(program)
        per_rank = build_all(program, metas)
        original = Lockstep(per_rank if _differs_by_rank(program) else per_rank[:1], program.groups, program.world_size)
    promised = promised_laws(subject, laws)
    transformed = _transform(program, subject, per_rank, timer)
    if transformed.failure is not None:
        return Verdict("FAIL", (transformed.failure,), num_fired=transformed.num_fired)
    if skip_unchanged and not transformed.num_fired and not program.divergent:
        return Verdict("PASS", strength="proved")
    unsound = graphs.graph_valid(Evidence(program, (), (), transformed.graphs))
    if unsound:
        return Verdict("FAIL", tuple(unsound), num_fired=transformed.num_fired)
    asked = twin.ask(program, subject) if twin is not None and transformed.num_fired else None
    was_again = _second_application(program, subject, transformed.graphs[0]) if "idempotent" in promised and transformed.num_fired else None
    with timer.phase("run"):
        may_copy = getattr(subject, "views_may_copy", False)
        rewritten = Lockstep(transformed.graphs, program.groups, program.world_size, views_may_copy=may_copy)
        dtypes = original.dtypes | rewritten.dtypes
        narrow = len(dtypes) if original.narrows or rewritten.narrows else 0
        degree, hashes = max(original.degree, rewritten.degree), original.num_hashes + rewritten.num_hashes
        num_trials = trials_needed(degree, hashes, narrow)
        runner = _Runner(program, original, rewritten, dtypes, seed)
        before, after = runner.trials(num_trials, keep=False)
    broken = next((r.error for r in before[0].ranks if r.error is not None), None)
    if broken is not None:
        return undecided(broken.type.lower(), f"the program itself does not run: {broken.message}", law="program_runs")
    is_exact = narrow == 0 and not original.is_opaque and not rewritten.is_opaque
    with timer.phase("judge"):
        evidence = Evidence(
            program,
            before,
            after,
            transformed.graphs,
            is_exact,
            getattr(subject, "caps_bytes", None),
            None,
            was_again,
            outlines=() if asked is None else asked.result(),
        )
        said = {name: law(evidence) for name, law in laws.items()}
        if said.get("equal_outputs") or said.get("equal_inputs"):
            evidence = runner.explained(evidence, num_trials)
            said = {name: law(evidence) for name, law in laws.items()}
        proved = equivalence.is_proved(evidence)
    reasons = tuple(r for name, found in said.items() if name in promised for r in found)
    notes = tuple(r for name, found in said.items() if name not in promised for r in found)
    return Verdict(
        "FAIL" if reasons else "PASS",
        reasons,
        strength=None if reasons else "proved" if proved else "tested",
        num_fired=transformed.num_fired,
        notes=notes,
        num_trials=num_trials,
        error_bound=error_bound(degree, hashes, narrow) ** num_trials if proved else None,
    )


def _transform(program: Program, subject: Subject, per_rank: list[GraphModule], timer: Clock) -> _Transformed:
    """Apply the subject on every rank; what it raises is a failure of the law ``applies``."""
    results: list[GraphModule] = []
    num_fired = 0
    for rank, gm in enumerate(per_rank):
        with fake_world(program.world_size, rank, program.groups):
            try:
                with timer.phase("pass"):
                    applied = subject.apply(gm, rank)
                results.append(applied.graph)
                num_fired = max(num_fired, applied.num_fired)
            except Unsupported:
                raise
            except Exception as error:
                return _Transformed(results, num_fired, applies_reason(error_record(error), rank))
    return _Transformed(results, num_fired, None)


def _second_application(program: Program, subject: Subject, gm: GraphModule) -> int:
    """How many collectives another application, to a copy of the result, still changes."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = module_of(graph)
    before = len(collectives(graph))
    with fake_world(program.world_size, 0, program.groups):
        applied = subject.apply(copy, 0)
    return abs(before - len(collectives(applied.graph.graph)))


def _differs_by_rank(program: Program) -> bool:
    return any(
        op.ranks is not None
        or any(
            isinstance(item, PerRank)
            for arg in (*op.args, *op.kwargs.values())
            for item in (arg if isinstance(arg, tuple) else (arg,))
        )
        for op in program.ops
    )


class _Runner:
    """Runs both sides of a check on the same inputs."""

    def __init__(self, program: Program, original: Lockstep, rewritten: Lockstep, dtypes: frozenset[str], seed: int) -> None:
        self.program = program
        self.original = original
        self.rewritten = rewritten
        self.dtypes = dtypes
        self.seed = seed

    def trials(self, num_trials: int, *, keep: bool) -> tuple[list[Outcome], list[Outcome]]:
        before, after = [], []
        for number in range(num_trials):
            kind: TrialKind = "small" if number == 0 else "normal"
            seed = trial_seed(self.seed, number)
            field = Field(seed, self.dtypes)
            inputs = draw_inputs(self.program, kind, field, seed)
            watch = number == 0
            copies = [fresh(rank, self.program) for rank in inputs]
            before.append(self.original.run(copies, field, trial=kind, poison_seed=_ORIGINAL_POISON, watch=watch, keep=keep))
            after.append(self.rewritten.run(inputs, field, trial=kind, poison_seed=_TRANSFORMED_POISON, watch=watch, keep=keep))
        return before, after

    def explained(self, evidence: Evidence, num_trials: int) -> Evidence:
        """The same evidence with the tensors' bytes, and one more run with other unwritten memory."""
        before, after = self.trials(num_trials, keep=True)
        seed = trial_seed(self.seed, 0)
        field = Field(seed, self.dtypes)
        inputs = draw_inputs(self.program, "small", field, seed)
        again = self.rewritten.run(inputs, field, trial="small", poison_seed=_OTHER_POISON, watch=False, keep=True)
        return evidence._replace(before=before, after=after, after_again=again)
