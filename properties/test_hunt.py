"""Hunts find seeded faults, shrink them, store them before they speak of them, and go past what is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from harness.check import check, signatures
from harness.findings import load_finding
from harness.graph import collectives, target_name
from harness.hunt import PHASES, HuntReport, Observer, hunt
from harness.ledger import Fault, Ledger
from harness.spec.verdict import Finding
from harness.subjects.graph_pass import PassSubject, from_callable

NOTHING_KNOWN = Ledger((), "2.13.0")


def _starts(gm: Any, kind: str) -> int:
    return sum(kind in target_name(node) for node in collectives(gm.graph))


def raise_on_pairs(gm: Any) -> None:
    """Raise ValueError for two all_gathers, else KeyError for an all_reduce."""
    if _starts(gm, "all_gather") >= 2:
        raise ValueError("two gathers")
    if _starts(gm, "all_reduce"):
        raise KeyError("a reduce")


def change_nothing(gm: Any) -> None:
    """Do nothing at all."""


def _hunt(function: Callable[[Any], Any], out: Path, **options: Any) -> HuntReport:
    subject = options.pop("tested", None) or from_callable("seeded", "bucketing", function)
    options.setdefault("ledger", NOTHING_KNOWN)
    if "seconds" not in options:
        options.setdefault("cases", 80)
    options.setdefault("world_size", 2)
    return hunt(["bucketing"], subject=lambda _: subject, out=out, **options)


def test_two_faults_are_told_apart_and_shrunk(tmp_path: Path) -> None:
    """Two faults of one pass become two findings, each with a small program that shows it again."""
    report = _hunt(raise_on_pairs, tmp_path)
    assert report.exit_status == 1
    found = {signature.kind: load_finding(path) for signature, path in report.findings.items()}
    assert set(found) == {"ValueError", "KeyError"}
    assert len(list(tmp_path.iterdir())) == 2
    subject = from_callable("seeded", "bucketing", raise_on_pairs)
    for kind, limit in (("ValueError", 4), ("KeyError", 2)):
        program = found[kind].program
        assert len(program.ops) <= limit, f"{kind} was not shrunk: {program.ops}"
        shown = signatures(check(program, subject, seed=found[kind].seed), subject)
        assert [signature for _, signature in shown] == [found[kind].signature]


def test_finding_is_stored_before_it_is_announced(tmp_path: Path) -> None:
    """When an observer hears of a failure its file is there, whole, and final once it is called found."""
    heard: list[str] = []

    class Watcher(Observer):
        def seen(self, finding: Finding, path: Path) -> None:
            heard.append("seen")
            assert load_finding(path).signature == finding.signature

        def found(self, finding: Finding, path: Path) -> None:
            heard.append("found")
            assert load_finding(path).program == finding.program

    report = _hunt(raise_on_pairs, tmp_path, observer=Watcher())
    assert sorted(heard) == ["found", "found", "seen", "seen"]
    assert len(report.findings) == 2


def test_same_seed_finds_the_same(tmp_path: Path) -> None:
    """Two hunts with one seed store the same programs, and judge the same cases."""
    one = _hunt(raise_on_pairs, tmp_path / "one", seed=7, cases=40)
    two = _hunt(raise_on_pairs, tmp_path / "two", seed=7, cases=40)
    assert one.num_cases == two.num_cases
    assert one.statuses == two.statuses
    programs = [[load_finding(p).program for _, p in sorted(r.findings.items())] for r in (one, two)]
    assert programs[0] == programs[1]


def test_hunting_twice_loses_nothing(tmp_path: Path) -> None:
    """A second hunt into the same folder leaves every file of the first as it was."""
    _hunt(raise_on_pairs, tmp_path, seed=1, cases=40)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    _hunt(raise_on_pairs, tmp_path, seed=2, cases=40)
    assert before == {path: path.read_bytes() for path in before}


def test_known_fault_is_passed_and_counted(tmp_path: Path) -> None:
    """A fault of the ledger is counted, told of once, never stored, and does not hide another."""
    entry = Fault(
        id="gathers",
        feature="bucketing",
        subject="seeded",
        law="applies",
        kind="ValueError",
        torch=">=2",
        summary="two gathers",
        program="none",
        options={},
        found=date(2026, 12, 1),
    )
    told: list[str] = []

    class Watcher(Observer):
        def known(self, fault: Fault) -> None:
            told.append(fault.id)

    report = _hunt(raise_on_pairs, tmp_path, ledger=Ledger((entry,), "2.13.0"), observer=Watcher())
    assert {signature.kind for signature in report.findings} == {"KeyError"}
    assert report.known["gathers"] > 1
    assert told == ["gathers"]

    both = Ledger((entry, Fault(**{**_fields(entry), "id": "reduces", "kind": "KeyError"})), "2.13.0")
    report = _hunt(raise_on_pairs, tmp_path / "second", ledger=both)
    assert not report.findings
    assert report.exit_status == 0
    assert report.num_cases >= 80


def _fields(fault: Fault) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in fault.__struct_fields__}


def test_hunt_in_which_nothing_fired_is_not_green(tmp_path: Path) -> None:
    """A pass that never changes anything gives exit status 3, and the report says why."""
    report = _hunt(change_nothing, tmp_path, cases=20)
    assert report.statuses["PASS"] == report.num_vacuous == report.num_cases >= 20
    assert report.exit_status == 3
    assert "changed nothing" in str(report.why_not_judged)


def test_hunt_that_judged_nothing_says_why(tmp_path: Path) -> None:
    """Where every program lies outside the subject's contract the status is 3, with that reason."""
    picky = PassSubject(
        name="picky", feature="bucketing", function=change_nothing, label="picky", contract=lambda _: "not on a Tuesday"
    )
    report = _hunt(change_nothing, tmp_path, tested=picky, cases=10)
    assert report.statuses == {"INCONCLUSIVE": report.num_cases}
    assert report.exit_status == 3
    assert "not on a Tuesday" in str(report.why_not_judged)


