"""The examples of ``docs/`` run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from harness.spec.verdict import Verdict
from properties.executors.ranks.test_pool import sums
from properties.executors.ranks.test_remote import free_port

TEXT = (Path(__file__).parent.parent / "docs" / "ranks.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_pool_example() -> None:
    """The example of a pool judges a program on two ranks."""
    names: dict[str, object] = {"program": sums(2)}
    exec(EXAMPLES[0], names)
    verdict = names["verdict"]
    assert isinstance(verdict, Verdict) and verdict.status == "PASS"


def test_two_nodes_on_one_machine(tmp_path: Path) -> None:
    """The example of torchrun hunts on two nodes, and both end with it."""
    script = SHELL[0].replace("29600", str(free_port())).replace("29601", str(free_port())).replace("--cases 30", "--cases 6 --seed 1 --json")
    script = f"set -e\n{script}".replace("\nwait\n", "\nwait -n\nwait -n\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads(next(line for line in done.stdout.splitlines() if '"event": "summary"' in line))
    assert summary["num_cases"] == 6 and "PASS" in summary["statuses"], summary


def test_the_script_of_gloo_s_fault(tmp_path: Path) -> None:
    """The script runs with torch alone; with few rounds the fault is not to be expected."""
    file = tmp_path / "script.py"
    file.write_text(EXAMPLES[1].replace("30_000", "3"))
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={"PATH": "", "TMPDIR": str(tmp_path)})
    assert done.stdout.strip() == "[0, 0]", done.stderr
