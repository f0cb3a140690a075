"""The command line: exit status, one clear line for what is wrong, JSON with a schema version, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from harness.casefile import read_case
from harness.cli import main
from harness.findings import load_finding
from harness.ledger import golden_folder
from harness.spec.program import LIMITS, encode_program
from harness.subjects.registry import FEATURES

PASSES = '''
"""Passes for tests: one that raises, one that does nothing."""


def raising(gm):
    if any("all_gather" in str(node.target) for node in gm.graph.nodes):
        raise ValueError("no gathers, please")


def nothing(gm):
    return gm
'''

CASE = """
import torch
import torch.distributed as dist

ops = torch.ops._c10d_functional
print("user output")


def program(a, b):
    group = dist.group.WORLD
    gathered = [ops.all_gather_into_tensor(t, group.size(), group.group_name) for t in (a, b)]
    return tuple(ops.wait_tensor(t) for t in gathered)


def inputs(rank, world_size):
    return torch.arange(3.0) + rank, torch.arange(4.0) - rank
"""


def _run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def _events(result: Result) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events
    assert all(event["schema_version"] == 1 and event["event"] for event in events)
    return events


def _refused(result: Result) -> str:
    """The one line of a command that was refused."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("harness: ")
    return line


@pytest.fixture
def passes(tmp_path: Path) -> Path:
    path = tmp_path / "passes.py"
    path.write_text(PASSES)
    return path


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "case.py"
    path.write_text(CASE)
    return path


SKIPS = """
import torch
import torch.distributed as dist

ops = torch.ops._c10d_functional


def reduced(x):
    return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))


def program(small, large):
    small = reduced(small)
    if dist.get_rank() != 1:
        large = reduced(large)
    return small, large + 1


def inputs(rank, world_size):
    return torch.ones(4) + rank, torch.ones(64)
"""


@pytest.mark.parametrize(("level", "kind"), [("lockstep", "deadlock"), ("passes", "hang")])
def test_a_skipped_collective_is_shown_with_its_line(level: str, kind: str, tmp_path: Path) -> None:
    """A case one rank of which skips a collective: the ranks, the collective, and the line of the file are told, and no pass is accused."""
    (tmp_path / "skips.py").write_text(SKIPS)
    result = _run("check", tmp_path / "skips.py", "--subject", "reference", "--level", level, "--deadline", "3")
    assert result.exit_code == 3 and f"({kind})" in result.stdout, result.stdout
    assert "wait_tensor_1, skips.py:9" in result.stdout and "rank 0" in result.stdout
    assert level == "lockstep" or "real.py" in result.stdout


def test_import_and_help_need_no_torch() -> None:
    """Neither `import harness`, `harness --help` nor `harness features` imports torch."""
    code = """
import sys
import harness
from harness.cli import main
for arguments in (["--help"], ["hunt", "--help"], ["features", "--json"]):
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code == 0, arguments
assert "torch" not in sys.modules and "hypothesis" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Usage: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hunt", "nonsense"], "no feature 'nonsense'"),
        (["hunt", "--seconds", "1", "--cases", "1"], "exclude each other"),
        (["hunt", "--seconds", "-1"], "--seconds"),
        (["hunt", "--world-size", "0"], "--world-size"),
        (["hunt", "--subject", "nobody", "--cases", "1"], "no subject 'nobody'"),
        (["hunt", "--subject", "missing.py:f", "--cases", "1"], "no file missing.py"),
        (["check"], "FILE"),
        (["check", "missing.json"], "missing.json: No such file"),
        (["check", "missing.py"], "missing.py: No such file"),
        (["check", "missing.txt"], "missing.txt"),
        (["check", "missing.json", "--feature", "nonsense"], "no feature 'nonsense'"),
        (["replay"], "FINDING"),
        (["replay", "missing.json"], "missing.json: No such file"),
        (["repro", "missing.json"], "missing.json: No such file"),
        (["frobnicate"], "frobnicate"),
        (["features", "--jsn"], "--jsn"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """Wrong usage says what is wrong in one line, exits with 2 and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    assert said in _refused(_run(*arguments))
    assert not [path for path in tmp_path.iterdir() if path.name != "findings" or list(path.iterdir())]


