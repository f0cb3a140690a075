"""The scripts of findings about programs with a backward show the fault with torch alone, and are silent where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from harness.check import check, signatures
from harness.findings import load_program
from harness.graph.source import source
from harness.ledger import Fault, golden_folder, installed_torch, load_ledger
from harness.report.repro import repro_script
from harness.spec.program import Program
from harness.spec.verdict import Finding
from harness.subjects.registry import load_subject

FAULTS = [f for f in load_ledger().faults if f.feature == "mutation" and f.options["backend"] != "inductor" and SpecifierSet(f.torch).contains(installed_torch())]


def finding_of(fault: Fault, program: Program) -> Finding:
    subject = load_subject("inductor", feature="mutation", options=fault.options)
    verdict = check(load_program(golden_folder() / fault.program), subject)
    return Finding(signatures(verdict, subject)[0][1], program, "inductor", dict(fault.options), verdict, {"torch": installed_torch()}, "")


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "repro.py"
    file.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(file)], cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_script_shows_the_fault(fault: Fault, tmp_path: Path) -> None:
    """Each known fault's script ends with 1 and prints a line that differs; harness is not imported."""
    program = load_program(golden_folder() / fault.program)
    script = repro_script(finding_of(fault, program))
    assert "harness" not in script and source(program).split("aten\n", 1)[1].strip() in script
    done = run(script, tmp_path)
    assert done.returncode == 1 and "compiled: " in done.stdout, done.stdout + done.stderr


def test_script_of_a_right_program_is_silent(tmp_path: Path) -> None:
    """Where the backend is right, the script ends with 0."""
    fault = next(f for f in FAULTS if f.id == "mutation-no-grad-write-of-view")
    program = load_program(golden_folder() / "corpus/mutation/mutation-scatter-overwritten.json")
    done = run(repro_script(finding_of(fault, program)), tmp_path)
    assert done.returncode == 0 and "0 lines differ" in done.stdout, done.stdout + done.stderr
