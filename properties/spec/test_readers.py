"""The readers of Programs: whatever bytes they are given, they read a valid Program or name the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import InvalidProgram
from harness.ops import read_program
from harness.spec.program import LIMITS, Program, decode_program, encode_program
from harness.spec.verdict import Reason, Verdict, merge, normalise_message
from harness.strategies.collectives import collective_programs

QUICK = settings(max_examples=150, deadline=None)
WRONG = st.sampled_from([None, -1, 1.5, "x", [], {}, True, 2**63, 2**200, [[]], {"t": "ref"}, {"t": "ref", "value": 10**9}, {"t": "nothing"}])


def reads_or_names_a_field(data: bytes) -> None:
    try:
        program = read_program(data)
    except InvalidProgram as error:
        assert error.path.startswith("$") and error.reason
    else:
        assert isinstance(program, Program) and read_program(encode_program(program)) == program


@given(collective_programs(world_sizes=(1, 2, 4)))
@QUICK
def test_round_trip(program: Program) -> None:
    """A Program written and read again is the same Program."""
    assert read_program(encode_program(program)) == program


@given(collective_programs(), st.data())
@QUICK
def test_cut_off(program: Program, data: st.DataObject) -> None:
    """A Program cut off anywhere is refused, with a path."""
    text = encode_program(program)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    with pytest.raises(InvalidProgram, match=r"^\$"):
        read_program(cut)


@given(collective_programs(), st.data())
@QUICK
def test_flipped_bytes(program: Program, data: st.DataObject) -> None:
    """With any byte changed, the reader reads a valid Program or names a field; it raises nothing else."""
    text = bytearray(encode_program(program))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    reads_or_names_a_field(bytes(text))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in places(child, (*path, key)))]


@given(collective_programs(), st.data(), WRONG)
@settings(max_examples=500, deadline=None)
def test_wrong_values(program: Program, data: st.DataObject, wrong: Any) -> None:
    """With any field replaced by something of another type, absent or huge, the reader names a field or reads a valid Program."""
    tree = json.loads(encode_program(program))
    path = data.draw(st.sampled_from(places(tree)[1:]))
    at = tree
    for key in path[:-1]:
        at = at[key]
    if data.draw(st.booleans()):
        at[path[-1]] = wrong
    else:
        del at[path[-1]]
    reads_or_names_a_field(json.dumps(tree).encode())


@given(st.binary(max_size=200))
@QUICK
def test_any_bytes(data: bytes) -> None:
    """Bytes that are no Program are refused with a path."""
    reads_or_names_a_field(data)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"world_size": 10**9}, "$.world_size"),
        ({"inputs": [{"shape": [2**40], "dtype": "float32"}]}, "$.inputs[0].shape"),
        ({"inputs": [{"shape": [2**20, 2**20], "dtype": "float32"}]}, "$.inputs"),
        ({"inputs": [{"shape": [2], "dtype": "complex64"}]}, "$.inputs[0].dtype"),
        ({"ops": [{"target": "os.system", "args": ["true"]}]}, "$.ops[0].target"),
        ({"ops": [{"target": "aten.full.default", "args": [[2**60], 0]}], "outputs": []}, None),
        ({"groups": [{"name": "g", "parts": [[0]]}]}, "$.groups[0].parts"),
        ({"schema_version": 99}, "$.schema_version"),
        ({"unknown": 1}, None),
    ],
)
def test_named_faults(change: dict[str, Any], path: str | None) -> None:
    """A huge size, an unknown operator or dtype, a group that leaves ranks out: each is refused by its field."""
    base = {"world_size": 2, "groups": [], "inputs": [], "ops": [], "outputs": [], "schema_version": 1}
    if path is None:
        reads_or_names_a_field(json.dumps({**base, **change}).encode())
    else:
        with pytest.raises(InvalidProgram) as caught:
            read_program(json.dumps({**base, **change}))
        assert caught.value.path == path


def test_deep_nesting_and_size() -> None:
    """Nesting without end and files over the limit are refused before anything is built."""
    with pytest.raises(InvalidProgram):
        decode_program("[" * 100_000)
    with pytest.raises(InvalidProgram, match="bytes; at most"):
        decode_program(b" " * (LIMITS.file_bytes + 1))


@given(st.text(max_size=300))
@QUICK
def test_normalising_twice_is_once(message: str) -> None:
    """A normalised message is its own normal form."""
    once = normalise_message(message)
    assert normalise_message(once) == once


@given(st.lists(st.sampled_from(["PASS", "FAIL", "INCONCLUSIVE"]), min_size=1, max_size=5))
def test_merging_takes_the_gravest(statuses: list[Any]) -> None:
    """Several verdicts together are FAIL if any is, else INCONCLUSIVE if any is, else PASS; nothing judged is INCONCLUSIVE."""
    parts = [Verdict(s, (Reason("law", s, "kind", "why"),)) for s in statuses]
    expected = next(s for s in ("FAIL", "INCONCLUSIVE", "PASS") if s in statuses)
    assert merge(parts).status == expected and len(merge(parts).reasons) == len(parts)
    assert merge([]).status == "INCONCLUSIVE"