@pytest.mark.parametrize(
    ("content", "path", "said"),
    [
        (b'{"world_size": 2', "$", "truncated"),
        (b'{"world_size": "2"}', "$.world_size", "Expected `int`"),
        (b"\xff\xfe", "$", ""),
    ],
)
@pytest.mark.parametrize("command", ["check", "replay", "repro"])
def test_invalid_file_is_refused_with_its_path(
    tmp_path: Path, command: str, content: bytes, path: str, said: str
) -> None:
    """A broken file is refused with its name, the field's path and the reason; it stays as it was."""
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    line = _refused(_run(command, file))
    assert str(file) in line
    if command == "check":
        assert f"{file}: {path}: " in line
        assert said in line
    assert file.read_bytes() == content


@pytest.mark.parametrize("command", ["check", "replay", "repro"])
def test_huge_file_is_refused(tmp_path: Path, command: str) -> None:
    """A file beyond the limit is refused by its size."""
    file = tmp_path / "huge.json"
    with file.open("wb") as opened:
        opened.truncate(LIMITS.file_bytes + 1)
    assert f"{LIMITS.file_bytes + 1} bytes" in _refused(_run(command, file))


def test_features_lists_subjects() -> None:
    """Each feature is listed with its subjects, in text and as an event."""
    events = _events(_run("features", "--json"))
    assert [event["name"] for event in events] == list(FEATURES)
    assert all("inductor" in event["subjects"] for event in events)
    assert "bucketing" in _run("features").stdout


def test_check_judges_every_setting_of_a_subject(case: Path) -> None:
    """Python and the Program traced from it are judged alike, setting by setting, and vacuous verdicts say so."""
    program = case.with_suffix(".json")
    program.write_bytes(encode_program(read_case(case)))
    results = [_run("check", path, "--subject", "reference", "--json") for path in (case, program)]
    assert [r.exit_code for r in results] == [0, 0]
    judged = [[e for e in _events(r) if e["event"] == "verdict"] for r in results]
    for one, other in zip(*judged, strict=True):
        assert {**one, "file": ""} == {**other, "file": ""}
    fired = [event for event in judged[0] if event["num_fired"]]
    assert fired
    assert all(event["status"] == "PASS" and event["vacuous"] == (not event["num_fired"]) for event in judged[0])
    text = _run("check", case, "--subject", "reference")
    assert text.exit_code == 0
    assert text.stdout.count("vacuous") == len(judged[0]) - len(fired)
    assert "user output" not in text.stdout


def test_check_names_the_known_fault() -> None:
    """A fault of the ledger fails a check all the same, with its id beside it."""
    program = golden_folder() / "corpus/bucketing/bucketing-shared-storage.json"
    result = _run("check", program, "--json")
    assert result.exit_code == 1
    failing = [e for e in _events(result) if e["event"] == "verdict" and e["status"] == "FAIL"]
    assert failing
    assert all(e["known"] == ["bucketing-shared-storage"] for e in failing)
    assert "bucketing-shared-storage" in _run("check", program).stdout


