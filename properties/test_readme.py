"""The README's examples run, and what it says of commands and exit statuses is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_every_command_is_there() -> None:
    """Each command that the README's table names answers ``--help``, and there is no other."""
    named = set(re.findall(r"^\| `harness (\w+)", README, re.MULTILINE))
    assert named == set(main.commands)  # type: ignore[attr-defined]
    for command in named:
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0


def test_the_case_file(tmp_path: Path) -> None:
    """The example of a file to check passes our own model and shows the known fault of torch's."""
    file = tmp_path / "case.py"
    file.write_text(EXAMPLES[0])
    assert CliRunner().invoke(main, ["check", str(file), "--subject", "reference"]).exit_code == 0
    result = CliRunner().invoke(main, ["check", str(file)])
    assert result.exit_code == 1 and "bucketing-shared-storage" in result.output


@pytest.mark.parametrize(("body", "status"), [("from harness.reference.bucketing import bucket_collectives as my_pass", 0), ("my_pass = lambda gm: None", 1)])
def test_the_conformance_example(tmp_path: Path, body: str, status: int) -> None:
    """The three lines of the conformance example pass for a right pass and fail for one that does nothing."""
    file = tmp_path / "test_mine.py"
    file.write_text(f"{EXAMPLES[1]}\n\n{body}\n")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == status, run.stdout


def test_the_example_of_real_ranks(tmp_path: Path) -> None:
    """The example with the fixture ``ranks`` passes."""
    file = tmp_path / "test_ranks.py"
    file.write_text(EXAMPLES[2])
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("subject", ["reference", "aot_eager", "aot_autograd"])
def test_the_case_with_a_backward(tmp_path: Path, subject: str) -> None:
    """The example with a Function is judged, and passes; a seed that is none is refused by its name."""
    file = tmp_path / "case.py"
    file.write_text(EXAMPLES[3])
    command = ["check", str(file), "--feature", "mutation", "--subject", subject]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    file.write_text(EXAMPLES[3].replace("backward_seed = 7", "backward_seed = -7"))
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2 and "backward_seed" in refused.output and "Traceback" not in refused.output


def test_ci_runs_the_readmes_lines() -> None:
    """CI installs and tests by the README's own words."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "pytest -n auto" in README and "pytest -n auto" in script
    assert "pip install torch==2.13.0 -e '.[test]' && harness hunt" in README
    assert "torch==2.13.0 -e '.[test" in script
