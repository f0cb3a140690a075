"""The same judgement on real ranks: what they saw becomes the laws' evidence.

Real ranks run on small integers, whose sums are exact in whichever order a backend adds them. A mismatch is judged by the laws that
judge lockstep; what a real backend cannot show (memory touched in flight, equality for all inputs) is left to lockstep. The original's
run is held against lockstep's: where those two differ the harness does not know the backend, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from harness.errors import Unsupported, WrongWorld
from harness.executors.algebra import Field
from harness.executors.inputs import draw_inputs, trial_seed
from harness.executors.lockstep import Lockstep
from harness.executors.ranks import CaseResult, Fault, Pool, RankState
from harness.graph import build_all
from harness.oracles.agreement import disagreement
from harness.oracles.evidence import Evidence, Law
from harness.spec.outcome import ErrorRecord, Outcome
from harness.spec.program import Program
from harness.spec.protocols import Subject
from harness.spec.verdict import Reason, Verdict
from harness.worker import PRELOAD, TRIAL, Answer, Form, Question, decode_answer, encode_form, encode_question

__all__ = ["REAL_LAWS", "answers_of", "applies_reason", "check_on_ranks", "evidence_of", "promised_laws", "undecided", "verdict_of"]

_LEFT_TO_LOCKSTEP: Final = ("version_shared",)
"""What is only noted here: how version counters are shared on a transformed graph is not yet held against lockstep."""

_CRASHES: Final = ("rank_died", "hang", "divergence")
"""What may befall ranks by itself: gloo corrupts memory now and then, see ``docs/ranks.md``."""

REAL_LAWS: Final = frozenset(
    {
        "runs",
        "equal_metadata",
        "equal_strides",
        "equal_outputs",
        "equal_inputs",
        "own_storage",
        "same_aliasing",
        "ranks_agree",
        "order_kept",
        "collectives_conserved",
        "caps_respected",
    }
)
"""The laws that a run on real ranks gives evidence for."""


def promised_laws(subject: Subject, laws: Mapping[str, Law]) -> frozenset[str]:
    """The laws that bind ``subject``, ``applies`` included."""
    return frozenset(laws) | {"applies"} if "*" in subject.promises else subject.promises


def check_on_ranks(
    programs: Sequence[Program], subject: Subject, pool: Pool, *, seed: int = 0, laws: Mapping[str, Law]
) -> list[Verdict]:
    """Judge what ``subject`` does to each program on the ranks of ``pool``, in one batch.

    Args:
        programs: of the pool's world size.
        subject: one that the ranks can load by its name and options.
        pool: the ranks.
        seed: of the inputs, as in lockstep.
        laws: by name; those of ``REAL_LAWS`` are judged.

    Raises:
        WrongWorld: a program has another world size than the pool.
        PoolBroken: the ranks cannot be started.
    """
    for program in programs:
        if program.world_size != pool.world_size:
            raise WrongWorld(f"a program for {program.world_size} ranks on a pool of {pool.world_size}")
    pool.ensure((*PRELOAD, *getattr(subject, "modules", ())))
    refusals = [subject.refuses(program) for program in programs]
    asked = [program for program, refusal in zip(programs, refusals, strict=True) if refusal is None]
    results = iter(pool.run("judge", [encode_question(_question(p, subject, seed)) for p in asked]))
    verdicts = [
        undecided("outside_contract", refusal) if refusal is not None else _verdict(program, subject, pool, next(results), seed, laws)
        for program, refusal in zip(programs, refusals, strict=True)
    ]
    return [_confirmed(p, subject, pool, v, seed, laws) if _is_crash(v) else v for p, v in zip(programs, verdicts, strict=True)]


def _is_crash(verdict: Verdict) -> bool:
    return any(reason.kind in _CRASHES for reason in verdict.reasons)


def _confirmed(program: Program, subject: Subject, pool: Pool, verdict: Verdict, seed: int, laws: Mapping[str, Law]) -> Verdict:
    """The verdict, where new ranks crash or hang in the same way; a backend may do so by itself, and then nobody is accused."""
    (result,) = pool.run("judge", [encode_question(_question(program, subject, seed))])
    again = _verdict(program, subject, pool, result, seed, laws)
    if {(r.law, r.kind) for r in again.reasons} == {(r.law, r.kind) for r in verdict.reasons}:
        return verdict
    if verdict.status == "INCONCLUSIVE" or any(reason.kind == "machine" for reason in again.reasons):
        return again
    return undecided("not_repeated", f"{verdict.reasons[0].message}; on new ranks: {again.reasons[0].message if again.reasons else again.status}")


def _question(program: Program, subject: Subject, seed: int, *, keep: bool = False) -> Question:
    return Question(program, subject.feature, subject.name, dict(subject.options), seed, keep)


def undecided(kind: str, message: str, *, law: str = "judged", ranks: tuple[str, ...] = ()) -> Verdict:
    """INCONCLUSIVE, for one reason."""
    return Verdict("INCONCLUSIVE", (Reason(law, "INCONCLUSIVE", kind, message, ranks=ranks),))


def applies_reason(error: ErrorRecord, rank: int) -> Reason:
    """What the law ``applies`` says of an exception that the pass raised; ``error.node`` is its place in the pass."""
    first = error.message.strip().splitlines()[0] if error.message.strip() else "(no message)"
    message = f"the pass raises {error.type} on rank {rank}, in {error.node}: {first}"
    return Reason("applies", "FAIL", error.type, message, rank=rank, node=error.node, expected="no error", seen=error.message or error.node)


def _failed(law: str, fault: Fault, message: str, num_fired: int, *, at: RankState, node: str | None = None) -> Verdict:
    ranks = tuple(state.report() for state in fault.ranks)
    reason = Reason(law, "FAIL", fault.kind, message, rank=at.rank, node=node, expected="no error", seen=fault.kind, ranks=ranks)
    return Verdict("FAIL", (reason,), num_fired=num_fired, num_trials=1)


def _verdict(program: Program, subject: Subject, pool: Pool, result: CaseResult, seed: int, laws: Mapping[str, Law]) -> Verdict:
    answers = answers_of(result, pool)
    return answers if isinstance(answers, Verdict) else _compared(program, subject, pool, answers, seed, laws)


def answers_of(result: CaseResult, pool: Pool) -> list[Answer] | Verdict:
    """Each rank's answer, where the case ran to its end on every rank; else the verdict."""
    if result.fault is not None and result.fault.kind == "machine":
        return undecided("machine", result.fault.message)
    answers = {rank: decode_answer(payload) for rank, payload in enumerate(result.payloads) if payload}
    refused = next((a.unsupported for a in answers.values() if a.unsupported is not None), None)
    if refused is not None:
        return undecided("unsupported", refused)
    for answer in answers.values():
        refusal = None if answer.failed is None else _refusal(answer.failed, pool)
        if refusal:
            return undecided("unsupported", refusal)
    return _broken(answers, result.fault) or list(answers.values())


