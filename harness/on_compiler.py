"""The same judgement on what ``torch.compile`` makes of a program, with the subject's pass switched on inside, on real ranks.

A program is compiled with ``aot_eager``, where the pass is applied to AOTAutograd's graph, and with Inductor, where torch's own configuration
calls it; both are held against eager on the same ranks. What goes wrong with the pass switched off as well is the compiler's and not the
pass's: then the pass is not accused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from harness.errors import WrongWorld
from harness.executors.compiled import COMPILERS, MODULES, Compiler
from harness.executors.ranks import Pool
from harness.on_ranks import answers_of, evidence_of, promised_laws, undecided, verdict_of
from harness.oracles.evidence import Law
from harness.spec.program import Program
from harness.spec.protocols import Subject
from harness.spec.verdict import Reason, Verdict
from harness.worker import PRELOAD, Question, encode_question

__all__ = ["COMPILED_LAWS", "check_compiled"]

COMPILED_LAWS: Final = frozenset({"runs", "equal_metadata", "equal_strides", "equal_outputs", "equal_inputs", "same_aliasing", "own_storage", "ranks_agree"})
"""The laws that a compiled run gives evidence for; that ranks agree is seen of the compiler's graphs."""

_SEVERITY: Final = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}


def check_compiled(program: Program, subject: Subject, pool: Pool, *, seed: int = 0, laws: Mapping[str, Law]) -> Verdict:
    """Judge what ``subject`` does to ``program`` inside ``torch.compile``.

    Args:
        program: of the pool's world size; one whose ranks differ is not compiled.
        subject: one that the ranks can load by its name and options.
        pool: the ranks; Inductor needs a deadline of a minute or so.
        seed: of the inputs, as in lockstep.
        laws: by name; those of ``COMPILED_LAWS`` are judged.

    Returns:
        The worst of both compilers' verdicts; ``num_fired`` is the least, so that a case counts as fired only where the pass fired in both.
        Where it did not fire in ``aot_eager``, Inductor is not asked.

    Raises:
        WrongWorld: the program has another world size than the pool.
        PoolBroken: the ranks cannot be started.
    """
    if program.world_size != pool.world_size:
        raise WrongWorld(f"a program for {program.world_size} ranks on a pool of {pool.world_size}")
    if program.divergent:
        return undecided("unsupported", "a program whose ranks run different statements is not compiled")
    pool.ensure((*PRELOAD, *MODULES, *getattr(subject, "modules", ())))
    verdicts: dict[Compiler, Verdict] = {}
    for compiler in COMPILERS:
        verdict = verdicts[compiler] = _judged(program, subject, pool, compiler, seed, laws)
        if verdict.status == "PASS" and not verdict.num_fired:
            break
    worst = min(verdicts.values(), key=lambda v: _SEVERITY[v.status])
    return Verdict(
        worst.status,
        _merged({c: v.reasons for c, v in verdicts.items() if v.status == worst.status}),
        strength=worst.strength,
        num_fired=min(v.num_fired for v in verdicts.values()) if worst.status == "PASS" else worst.num_fired,
        notes=_merged({c: v.notes for c, v in verdicts.items()}),
        num_trials=worst.num_trials,
    )


def _merged(found: Mapping[Compiler, Sequence[Reason]]) -> tuple[Reason, ...]:
    """Every kind of reason once, with the compilers that gave it."""
    by_kind: dict[tuple[str, str], tuple[Reason, list[str]]] = {}
    for compiler, reasons in found.items():
        for reason in reasons:
            by_kind.setdefault((reason.law, reason.kind), (reason, []))[1].append(compiler)
    return tuple(replace(r, message=f"{' and '.join(compilers)}: {r.message}") for r, compilers in by_kind.values())


def _judged(program: Program, subject: Subject, pool: Pool, compiler: Compiler, seed: int, laws: Mapping[str, Law]) -> Verdict:
    """One compiler's verdict; a failure stands where it is seen twice and the compiler alone does not show it."""
    verdict = _asked(program, subject, pool, compiler, seed, laws, with_pass=True)
    if verdict.status != "FAIL":
        return verdict
    alone = _asked(program, subject, pool, compiler, seed, laws, with_pass=False)
    if alone.status != "PASS":
        message = f"{compiler} without the pass: {alone.reasons[0].message if alone.reasons else alone.status}"
        return undecided("compiler", message, law="compiles")
    again = _asked(program, subject, pool, compiler, seed, laws, with_pass=True)
    if _kinds(again) != _kinds(verdict):
        return undecided("not_repeated", f"{verdict.reasons[0].message}; again: {again.reasons[0].message if again.reasons else again.status}")
    return verdict


def _kinds(verdict: Verdict) -> set[tuple[str, str]]:
    return {(r.law, r.kind) for r in verdict.reasons}


def _asked(
    program: Program, subject: Subject, pool: Pool, compiler: Compiler, seed: int, laws: Mapping[str, Law], *, with_pass: bool
) -> Verdict:
    question = Question(
        program, subject.feature, subject.name, dict(subject.options), seed, keep=True, compiler=compiler, with_pass=with_pass
    )
    (result,) = pool.run("compiled", [encode_question(question)])
    answers = answers_of(result, pool)
    if isinstance(answers, Verdict):
        return answers
    evidence = evidence_of(program, subject, answers)
    said = {name: law(evidence) for name, law in laws.items() if name in COMPILED_LAWS}
    return verdict_of(said, promised_laws(subject, laws), max(a.num_fired for a in answers))
