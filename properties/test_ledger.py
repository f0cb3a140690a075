"""The ledger knows what it says, nothing more; each of its faults still shows; a broken file is refused."""

from __future__ import annotations

import json
import tomllib
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from harness.check import check, signatures
from harness.errors import InvalidProgram
from harness.findings import load_program
from harness.ledger import Fault, Ledger, golden_folder, installed_torch, load_ledger
from harness.spec.program import LIMITS, Autograd, Function, Program, Ref, TensorSpec
from harness.spec.verdict import Signature
from harness.subjects.registry import load_subject

QUICK = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FAULTS = load_ledger().faults
FIELDS = ("feature", "subject", "law", "kind", "detail")
NAMES = st.text("ab[]!-/:_ ", min_size=1, max_size=6)


def _fault(**changes: object) -> Fault:
    fields: dict[str, object] = {
        "id": "one",
        "feature": "bucketing",
        "subject": "inductor:*",
        "law": "applies",
        "kind": "RuntimeError",
        "torch": ">=2.13,<2.15",
        "summary": "what is wrong where",
        "program": "corpus/bucketing/one.json",
        "options": {},
        "found": date(2026, 12, 1),
    }
    return Fault(**{**fields, **changes})  # type: ignore[arg-type]


TEXT = """
[[fault]]
id = "one"
feature = "bucketing"
subject = "inductor:*"
law = "applies"
kind = "RuntimeError"
torch = ">=2.13,<2.15"
summary = "what is wrong where"
program = "corpus/bucketing/one.json"
options = { pass = "all_gather" }
found = 2026-12-01
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_known_fault_still_shows(fault: Fault) -> None:
    """Each fault of the ledger shows on its minimal program in every torch it names, until torch mends it."""
    if not SpecifierSet(fault.torch).contains(installed_torch(), prereleases=True):
        pytest.skip(f"not in torch {installed_torch()}")
    program = load_program(golden_folder() / fault.program)
    name = fault.subject.partition(":")[0].partition("/")[0]
    subject = load_subject(name, feature=fault.feature, options=fault.options)
    shown = [signature for _, signature in signatures(check(program, subject), subject)]
    assert any(fault.matches(signature, installed_torch(), program) for signature in shown), (
        f"{fault.id} no longer shows under torch {installed_torch()}; end its version range. Seen: {shown}"
    )


@given(st.builds(Signature, NAMES, NAMES, NAMES, NAMES, NAMES), st.sampled_from(FIELDS), NAMES)
@QUICK
def test_fault_matches_its_own_signature_and_no_other(signature: Signature, field: str, other: str) -> None:
    """An entry without wildcards matches exactly the signature it spells, brackets and all."""
    fault = _fault(**{name: getattr(signature, name) for name in FIELDS})
    ledger = Ledger((fault,), "2.13.0")
    assert ledger.match(signature) == fault
    changed = Signature(**{**{name: getattr(signature, name) for name in FIELDS}, field: other})
    assert (ledger.match(changed) is not None) == (changed == signature)


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.12.1", False), ("2.13.0", True), ("2.14.1", True), ("2.15.0", False), ("2.14.0.dev20261201", True)],
)
def test_fault_is_known_in_its_versions_only(version: str, known: bool) -> None:
    """An entry matches in the versions of its range, nightlies too, and in no other."""
    signature = Signature("bucketing", "inductor:all_gather/default", "applies", "RuntimeError", "anything")
    assert (Ledger((_fault(),), version).match(signature) is not None) == known


def test_fault_that_needs_something_of_a_program_is_known_on_such_programs_only() -> None:
    """Wrong values of a program that does not use what the fault is about are no known fault."""
    signature = Signature("bucketing", "inductor:all_gather/default", "applies", "RuntimeError", "anything")
    dirty = Function(1, (), (Ref(0),), dirty=(0,), grads=(None,))
    program = Program(1, (), (TensorSpec((2,), "float32"),), (), (Ref(0),), autograd=Autograd((dirty,)))
    ledger = Ledger((_fault(needs=("mark_dirty",)),), "2.13.0")
    assert ledger.match(signature, program) is not None
    assert ledger.match(signature, replace(program, autograd=Autograd())) is None
    assert ledger.match(signature) is None


def _load(tmp_path: Path, text: str) -> Ledger:
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    return load_ledger(path)


def test_a_good_ledger_reads(tmp_path: Path) -> None:
    """What is refused below is refused for its change alone."""
    (fault,) = _load(tmp_path, TEXT).faults
    assert fault == _fault(options={"pass": "all_gather"})


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('law = "applies"', 'law = "*"', "$.fault[0].law"),
        ('kind = "RuntimeError"', "kind = 3", "$.fault[0].kind"),
        ('torch = ">=2.13,<2.15"', 'torch = "about 2.13"', "$.fault[0].torch"),
        ('torch = ">=2.13,<2.15"', 'torch = ""', "$.fault[0].torch"),
        ("found = 2026-12-01", 'found = "lately"', "$.fault[0].found"),
        ("found = 2026-12-01", "", "$.fault[0]"),
        ('summary = "what is wrong where"', 'summary = " "', "$.fault[0].summary"),
        ('id = "one"', 'id = "one"\nwhim = 1', "$.fault[0]"),
        ("[[fault]]", "[[fualt]]", "$"),
        ("options = { pass", "options = { pass = [1], other", "$.fault[0].options[...]"),
    ],
)
def test_wrong_field_is_refused_by_its_path(tmp_path: Path, old: str, new: str, field: str) -> None:
    """A field that is missing, unknown, empty or of a wrong type is refused, naming file, path and reason."""
    assert old in TEXT
    with pytest.raises(InvalidProgram) as refused:
        _load(tmp_path, TEXT.replace(old, new))
    assert refused.value.path == field
    assert refused.value.source == str(tmp_path / "ledger.toml")
    assert refused.value.reason


def test_an_id_stands_once(tmp_path: Path) -> None:
    """Two entries of one id are refused, naming the second."""
    with pytest.raises(InvalidProgram, match="'one' stands twice") as refused:
        _load(tmp_path, TEXT * 2)
    assert refused.value.path == "$.fault[1].id"


@given(st.data())
@QUICK
def test_cut_off_ledger_is_refused_or_shorter(tmp_path: Path, data: st.DataObject) -> None:
    """A ledger cut off anywhere is refused with file and path, unless what is left is whole entries."""
    text = TEXT + TEXT.replace('"one"', '"two"')
    cut = data.draw(st.integers(0, len(text) - 2))
    try:
        ledger = _load(tmp_path, text[:cut])
    except InvalidProgram as error:
        assert error.path.startswith("$")
        assert error.source == str(tmp_path / "ledger.toml")
    else:
        assert len(ledger.faults) == text[:cut].count("[[fault]]")


@given(st.binary(max_size=60))
@QUICK
def test_any_bytes_are_refused_or_read(tmp_path: Path, noise: bytes) -> None:
    """No file makes the reader raise anything but InvalidProgram."""
    path = tmp_path / "ledger.toml"
    path.write_bytes(noise)
    try:
        assert load_ledger(path).faults == ()
    except InvalidProgram as error:
        assert error.source == str(path)


def test_huge_ledger_is_refused(tmp_path: Path) -> None:
    """A file beyond the limit is refused by its size."""
    path = tmp_path / "ledger.toml"
    with path.open("wb") as file:
        file.truncate(LIMITS.file_bytes + 1)
    with pytest.raises(InvalidProgram, match="at most"):
        load_ledger(path)


def test_own_ledger_names_files_that_exist() -> None:
    """Each entry's program is there, and is stored under its feature's corpus."""
    raw = tomllib.loads((golden_folder() / "known_failures.toml").read_text())
    assert len(raw.get("fault", [])) == len(FAULTS)
    for fault in FAULTS:
        path = golden_folder() / fault.program
        assert path.is_relative_to(golden_folder() / "corpus" / fault.feature)
        json.loads(path.read_text())
