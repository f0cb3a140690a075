"""Hunting: draw programs, judge what a subject does to them, shrink and store what fails, go past what is known.

On top of Hypothesis: its engine draws and shrinks. One exception class a signature tells failures apart; a failure that
the ledger or this hunt already knows returns normally, so that the search goes on past it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.errors import Flaky, FlakyFailure, Unsatisfiable

from harness.check import check, signatures
from harness.findings import environment, store_finding
from harness.ledger import Fault, Ledger, load_ledger
from harness.levels import Judge
from harness.spec.program import Program
from harness.spec.protocols import Subject
from harness.spec.verdict import Finding, Signature, Verdict
from harness.subjects.registry import FEATURES, resolve

__all__ = ["PHASES", "HuntReport", "Observer", "PhaseClock", "hunt"]

PHASES = ("draw", "build", "pass", "run", "judge")
_ROUND_CASES = 2_000
_SHRINK_SECONDS = 20.0
_LAST_SHRINK_SHARE = 0.25


class PhaseClock:
    """Adds up the seconds of each phase of a check; phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str, /) -> Iterator[None]:
        """Time spent inside counts for ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class Observer:
    """Told what happens; the command line overrides what it shows."""

    def case(self, report: HuntReport) -> None:
        """A case was judged."""

    def seen(self, finding: Finding, path: Path) -> None:
        """A new failure was stored at ``path`` as it was drawn; shrinking it begins."""

    def found(self, finding: Finding, path: Path) -> None:
        """A finding was stored at ``path``, as small as it became."""

    def known(self, fault: Fault) -> None:
        """A fault of the ledger was met for the first time in this hunt."""


@dataclass
class HuntReport:
    """What a hunt did.

    Attributes:
        num_cases: judged, shrinking included.
        statuses: how many verdicts of each status.
        strengths: how many passes were proved, and how many tested.
        num_fired: cases in which the subject changed something.
        num_vacuous: passes on which it changed nothing.
        fired: the same by the subject's label, with the number of cases it was drawn for.
        known: how often each fault of the ledger was met, by id.
        inconclusive: how often each reason kept a case from being judged.
        findings: stored, by signature.
        seconds: of the whole hunt.
        phase_seconds: by phase; ``draw`` is all that Hypothesis does, shrinking and storing included.
        interrupted: whether Ctrl-C ended it.
    """

    num_cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    strengths: Counter[str] = field(default_factory=Counter)
    num_fired: int = 0
    num_vacuous: int = 0
    fired: dict[str, list[int]] = field(default_factory=dict)
    known: Counter[str] = field(default_factory=Counter)
    inconclusive: Counter[str] = field(default_factory=Counter)
    findings: dict[Signature, Path] = field(default_factory=dict)
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def exit_status(self) -> int:
        """1 where something unknown failed, 3 where nothing was judged or nothing ever fired, else 0."""
        if self.findings:
            return 1
        return 0 if self.why_not_judged is None else 3

    @property
    def why_not_judged(self) -> str | None:
        """Why this hunt says nothing about its subject, or None where it does."""
        if not self.num_cases:
            return "no case was drawn" + (" before it was interrupted" if self.interrupted else "")
        if self.num_fired or self.statuses["FAIL"]:
            return None
        if self.statuses["PASS"]:
            return f"the subject changed nothing in {self.num_cases} cases, so that every law held vacuously"
        return "; ".join(f"{number} x {reason}" for reason, number in self.inconclusive.most_common(3))

    @property
    def own_share(self) -> float:
        """The part of all time that was not spent in the pass under test."""
        return 1 - self.phase_seconds.get("pass", 0.0) / self.seconds if self.seconds else 0.0


class _Stop(BaseException):
    """Time is up."""


class _Found(Exception):
    """A failure; each signature has a subclass of its own, so that Hypothesis tells them apart."""


@dataclass
class _Best:
    program: Program
    variant: Subject
    verdict: Verdict
    size: tuple[int, ...]
    path: Path | None = None


def hunt(
    features: Sequence[str] = (),
    *,
    subject: Callable[[str], Subject],
    seconds: float | None = None,
    cases: int | None = None,
    seed: int = 0,
    world_size: int | None = None,
    out: Path = Path("findings"),
    observer: Observer | None = None,
    ledger: Ledger | None = None,
    judge: Judge = check,
) -> HuntReport:
    """Hunt until time or cases are used up.

    A failure found near the end is still shrunk for a while: a quarter of the time, 20 seconds at most.

    Args:
        features: whose programs to draw; all where empty. Each gets an equal share.
        subject: gives the subject of a feature.
        seconds, cases: the limit; 60 seconds where neither is given.
        seed: the same seed draws the same programs.
        world_size: of all programs; 2 and 4 where left out.
        out: the folder that findings are written to, each as soon as it is seen, and again once it is smaller.
        observer: told of cases and findings.
        ledger: of known faults; the project's own where left out.
        judge: ``check``, in lockstep or at another level.

    Raises:
        OSError: a finding cannot be written.
    """
    names = list(features) or list(FEATURES)
    report = HuntReport()
    known = ledger if ledger is not None else load_ledger()
    start = time.monotonic()
    budget = seconds if seconds is not None else (None if cases is not None else 60.0)
    try:
        with _interrupts() as is_interrupted:
            for i, name in enumerate(names):
                end = None if budget is None else start + budget * (i + 1) / len(names)
                limit = None if cases is None else cases // len(names) + (i < cases % len(names))
                grace = 0.0 if budget is None else min(_SHRINK_SECONDS, budget * _LAST_SHRINK_SHARE)
                hunter = _Hunter(name, subject(name), world_size, known, report, observer or Observer(), out, is_interrupted, judge)
                hunter.run(end, limit, seed, grace)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    report.phase_seconds["draw"] = report.seconds - sum(s for name, s in report.phase_seconds.items() if name != "draw")
    return report


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed; it ends the hunt before the next case, and a second one at once.

    Python's own handler raises wherever it finds the program, and is lost in a callback that nothing can be raised from.
    """
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: pressed
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class _Hunter:
    """The hunt of one feature."""

    def __init__(
        self,
        feature: str,
        subject: Subject,
        world_size: int | None,
        ledger: Ledger,
        report: HuntReport,
        observer: Observer,
        out: Path,
        is_interrupted: Callable[[], bool],
        judge: Judge,
    ) -> None:
        self.feature = feature
        self.variants = [v for v in subject.variants() for _ in range(getattr(v, "weight", 1))]
        self.world_sizes = (world_size,) if world_size is not None else (2, 4)
        self.strategy = resolve(FEATURES[feature].strategy)
        self.ledger = ledger
        self.report = report
        self.observer = observer
        self.out = out
        self.is_interrupted = is_interrupted
        self.judge = judge
        self.clock = PhaseClock()
        self.best: dict[Signature, _Best] = {}
        self.classes: dict[Signature, type[_Found]] = {}
        self.seed = 0
        self.end: float | None = None
        self.grace = 0.0
        self.limit: int | None = None
        self.num_drawn = 0
        self.failing_since: float | None = None

    def run(self, end: float | None, limit: int | None, seed: int, grace: float = 0.0) -> None:
        """Rounds of Hypothesis runs with fresh seeds; what one round found is known to the next.

        Args:
            end: when no more cases are drawn, by ``time.monotonic``.
            limit: how many cases are drawn at most.
            seed: of all rounds together.
            grace: for how many seconds after ``end`` a failure may still be shrunk.
        """
        self.end, self.limit, self.seed, self.grace = end, limit, seed, grace
        number = 0
        logging.getLogger("torch").setLevel(logging.CRITICAL)
        try:
            while not self._is_over():
                before = self.report.num_cases
                left = _ROUND_CASES if self.limit is None else min(_ROUND_CASES, self.limit - self.num_drawn)
                self._round(seed * 1_000_003 + number, left)
                number += 1
                self._announce()
                if self.report.num_cases == before:
                    break
        finally:
            self._announce()
            totals = self.report.phase_seconds
            for name, spent in self.clock.seconds.items():
                totals[name] = totals.get(name, 0.0) + spent

    def _is_over(self) -> bool:
        return (self.end is not None and time.monotonic() >= self.end) or (
            self.limit is not None and self.num_drawn >= self.limit
        )

    def _round(self, seed: int, cases: int) -> None:
        self.failing_since = None

        @with_seed(seed)
        @settings(
            max_examples=max(cases, 1),
            deadline=None,
            database=None,
            print_blob=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def case(data: st.DataObject) -> None:
            variant = data.draw(st.sampled_from(self.variants))
            program = data.draw(self.strategy(world_sizes=self.world_sizes, **variant.focus))
            self._judge(program, variant)

        try:
            case()
        except (_Stop, _Found, Flaky, FlakyFailure, Unsatisfiable):
            pass
        except ExceptionGroup as group:
            others = group.split((_Found, Flaky))[1]
            if others is not None:
                raise others from None

    def _judge(self, program: Program, variant: Subject) -> None:
        if self.is_interrupted():
            raise KeyboardInterrupt
        shrinking = self.failing_since is not None
        if self._too_long() if shrinking else self._is_over():
            raise _Stop
        verdict = self.judge(program, variant, seed=self.seed, clock=self.clock)
        self._count(verdict, variant, shrinking)
        unknown: Signature | None = None
        for _, signature in signatures(verdict, variant):
            fault = self.ledger.match(signature, program)
            if fault is not None:
                if not self.report.known[fault.id]:
                    self.observer.known(fault)
                self.report.known[fault.id] += 1
            elif signature not in self.report.findings:
                unknown = unknown or signature
        self.observer.case(self.report)
        if unknown is not None:
            self._remember(unknown, program, variant, verdict)
            self.failing_since = self.failing_since or time.monotonic()
            raise self.classes.setdefault(unknown, type("Found", (_Found,), {}))(str(unknown))

    def _too_long(self) -> bool:
        now = time.monotonic()
        if self.end is not None and now >= self.end + self.grace:
            return True
        return self.failing_since is not None and now - self.failing_since > _SHRINK_SECONDS * max(len(self.best), 1)

    def _count(self, verdict: Verdict, variant: Subject, shrinking: bool) -> None:
        report = self.report
        report.num_cases += 1
        self.num_drawn += not shrinking
        report.statuses[verdict.status] += 1
        if verdict.strength is not None:
            report.strengths[verdict.strength] += 1
        report.num_fired += verdict.num_fired > 0
        report.num_vacuous += verdict.is_vacuous
        counts = report.fired.setdefault(variant.label, [0, 0])
        counts[0] += verdict.num_fired > 0
        counts[1] += 1
        if verdict.status == "INCONCLUSIVE":
            report.inconclusive[f"{verdict.reasons[0].kind}: {verdict.reasons[0].message[:120]}"] += 1

    def _remember(self, signature: Signature, program: Program, variant: Subject, verdict: Verdict) -> None:
        """Keep the smallest failure of each signature; the first is written at once, so that no crash loses it."""
        size = _size(program)
        best = self.best.get(signature)
        if best is None:
            self.best[signature] = _Best(program, variant, verdict, size)
            self.observer.seen(*self._store(signature))
        elif size < best.size:
            self.best[signature] = _Best(program, variant, verdict, size, best.path)

    def _store(self, signature: Signature) -> tuple[Finding, Path]:
        best = self.best[signature]
        finding = Finding(
            signature=signature,
            program=best.program,
            subject=best.variant.name,
            options=dict(best.variant.options),
            verdict=best.verdict,
            environment=environment(),
            command="",
            seed=self.seed,
        )
        stored = store_finding(finding, self.out, replacing=best.path)
        if stored.is_new:
            best.path = stored.path
        return finding, stored.path

    def _announce(self) -> None:
        """Write the smallest program of each signature, then tell of it."""
        for signature in sorted(self.best):
            finding, path = self._store(signature)
            del self.best[signature]
            self.report.findings[signature] = path
            self.observer.found(finding, path)


def _size(program: Program) -> tuple[int, ...]:
    """Smaller programs come first: fewer ranks, ops, inputs, elements."""
    elements = 0
    for spec in program.inputs:
        numel = 1
        for size in spec.shape:
            numel *= size
        elements += numel
    functions = () if program.autograd is None else program.autograd.functions
    within = sum(len(f.forward) + len(f.backward) + len(f.saved) + len(f.kept) + len(f.dirty) + len(f.outputs) for f in functions)
    num_backward = 0 if program.autograd is None else program.autograd.num_backward + len(program.autograd.hooks)
    modes = sum(op.mode is not None for op in program.ops)
    counts = (len(program.ops) + within + num_backward, modes, len(program.inputs), len(program.outputs))
    return (program.world_size, *counts, elements, len(program.groups))