def _refusal(form: Form, pool: Pool) -> str | None:
    """What the backend says against a collective when it is tried alone; None where it takes it. Each form is tried once a pool."""
    key = encode_form(form)
    if key not in pool.refusals:
        (result,) = pool.run("probe", [key])
        if result.fault is not None and result.fault.kind == "machine":
            return None
        said = result.fault.message if result.fault is not None else next((p.decode(errors="replace") for p in result.payloads if p), "")
        pool.refusals[key] = said
    if not pool.refusals[key]:
        return None
    of = f" {form.reduce_op}" if form.reduce_op else ""
    kind = {(): "0-d ", (0,): "empty "}.get(form.shape, "")
    return f"{pool.backend} does not do {form.target}{of} of {kind}{', '.join(form.dtypes)}: {pool.refusals[key].splitlines()[0]}"


def _broken(answers: Mapping[int, Answer], fault: Fault | None) -> Verdict | None:
    """The verdict on a case that did not run to its end on every rank; None where it did."""
    num_fired = max((a.num_fired for a in answers.values()), default=0)
    for rank, answer in answers.items():
        if answer.applied is not None:
            return Verdict("FAIL", (applies_reason(answer.applied, rank),), num_fired=num_fired, num_trials=1)
    unsound = next((a.reasons for a in answers.values() if a.reasons), ())
    if unsound:
        return Verdict("FAIL", unsound, num_fired=num_fired, num_trials=1)
    if fault is None:
        failed = [(rank, a.before.error) for rank, a in answers.items() if a.before is not None and a.before.error is not None]
        for rank, error in failed:
            return undecided(error.type.lower(), f"the program itself does not run: rank {rank}: {error.message}", law="program_runs")
        return None
    decisive = next(found for status in ("died", "raised", "stuck") if (found := [s for s in fault.ranks if s.status == status]))
    if any(s.place.startswith("pass") for s in decisive):
        return _failed("applies", fault, f"while the pass was applied: {fault.message}", num_fired, at=decisive[0])
    if all(s.place.startswith("transformed") for s in decisive):
        node = decisive[0].place.partition(": ")[2].partition(",")[0]
        return _failed("runs", fault, fault.message, max(num_fired, 1), at=decisive[0], node=node)
    message, ranks = f"the program itself does not run: {fault.message}", tuple(state.report() for state in fault.ranks)
    return undecided(fault.kind, message, law="program_runs", ranks=ranks)


