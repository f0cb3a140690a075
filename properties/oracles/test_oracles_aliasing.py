"""The laws of aliasing against their definition over all pairs of tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.oracles.aliasing import own_storage, same_aliasing
from harness.oracles.evidence import Evidence
from harness.spec.outcome import Outcome, RankOutcome, TensorRecord
from harness.spec.program import Group, Program

PROGRAM = Program(1, (Group("world", ((0,),)),), (), (), ())


def outcome(storages: list[int], num_inputs: int, sizes: dict[int, int]) -> Outcome:
    records = tuple(TensorRecord("float32", (1,), (1,), 0, s, sizes[s], "", "", 0, s) for s in storages)
    return Outcome(ranks=(RankOutcome(inputs=records[:num_inputs], outputs=records[num_inputs:], collectives=()),), trial="small")


@given(st.data())
def test_same_aliasing_over_all_pairs(data: st.DataObject) -> None:
    """It fails exactly where some pair stops sharing, or an input is shared that was not."""
    length, num_inputs = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 4))
    drawn = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    before, after = data.draw(drawn), data.draw(drawn)
    sizes = dict.fromkeys(range(4), 4)
    evidence = Evidence(PROGRAM, [outcome(before, num_inputs, sizes)], [outcome(after, num_inputs, sizes)], [])
    pairs = [(i, j) for j in range(length) for i in range(j)]
    lost = [(i, j) for i, j in pairs if before[i] == before[j] and after[i] != after[j]]
    gained = [(i, j) for i, j in pairs if before[i] != before[j] and after[i] == after[j] and i < num_inputs]
    said = same_aliasing(evidence)
    assert bool(said) == bool(lost or gained)
    if said:
        first = min([*lost, *gained], key=lambda pair: (pair[1], pair[0]))
        assert said[0].kind == ("alias_gained" if first in gained else "alias_lost")
        j = first[1]
        assert said[0].node == (f"input {j}" if j < num_inputs else f"output {j - num_inputs}")


@given(st.data())
def test_own_storage_over_all_pairs(data: st.DataObject) -> None:
    """It fails exactly where two outputs come to share memory, or one keeps more of it alive."""
    length = data.draw(st.integers(0, 7))
    drawn = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    before, after = data.draw(drawn), data.draw(drawn)
    sizes = data.draw(st.fixed_dictionaries(dict.fromkeys(range(4), st.sampled_from([0, 4, 8]))))
    evidence = Evidence(PROGRAM, [outcome(before, 0, sizes)], [outcome(after, 0, sizes)], [])
    shared = [
        j
        for j in range(length)
        for i in range(j)
        if after[i] == after[j] and sizes[after[j]] and not (before[i] == before[j] and sizes[before[j]])
    ]
    kept = [j for j in range(length) if sizes[after[j]] > sizes[before[j]]]
    said = own_storage(evidence)
    expected = ("storage_shared", shared) if shared else ("storage_kept", kept)
    assert [(r.kind, r.node) for r in said] == ([(expected[0], f"output {expected[1][0]}")] if expected[1] else [])
