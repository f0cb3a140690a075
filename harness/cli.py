"""The command ``harness``. Each command imports what is heavy itself, so that ``--help`` answers at once."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.executors.autograd import Case
    from harness.hunt import HuntReport
    from harness.ledger import Fault, Ledger
    from harness.levels import Level, Levels
    from harness.report.console import Output, Row
    from harness.spec.program import Program
    from harness.spec.protocols import Subject
    from harness.spec.verdict import Finding, Reason, Verdict
    from harness.twin import Twin

__all__ = ["main"]

JUDGED: Final = 0
FAILED: Final = 1
WRONG: Final = 2
UNDECIDED: Final = 3

_FILE: Final = click.Path(path_type=Path)
_MAX_WORLD_SIZE: Final = 64
_TWIN_ONE_IN: Final = 8


class _Group(click.Group):
    """Commands that return their exit status; wrong usage and invalid input are one line and status 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and, unless ``standalone_mode`` is off, exit with its status."""
        run: Callable[[], Any] = functools.partial(
            super().main, args, prog_name, complete_var, standalone_mode=False, **extra
        )
        if not standalone_mode:
            return run()
        status: Any
        try:
            status = run()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            status = WRONG
        except click.UsageError as error:
            hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
            status = _refuse(f"{error.format_message()}{hint}")
        except click.Abort:
            status = _refuse("interrupted", status=130)
        except (HarnessError, click.ClickException) as error:
            status = _refuse(error.format_message() if isinstance(error, click.ClickException) else str(error))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            status = _refuse("torch is not installed here: pip install torch")
        except OSError as error:
            name = f"{error.filename}: " if error.filename is not None else ""
            status = _refuse(f"{name}{error.strerror or error}")
        sys.exit(status if isinstance(status, int) else JUDGED)


def _refuse(message: str, *, status: int = WRONG) -> int:
    click.echo("harness: " + " ".join(message.split()), err=True)
    return status


def _version() -> str:
    try:
        return metadata.version("compiler-harness")
    except metadata.PackageNotFoundError:
        return "not installed"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(_version(), prog_name="harness")
def main() -> None:
    """Find, explain and pin down errors in compilers for PyTorch.

    Exit status: 0 judged and nothing unknown failed; 1 a failure; 2 wrong usage or invalid input; 3 nothing could be
    judged.
    """


def _output(as_json: bool) -> Output:
    from harness.report.console import Output

    return Output(as_json=as_json)


_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@main.command()
@_json_option
def features(as_json: bool) -> int:
    """List the features and their subjects."""
    from harness.subjects.registry import FEATURES, subject_names

    output = _output(as_json)
    for name, feature in FEATURES.items():
        output.event("feature", name=name, summary=feature.summary, subjects=list(subject_names(name)))
    output.table(
        ("feature", "subjects", "what it does"),
        [(name, ", ".join(subject_names(name)), feature.summary) for name, feature in FEATURES.items()],
    )
    output.line()
    output.line(
        "A subject may also be package.module:attribute or path/to/file.py:attribute (a pass over graph modules)."
    )
    return JUDGED


class _Where(NamedTuple):
    """Where cases run, as the options say."""

    level: Level
    deadline_s: float | None
    ranks: str | None

    @property
    def is_lockstep(self) -> bool:
        return self.level == "lockstep" and self.ranks is None

    @contextmanager
    def open(self, twin: Twin | None = None) -> Iterator[Levels]:
        """The levels, with ranks that torchrun started where an address is given."""
        from harness.levels import Levels, default_deadline

        if self.ranks is None:
            with Levels(self.level, deadline_s=self.deadline_s, twin=twin) as levels:
                yield levels
            return
        from harness.executors.ranks.mailbox import address_of, secret_from
        from harness.executors.ranks.remote import RemotePool

        level: Level = "compiled" if self.level == "compiled" else "passes"
        deadline = self.deadline_s or default_deadline(level)
        with RemotePool(*address_of(self.ranks), secret_from(), deadline_s=deadline) as pool, Levels(level, ranks=pool) as levels:
            yield levels


def _level_options(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def with_where(*args: Any, level: Level, deadline: float | None, ranks: str | None, **kwargs: Any) -> Any:
        return command(*args, where=_Where(level, deadline, ranks), **kwargs)

    options = (
        click.option(
            "--level",
            type=click.Choice(("lockstep", "passes", "compiled")),
            default="lockstep",
            show_default=True,
            help="Where programs run: in lockstep; or on real ranks, the graphs themselves (passes) or through torch.compile (compiled).",
        ),
        click.option(
            "--deadline", type=click.FloatRange(min=0, min_open=True), help="Seconds a case may take on real ranks; 10, or 120 where it is compiled."
        ),
        click.option(
            "--ranks", metavar="HOST:PORT", help="Listen here for ranks that torchrun started, instead of starting ranks; see docs/ranks.md."
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_where)


@main.command()
@click.argument("features", nargs=-1, metavar="[FEATURE]...")
@click.option("--subject", default="inductor", show_default=True, help="Whose passes to try.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="How long; 60 where --cases is not given.")
@click.option("--cases", type=click.IntRange(min=1), help="How many programs to draw, instead of --seconds.")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same programs; a new one by default.")
@click.option(
    "--world-size", type=click.IntRange(1, _MAX_WORLD_SIZE), help="Ranks of all programs; 2 and 4 by default."
)
@click.option("--out", type=_FILE, default=Path("findings"), show_default=True, help="The folder for findings.")
@_level_options
@_json_option
def hunt(
    features: tuple[str, ...],
    subject: str,
    seconds: float | None,
    cases: int | None,
    seed: int | None,
    world_size: int | None,
    out: Path,
    where: _Where,
    as_json: bool,
) -> int:
    """Draw programs, judge what a subject does to them, shrink and store what fails."""
    if seconds is not None and cases is not None:
        raise click.UsageError("--seconds and --cases exclude each other")
    from harness.subjects.registry import FEATURES, features_with, load_subject

    for name in features:
        if name not in FEATURES:
            raise click.UsageError(f"no feature {name!r}; there are: {', '.join(FEATURES)}")
    names = list(dict.fromkeys(features)) or list(features_with(subject))
    out.mkdir(parents=True, exist_ok=True)
    loaded = {name: load_subject(subject, feature=name) for name in names}
    import random

    from harness.hunt import hunt as run
    from harness.ledger import load_ledger
    from harness.twin import Twin

    output = _output(as_json)
    chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
    ledger = load_ledger()
    limit = None if cases is not None else seconds or 60.0
    output.event(
        "hunt", features=names, subject=subject, seed=chosen, seconds=limit, cases=cases, torch=ledger.torch_version
    )
    amount = f"{cases} cases" if cases is not None else f"{limit:g} s"
    modules = tuple(name for found in loaded.values() for name in getattr(found, "modules", ()))
    twin = Twin(modules, is_patient=False, one_in=_TWIN_ONE_IN) if where.is_lockstep else None
    output.line(f"hunting {', '.join(names)} of {subject}, torch {ledger.torch_version}, {amount}, seed {chosen}")
    with output.progress(float(cases or limit or 0)) as bar, where.open(twin) as levels:
        if levels.world_size not in (None, world_size or levels.world_size):
            raise click.UsageError(f"--world-size {world_size}, but torchrun started {levels.world_size} ranks")
        report = run(
            names,
            subject=loaded.__getitem__,
            seconds=limit,
            cases=cases,
            seed=chosen,
            world_size=levels.world_size or world_size,
            out=out,
            observer=_observer(output, bar, by_cases=cases is not None),
            ledger=ledger,
            judge=levels.check,
        )
    _show_hunt(output, report, chosen, ledger)
    return report.exit_status


def _observer(output: Output, bar: Any, *, by_cases: bool) -> Any:
    from harness.hunt import Observer

    class Watcher(Observer):
        def __init__(self) -> None:
            self.start = time.monotonic()
            self.found_so_far = 0

        def case(self, report: HuntReport) -> None:
            spent = time.monotonic() - self.start
            text = f"{report.num_cases} cases, {report.num_fired} fired, {self.found_so_far} found"
            if report.known:
                text += f", {sum(report.known.values())} x known"
            bar.update(report.num_cases if by_cases else spent, text)

        def seen(self, finding: Finding, path: Path) -> None:
            output.event("failing", path=str(path), signature=_builtins(finding.signature))
            output.line(f"failing: {_title(finding)}; shrinking ...")

        def found(self, finding: Finding, path: Path) -> None:
            from harness.report.console import reason_line

            self.found_so_far += 1
            failing = [r for r in finding.verdict.reasons if r.status == "FAIL"]
            command = f"harness replay {path}"
            output.event(
                "finding",
                path=str(path),
                signature=_builtins(finding.signature),
                reasons=_builtins(failing),
                num_ops=len(finding.program.ops),
                command=command,
            )
            output.line(f"found: {_title(finding)} in {len(finding.program.ops)} ops", style="bold red")
            for reason in failing:
                output.line(f"  {reason_line(reason)}")
            output.line(f"  show it again: {command}")

        def known(self, fault: Fault) -> None:
            output.event("known", id=fault.id, summary=fault.summary)
            output.line(f"known: {fault.id}: {fault.summary}")

    return Watcher()


def _title(finding: Finding) -> str:
    signature = finding.signature
    return f"{signature.subject} breaks {signature.law} ({signature.kind})"


def _builtins(value: Any) -> Any:
    from harness.spec.verdict import to_builtins

    return to_builtins(value)


def _show_hunt(output: Output, report: HuntReport, seed: int, ledger: Ledger) -> None:
    rate = report.num_cases / report.seconds if report.seconds else 0.0
    output.event(
        "summary",
        exit_status=report.exit_status,
        seed=seed,
        num_cases=report.num_cases,
        statuses=dict(report.statuses),
        strengths=dict(report.strengths),
        num_fired=report.num_fired,
        num_vacuous=report.num_vacuous,
        fired={label: {"fired": n, "cases": total} for label, (n, total) in sorted(report.fired.items())},
        known=dict(report.known),
        inconclusive=dict(report.inconclusive),
        findings=[str(path) for path in report.findings.values()],
        seconds=report.seconds,
        phase_seconds=report.phase_seconds,
        own_share=report.own_share,
        interrupted=report.interrupted,
        why_not_judged=report.why_not_judged,
    )
    output.line()
    output.table(
        ("variant", "#cases", "#fired"),
        [(label, str(total), str(fired)) for label, (fired, total) in sorted(report.fired.items())],
    )
    output.line()
    passed = ", ".join(f"{number} {name}" for name, number in sorted(report.strengths.items())) or "none"
    output.line(
        f"{report.num_cases} cases in {report.seconds:.1f} s ({rate:.1f}/s): {report.statuses['PASS']} PASS ({passed}, "
        f"{report.num_vacuous} vacuous), {report.statuses['FAIL']} FAIL, "
        f"{report.statuses['INCONCLUSIVE']} INCONCLUSIVE; {report.num_fired} fired"
    )
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.phase_seconds.items())
    output.line(f"seconds by phase: {phases}; the harness's own share {report.own_share:.0%}")
    for reason, number in report.inconclusive.most_common(5):
        output.line(f"inconclusive: {number} x {reason}", style="yellow")
    summaries = {fault.id: fault.summary for fault in ledger.faults}
    for name, number in report.known.most_common():
        output.line(f"known: {number} x {name}: {summaries[name]}")
    for path in report.findings.values():
        output.line(f"finding: {path}", style="red")
    if report.interrupted:
        output.line("interrupted; all findings are kept")
    if report.exit_status == UNDECIDED:
        output.line(f"nothing could be judged: {report.why_not_judged}", style="yellow")


@main.command()
@click.argument("file", type=_FILE)
@click.option("--feature", default="bucketing", show_default=True, help="Whose laws to check.")
@click.option("--subject", default="inductor", show_default=True, help="Whose passes to try; all their settings are.")
@_level_options
@_json_option
def check(file: Path, feature: str, subject: str, where: _Where, as_json: bool) -> int:
    """Judge what a subject does to one program.

    FILE is a Program or a finding (.json), or Python (.py) with program(*tensors) and inputs(rank, world_size),
    optionally WORLD_SIZE and COMPILE; with a backward also num_backward and backward_seed.
    """
    from harness.casefile import read_case, read_source
    from harness.errors import Unsupported
    from harness.ledger import load_ledger
    from harness.spec.protocols import Compiler
    from harness.subjects.registry import load_subject

    output = _output(as_json)
    loaded = load_subject(subject, feature=feature)
    ledger = load_ledger()
    try:
        program = read_source(file) if isinstance(loaded, Compiler) else read_case(file)
    except Unsupported as error:
        return _undecided(output, f"{file}: {error}")
    with where.open() as levels:
        rows: list[Row] = []
        for variant in loaded.variants():
            rows.append(_judge(program, variant, ledger, levels))
            if any(reason.law == "program_runs" for reason in rows[-1].verdict.reasons):
                break
    for row in rows:
        output.event("verdict", file=str(file), **row.as_event())
    output.verdicts(rows)
    return _conclude(output, rows)


def _judge(program: Program | Case, subject: Subject, ledger: Ledger, levels: Levels, *, seed: int = 0) -> Row:
    from harness.check import signatures
    from harness.report.console import Row, variant_name
    from harness.spec.program import Program

    logging.getLogger("torch").setLevel(logging.CRITICAL)
    verdict: Verdict = levels.check(program, subject, seed=seed)
    given = program if isinstance(program, Program) else None
    faults = [ledger.match(signature, given) for _, signature in signatures(verdict, subject)]
    name = variant_name(subject.label, subject.options)
    return Row(name, verdict, tuple(None if fault is None else fault.id for fault in faults))


def _status(rows: Sequence[Row]) -> int:
    if any(row.verdict.status == "FAIL" for row in rows):
        return FAILED
    return JUDGED if any(row.verdict.status == "PASS" and row.verdict.num_fired for row in rows) else UNDECIDED


def _conclude(output: Output, rows: Sequence[Row]) -> int:
    status = _status(rows)
    if status == UNDECIDED:
        undecided: list[Reason] = [r for row in rows for r in row.verdict.reasons]
        reasons = list(dict.fromkeys(f"{reason.kind}: {reason.message}" for reason in undecided))
        if any(row.verdict.is_vacuous for row in rows):
            reasons.append("the subject changed nothing here, so that every law held vacuously")
        return _undecided(output, "; ".join(reasons))
    output.event("summary", exit_status=status, num_variants=len(rows))
    return status


def _undecided(output: Output, reason: str) -> int:
    output.event("summary", exit_status=UNDECIDED, why_not_judged=reason)
    output.line()
    output.line(f"nothing could be judged: {reason}", style="yellow")
    return UNDECIDED


@main.command()
@click.argument("findings", nargs=-1, required=True, type=_FILE, metavar="FINDING...")
@click.option("--subject", help="Judge all settings of this subject, instead of the one that the finding names.")
@_level_options
@_json_option
def replay(findings: tuple[Path, ...], subject: str | None, where: _Where, as_json: bool) -> int:
    """Judge stored findings again."""
    from harness.findings import load_finding
    from harness.ledger import load_ledger
    from harness.report.console import Row
    from harness.twin import Twin

    loaded = [(path, load_finding(path)) for path in findings]
    subjects = [_subjects(finding, subject) for _, finding in loaded]
    output = _output(as_json)
    ledger = load_ledger()
    rows: list[Row] = []
    is_hashed = where.is_lockstep and any(finding.signature.law == "deterministic" for _, finding in loaded)
    with where.open(Twin() if is_hashed else None) as levels:
        for (path, finding), variants in zip(loaded, subjects, strict=True):
            for variant in variants:
                row = _judge(finding.program, variant, ledger, levels, seed=finding.seed)
                output.event("verdict", file=str(path), **row.as_event())
                rows.append(Row(f"{path}: {row.variant}" if len(loaded) > 1 else row.variant, row.verdict, row.known))
    output.verdicts(rows)
    return _conclude(output, rows)


def _subjects(finding: Finding, name: str | None) -> Sequence[Subject]:
    from harness.subjects.registry import load_subject

    feature = finding.signature.feature
    if name is None or name == finding.subject:
        return (load_subject(finding.subject, feature=feature, options=finding.options),)
    return load_subject(name, feature=feature).variants()


@main.command()
@click.argument("finding", type=_FILE)
@click.option("-o", "--output", "target", type=_FILE, help="Where to write it; standard output where left out.")
def repro(finding: Path, target: Path | None) -> int:
    """Write one self-contained script that shows a finding with torch alone."""
    from harness.findings import load_finding, write_atomically
    from harness.report.repro import repro_script

    script = repro_script(load_finding(finding))
    if target is None:
        click.echo(script, nl=False)
        return JUDGED
    write_atomically(target, script.encode())
    click.echo(f"wrote {target}; show the fault with: python {target}")
    return JUDGED


if __name__ == "__main__":
    main(prog_name="harness")