def _compared(program: Program, subject: Subject, pool: Pool, answers: Sequence[Answer], seed: int, laws: Mapping[str, Law]) -> Verdict:
    evidence = evidence_of(program, subject, answers)
    model = _lockstep(program, seed)
    judged = {name: law for name, law in laws.items() if name in REAL_LAWS}
    said = {name: law(evidence) for name, law in judged.items()}
    differs = model is not None and disagreement(program, model, evidence.before[0]) is not None
    if said.get("equal_outputs") or said.get("equal_inputs") or differs:
        (again,) = pool.run("judge", [encode_question(_question(program, subject, seed, keep=True))])
        if again.fault is not None:
            return undecided("machine", f"the case did not run again: {again.fault.message}")
        evidence = evidence_of(program, subject, [decode_answer(p) for p in again.payloads if p is not None])
        said = {name: law(evidence) for name, law in judged.items()}
        why = None if model is None else disagreement(program, model, evidence.before[0])
        if why is not None:
            return undecided("lockstep_differs", f"lockstep models this program otherwise than {pool.backend} runs it: {why}")
    return verdict_of(said, promised_laws(subject, laws), max(a.num_fired for a in answers))


def verdict_of(said: Mapping[str, Sequence[Reason]], promised: frozenset[str], num_fired: int) -> Verdict:
    """What the laws said as a verdict: what the subject promised accuses it, the rest is noted."""
    binding = [(r, name in promised and r.kind not in _LEFT_TO_LOCKSTEP) for name, found in said.items() for r in found]
    reasons = tuple(r for r, binds in binding if binds)
    notes = tuple(r for r, binds in binding if not binds)
    strength: Literal["tested"] | None = None if reasons else "tested"
    return Verdict("FAIL" if reasons else "PASS", reasons, strength=strength, num_fired=num_fired, notes=notes, num_trials=1)


def evidence_of(program: Program, subject: Subject, answers: Sequence[Answer]) -> Evidence:
    """What all ranks saw, for the laws."""
    before = tuple(a.before for a in answers if a.before is not None)
    after = tuple(a.after or a.before for a in answers if a.before is not None)
    return Evidence(
        program,
        (Outcome(before, TRIAL),),
        (Outcome(tuple(a for a in after if a is not None), TRIAL),),
        (),
        caps_bytes=getattr(subject, "caps_bytes", None),
        is_ordered=False,
    )


def _lockstep(program: Program, seed: int) -> Outcome | None:
    """The original's run in lockstep on the ranks' inputs, with the tensors' bytes; None where lockstep does not model an operator."""
    first = trial_seed(seed, 0)
    try:
        lockstep = Lockstep(build_all(program), program.groups, program.world_size)
        field = Field(first, lockstep.dtypes)
        return lockstep.run(draw_inputs(program, TRIAL, field, first), field, trial=TRIAL, poison_seed=1, watch=True, keep=True)
    except Unsupported:
        return None
