"""Findings are written whole, never lose a file, and are read back equal or refused with path, field and reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import InvalidProgram
from harness.findings import file_name, load_finding, load_program, store_finding, write_atomically
from harness.spec.program import LIMITS, Program, encode_program
from harness.spec.verdict import Finding, Reason, Signature, Verdict, encode_finding
from harness.strategies.collectives import collective_programs

QUICK = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    kind = draw(WORDS)
    reason = Reason("applies", "FAIL", kind, draw(WORDS), rank=draw(st.none() | st.integers(0, 3)))
    return Finding(
        signature=Signature("bucketing", draw(WORDS), "applies", kind, draw(WORDS)),
        program=draw(collective_programs(max_collectives=2)),
        subject="inductor",
        options=draw(st.dictionaries(WORDS, st.none() | st.booleans() | st.integers(0, 9) | WORDS, max_size=2)),
        verdict=Verdict("FAIL", (reason,)),
        environment={"torch": "2.13.0"},
        command="",
        seed=draw(st.integers(0, 2**32)),
    )


def _without_command(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, command="")


@given(findings())
@QUICK
def test_stored_finding_reads_back_equal(tmp_path: Path, finding: Finding) -> None:
    """A stored finding is read back equal, but for its command, which names the file."""
    stored = store_finding(finding, tmp_path / "deep" / "folder")
    read = load_finding(stored.path)
    assert _without_command(read) == finding
    assert str(stored.path) in read.command
    assert load_program(stored.path) == finding.program


@given(st.lists(findings(), min_size=1, max_size=4), st.binary(max_size=30))
@QUICK
def test_storing_loses_no_file(
    tmp_path_factory: pytest.TempPathFactory, given_findings: list[Finding], other: bytes
) -> None:
    """Whatever lies in the folder, even under the very name of a finding, is there unchanged after storing others."""
    folder = tmp_path_factory.mktemp("findings")
    taken = folder / file_name(given_findings[0].signature)
    taken.write_bytes(other)
    expected = {taken: other}
    for finding in given_findings:
        stored = store_finding(finding, folder)
        assert stored.is_new == (stored.path not in expected)
        expected.setdefault(stored.path, stored.path.read_bytes())
        assert _without_command(load_finding(stored.path)) == finding
    assert {path: path.read_bytes() for path in folder.iterdir()} == expected


@given(findings(), findings())
@QUICK
def test_replacing_writes_over_its_own_file_only(tmp_path: Path, first: Finding, second: Finding) -> None:
    """A finding that replaces an earlier one takes its file and adds none."""
    path = store_finding(first, tmp_path).path
    before = set(tmp_path.iterdir())
    assert store_finding(second, tmp_path, replacing=path) == (path, True)
    assert set(tmp_path.iterdir()) == before
    assert _without_command(load_finding(path)) == second


@given(st.builds(Signature, WORDS, WORDS, WORDS, WORDS, WORDS), st.builds(Signature, WORDS, WORDS, WORDS, WORDS, WORDS))
@QUICK
def test_file_names_tell_signatures_apart(one: Signature, other: Signature) -> None:
    """A signature has one file name, safe everywhere, that no other signature has."""
    assert (file_name(one) == file_name(other)) == (one == other)
    assert len(file_name(one)) < 120
    assert all(c.isascii() and (c.isalnum() or c in "-_.") for c in file_name(one))


_WRITER = """
import sys
from pathlib import Path
from harness.findings import write_atomically
path, number = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    number += 1
    write_atomically(path, (b"%08d" % number) * 20000)
"""


def test_kill_during_write_leaves_a_whole_file(tmp_path: Path) -> None:
    """A writer killed at any moment leaves either what was there or all of what it wrote."""
    path = tmp_path / "finding.json"
    write_atomically(path, b"00000000" * 20000)
    seen = set()
    for delay in (0.0, 0.003, 0.01, 0.02, 0.05):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        data = path.read_bytes()
        assert len(data) == 8 * 20000
        assert data == data[:8] * 20000
        seen.add(data[:8])
    assert len(seen) > 1, "no writer got as far as writing"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A disk that refuses to flush or rename costs neither the old file nor leaves a temporary one."""
    path = tmp_path / "finding.json"
    path.write_bytes(b"old")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@given(findings(), st.data())
@QUICK
def test_cut_off_finding_is_refused(tmp_path: Path, finding: Finding, data: st.DataObject) -> None:
    """A file cut off anywhere is refused, naming the file and a path in it."""
    whole = encode_finding(finding).rstrip()
    path = tmp_path / "cut.json"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InvalidProgram) as refused:
        load_finding(path)
    assert refused.value.source == str(path)
    assert refused.value.path.startswith("$")
    assert refused.value.reason


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value inside nested lists and dicts, outermost left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*at, key), *_places(item, (*at, key)))]


WRONG = {"an object where none may be": 1}


@given(findings(), st.data())
@QUICK
def test_wrong_type_anywhere_is_refused_or_harmless(tmp_path: Path, finding: Finding, data: st.DataObject) -> None:
    """An object put in the place of any value is refused with its path, unless any object may stand there."""
    tree = json.loads(encode_finding(finding))
    place = data.draw(st.sampled_from(_places(tree)))
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = WRONG
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(tree))
    try:
        load_finding(path)
    except InvalidProgram as error:
        assert error.path.startswith("$")
        assert str(path) in str(error)
    else:
        assert place[-1] in ("kwargs", "options", "environment", "autograd") or "schema_version" in place


@given(collective_programs(max_collectives=2).filter(lambda p: p.ops), st.data())
@QUICK
def test_unknown_operator_is_refused_by_its_place(tmp_path: Path, program: Program, data: st.DataObject) -> None:
    """An operator outside the table is refused with the path of the op, in a Program and in a finding."""
    at = data.draw(st.integers(0, len(program.ops) - 1))
    ops = list(program.ops)
    ops[at] = msgspec.structs.replace(ops[at], target="aten.system.default")
    path = tmp_path / "unknown.json"
    path.write_bytes(encode_program(msgspec.structs.replace(program, ops=tuple(ops))))
    with pytest.raises(InvalidProgram) as refused:
        load_program(path)
    assert refused.value.path == f"$.ops[{at}].target"
    assert "aten.system.default" in refused.value.reason


def test_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file larger than the limit is refused by its size, without reading it."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(LIMITS.file_bytes + 1)
    for load in (load_finding, load_program):
        with pytest.raises(InvalidProgram, match=f"{LIMITS.file_bytes + 1} bytes"):
            load(path)


@given(findings())
@QUICK
def test_huge_tensor_is_refused_before_it_is_made(tmp_path: Path, finding: Finding) -> None:
    """An input of absurd size is refused by the path of its field."""
    tree = json.loads(encode_finding(finding))
    tree["program"]["inputs"] = [{"shape": [2**29, 2**29], "dtype": "float32"}]
    path = tmp_path / "tensor.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(InvalidProgram) as refused:
        load_program(path)
    assert refused.value.path.startswith("$.program.inputs")