@pytest.mark.parametrize("function", [change_nothing, raise_on_pairs])
def test_seconds_bound_the_hunt(tmp_path: Path, function: Callable[[Any], Any]) -> None:
    """A hunt of some seconds ends soon after them, shrinking included, and its phases add up to its time."""
    _hunt(function, tmp_path, cases=1)
    start = time.monotonic()
    report = _hunt(function, tmp_path, seconds=1.0)
    spent = time.monotonic() - start
    assert 0.9 <= spent < 2.5
    assert set(report.phase_seconds) == set(PHASES)
    assert sum(report.phase_seconds.values()) == pytest.approx(report.seconds, rel=0.01)


def test_interrupt_while_shrinking_keeps_what_was_found(tmp_path: Path) -> None:
    """Ctrl-C while a failure is shrunk ends the hunt at once; the smallest failure seen is stored."""
    sizes: list[int] = []

    def failing(gm: Any) -> None:
        if _starts(gm, "all_gather") >= 1:
            sizes.append(len(gm.graph.nodes))
            if len(sizes) == 12:
                raise KeyboardInterrupt
            raise ValueError("a gather")

    report = _hunt(failing, tmp_path, seconds=60)
    assert report.interrupted
    assert report.exit_status == 1
    (path,) = report.findings.values()
    assert list(tmp_path.iterdir()) == [path]
    assert load_finding(path).signature.kind == "ValueError"
    assert report.seconds < 20


def test_every_variant_is_tried(tmp_path: Path) -> None:
    """All settings of a subject are drawn, and a finding names the setting that failed."""

    def make(options: Any) -> PassSubject:
        def function(gm: Any) -> None:
            if options["bad"] == 2 and collectives(gm.graph):
                raise ValueError("bad setting")

        label = f"seeded/{options['bad']}"
        settings = [{"bad": i} for i in range(4)]
        return PassSubject(
            name="seeded",
            feature="bucketing",
            function=function,
            label=label,
            options=options,
            make=make,
            settings=settings,
        )

    report = _hunt(change_nothing, tmp_path, tested=make({"bad": 0}), cases=120)
    assert set(report.fired) == {f"seeded/{i}" for i in range(4)}
    (path,) = report.findings.values()
    assert load_finding(path).options == {"bad": 2}
