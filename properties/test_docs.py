"""The examples of ``docs/`` run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from harness.spec.verdict import Verdict
from properties.executors.ranks.test_pool import sums

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "ranks.md").read_text(), re.DOTALL)


def test_the_pool_example() -> None:
    """The example of a pool judges a program on two ranks."""
    names: dict[str, object] = {"program": sums(2)}
    exec(EXAMPLES[0], names)
    verdict = names["verdict"]
    assert isinstance(verdict, Verdict) and verdict.status == "PASS"


def test_the_script_of_gloo_s_fault(tmp_path: Path) -> None:
    """The script runs with torch alone; with few rounds the fault is not to be expected."""
    file = tmp_path / "script.py"
    file.write_text(EXAMPLES[1].replace("30_000", "3"))
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={"PATH": "", "TMPDIR": str(tmp_path)})
    assert done.stdout.strip() == "[0, 0]", done.stderr
