"""Who shares memory, and who shares a version counter."""

from __future__ import annotations

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
        before, after = [*old.inputs, *old.outputs], [*new.inputs, *new.outputs]
        if len(before) != len(after):
            continue
        for j, (was, now) in enumerate(zip(before, after, strict=True)):
            for i in range(j):
                had, has = before[i].storage == was.storage, after[i].storage == now.storage
                gained = has and not had and i < len(old.inputs)
                if (had and not has) or gained:
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


def _newly_shared(old: RankOutcome, new: RankOutcome, what: str) -> list[tuple[int, int]]:
    pairs = []
    for j in range(min(len(old.outputs), len(new.outputs))):
        for i in range(j):
            if _same(new.outputs[i], new.outputs[j], what) and not _same(old.outputs[i], old.outputs[j], what):
                pairs.append((i, j))
    return pairs


def _same(a: TensorRecord, b: TensorRecord, what: str) -> bool:
    return bool(a.storage_bytes and getattr(a, what) == getattr(b, what))


def _name(position: int, outcome: RankOutcome) -> str:
    num_inputs = len(outcome.inputs)
    return f"input {position}" if position < num_inputs else f"output {position - num_inputs}"
