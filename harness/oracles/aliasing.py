"""Who shares memory, and who shares a version counter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.oracles.evidence import Evidence
from harness.spec.outcome import RankOutcome, TensorRecord
from harness.spec.verdict import Reason

__all__ = ["own_storage", "same_aliasing"]


def own_storage(e: Evidence) -> list[Reason]:
    """Outputs with storages and version counters of their own before have them after, and hold no more memory than before."""
    for rank, old, new in _ranks(e):
        for i, j in _newly_shared(old, new, "storage"):
            message = f"outputs {i} and {j} on rank {rank} are views of one storage of {new.outputs[j].storage_bytes} bytes"
            return [_fail("storage_shared", message, rank, j, "storages of their own", "one storage")]
        for i, j in _newly_shared(old, new, "version_group"):
            message = f"outputs {i} and {j} on rank {rank} share a version counter"
            return [_fail("version_shared", message, rank, j, "counters of their own", "one counter")]
        for i, (was, now) in enumerate(zip(old.outputs, new.outputs, strict=False)):
            if now.storage_bytes > was.storage_bytes:
                message = f"output {i} on rank {rank} keeps {now.storage_bytes} bytes alive, {was.storage_bytes} before"
                return [_fail("storage_kept", message, rank, i, str(was.storage_bytes), str(now.storage_bytes))]
    return []


def same_aliasing(e: Evidence) -> list[Reason]:
    """Outputs that shared memory with an input or with each other before still do, and none shares an input's that did not."""
    for rank, old, new in _ranks(e):
        before, after = [t.storage for t in (*old.inputs, *old.outputs)], [t.storage for t in (*new.inputs, *new.outputs)]
        if len(before) != len(after):
            continue
        gains = {j: i for i, j in _parted(after, before) if i < len(old.inputs)}
        losses = {j: i for i, j in _parted(before, after)}
        for j in sorted({*gains, *losses}):
            i = min(p[j] for p in (gains, losses) if j in p)
            gained = gains.get(j) == i
            kind = "alias_gained" if gained else "alias_lost"
            names = f"{_name(i, old)} and {_name(j, old)} on rank {rank}"
            message = f"{names} {'share memory now, not before' if gained else 'shared memory before, not now'}"
            return [Reason("same_aliasing", "FAIL", kind, message, rank=rank, node=_name(j, old))]
    return []


def _fail(kind: str, message: str, rank: int, output: int, expected: str, seen: str) -> Reason:
    return Reason("own_storage", "FAIL", kind, message, rank=rank, node=f"output {output}", expected=expected, seen=seen)


def _ranks(e: Evidence) -> list[tuple[int, RankOutcome, RankOutcome]]:
    """The first trial's ranks that ran to the end on both sides: aliasing is the same in every trial."""
    if not e.before:
        return []
    pairs = zip(e.before[0].ranks, e.after[0].ranks, strict=True)
    return [(r, old, new) for r, (old, new) in enumerate(pairs) if old.error is None and new.error is None]


def _newly_shared(old: RankOutcome, new: RankOutcome, what: str) -> Iterator[tuple[int, int]]:
    """Outputs that share a storage or counter now and did not before; one without memory shares none."""

    def sharers(outputs: Sequence[TensorRecord]) -> list[object]:
        return [getattr(t, what) if t.storage_bytes else ("none", i) for i, t in enumerate(outputs)]

    return _parted(sharers(new.outputs), sharers(old.outputs))


def _parted(same: Sequence[object], different: Sequence[object]) -> Iterator[tuple[int, int]]:
    """For each ``j`` the least ``i < j`` whose ``same`` is equal and ``different`` is not, as ``(i, j)``; in linear time."""
    seen: dict[object, dict[object, int]] = {}
    for j, (group, other) in enumerate(zip(same, different, strict=False)):
        firsts = seen.setdefault(group, {})
        apart = next((i for key, i in firsts.items() if key != other), None)
        if apart is not None:
            yield apart, j
        firsts.setdefault(other, j)


def _name(position: int, outcome: RankOutcome) -> str:
    num_inputs = len(outcome.inputs)
    return f"input {position}" if position < num_inputs else f"output {position - num_inputs}"