def test_check_that_judged_nothing_says_why(case: Path, passes: Path) -> None:
    """Where the subject changed nothing, or an operator is not modelled, the status is 3 with the reason."""
    vacuous = _run("check", case, "--subject", f"{passes}:nothing")
    assert vacuous.exit_code == 3
    assert "changed nothing" in vacuous.stdout
    case.write_text(
        CASE.replace("return tuple(ops.wait_tensor(t) for t in gathered)", "return torch.linalg.svd(a + 0)")
    )
    case.write_text(case.read_text().replace("torch.arange(3.0)", "torch.eye(3)"))
    unsupported = _run("check", case, "--json")
    assert unsupported.exit_code == 3
    assert "unsupported" in _events(unsupported)[-1]["why_not_judged"]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("group = dist.group.WORLD", "group = 1 / 0", 10, "ZeroDivisionError"),
        ("return torch.arange(3.0)", "raise KeyError('gone') #", 16, "KeyError"),
        ("quiet = 1", "import no_such_module_here", 6, "ModuleNotFoundError"),
        ("def program(a, b):", "def program(a, b)", 9, "SyntaxError"),
        ("quiet = 1", "raise SystemExit(0)", 6, "SystemExit"),
        ("def inputs", "def input", None, "inputs: is missing"),
        ("quiet = 1", "WORLD_SIZE = 'two'", None, "WORLD_SIZE: 'two'"),
        ("quiet = 1", "COMPILE = 'nothing'", None, "COMPILE: 'nothing'"),
    ],
)
def test_fault_of_the_users_file_is_one_line(case: Path, old: str, new: str, line: int | None, said: str) -> None:
    """What the user's file does wrong is told in one line with the file and the line in it."""
    quiet = CASE.replace('print("user output")', "quiet = 1")
    assert old in quiet
    case.write_text(quiet.replace(old, new))
    text = _refused(_run("check", case))
    assert (f"{case}:{line}: " if line else f"{case}: ") in text
    assert said in text


def test_hunt_replay_and_repro_of_a_users_pass(tmp_path: Path, passes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a user's own pass is found, replayed with status 1, written as a script, and gone once mended."""
    monkeypatch.chdir(tmp_path)
    subject = f"{passes.name}:raising"
    hunted = _run(
        "hunt", "bucketing", "--subject", subject, "--cases", "60", "--seed", "3", "--world-size", "2", "--json"
    )
    assert hunted.exit_code == 1, hunted.output
    events = _events(hunted)
    assert [e["event"] for e in events] == ["hunt", "failing", "finding", "summary"]
    path = Path(events[2]["path"])
    assert path.parent == Path("findings")
    assert events[-1]["findings"] == [str(path)]
    assert events[-1]["fired"]
    assert set(events[-1]["phase_seconds"]) == {"draw", "build", "pass", "run", "judge"}
    assert load_finding(path).command == f"harness replay {path}"

    replayed = _run("replay", path)
    assert replayed.exit_code == 1
    assert "no gathers, please" in replayed.stdout
    assert _run("replay", path, path, "--json").exit_code == 1
    assert _run("replay", path, "--subject", f"{passes.name}:nothing").exit_code == 3

    script = _run("repro", path)
    assert script.exit_code == 0
    compile(script.stdout, "repro.py", "exec")
    assert _run("repro", path, "-o", "repro.py").exit_code == 0
    assert Path("repro.py").read_text() == script.stdout

    passes.write_text(PASSES.replace("raise ValueError", "print"))
    assert _run("replay", path).exit_code == 3


def test_known_faults_leave_a_hunt_green(tmp_path: Path) -> None:
    """A hunt that meets only what the ledger knows, if anything, exits with 0 and names what it met."""
    result = _run("hunt", "--subject", "reference", "--cases", "60", "--seed", "1", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "seconds by phase: " in result.stdout
    assert "reference/default" in result.stdout


def test_ctrl_c_ends_a_hunt_with_its_findings(tmp_path: Path, passes: Path) -> None:
    """Ctrl-C ends a hunt cleanly: the failure seen is on disk and named, with the status of a failure."""
    command = [sys.executable, "-m", "harness.cli", "hunt", "--subject", f"{passes.name}:raising", "--seconds", "120"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        while json.loads(process.stdout.readline())["event"] != "failing":
            pass
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert errors == ""
    assert process.returncode == 1
    summary = json.loads(rest.splitlines()[-1])
    assert summary["interrupted"]
    (path,) = summary["findings"]
    assert load_finding(tmp_path / path).signature.kind == "ValueError"
    assert [p.name for p in (tmp_path / "findings").iterdir()] == [Path(path).name]
