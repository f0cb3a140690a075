"""Are two runs the same function of their inputs? The ladder of judgement: field halves first, then bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.oracles.evidence import Evidence
from harness.oracles.numerics import first_difference, is_rounding, named_dtypes
from harness.spec.outcome import Outcome, RankOutcome, TensorRecord
from harness.spec.program import Ref
from harness.spec.verdict import Reason, first_line

__all__ = ["equal_inputs", "equal_metadata", "equal_outputs", "equal_strides", "is_proved", "runs"]

_LAYOUT_DEPENDENT = frozenset({"aten.as_strided.default"})


def runs(e: Evidence) -> list[Reason]:
    """Whatever ran to its end before runs to its end after, on every rank."""
    for before, after in zip(e.before, e.after, strict=True):
        for rank, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
            if new.error is not None and old.error is None:
                message = f"rank {rank} raises {new.error.type} at {new.error.node}: {first_line(new.error.message)}"
                return [
                    Reason("runs", "FAIL", new.error.type, message, rank=rank, node=new.error.node, expected="no error", seen=new.error.message)
                ]
    return []


def equal_metadata(e: Evidence) -> list[Reason]:
    """Every output has the dtype and shape that it had before."""
    for rank, i, old, new in _pairs(e, "outputs"):
        for kind, expected, seen in (("dtype", old.dtype, new.dtype), ("shape", old.shape, new.shape)):
            if expected != seen:
                return [_other("equal_metadata", kind, rank, i, expected, seen)]
    counts = {(len(b.outputs), len(a.outputs)) for o, n in zip(e.before, e.after, strict=True) for b, a in _ranks(o, n)}
    for expected_count, seen_count in sorted(counts):
        if expected_count != seen_count:
            message = f"{seen_count} outputs, not {expected_count}"
            return [Reason("equal_metadata", "FAIL", "num_outputs", message, expected=str(expected_count), seen=str(seen_count))]
    return []


def equal_strides(e: Evidence) -> list[Reason]:
    """Every output has the strides that it had before."""
    for rank, i, old, new in _pairs(e, "outputs"):
        if old.shape == new.shape and old.significant_stride != new.significant_stride:
            return [_other("equal_strides", "stride", rank, i, old.stride, new.stride)]
    return []


def _other(law: str, kind: str, rank: int, output: int, expected: object, seen: object) -> Reason:
    message = f"output {output} on rank {rank} has {kind} {seen}, not {expected}"
    return Reason(law, "FAIL", kind, message, rank=rank, node=f"output {output}", expected=str(expected), seen=str(seen))


def equal_outputs(e: Evidence) -> list[Reason]:
    """Every output equals what it was before: for all inputs in the field, and bit for bit on ordinary numbers."""
    return _equal(e, "outputs", "equal_outputs")


def equal_inputs(e: Evidence) -> list[Reason]:
    """Every input holds after the run what it held before the change, so that mutations are neither lost, added nor doubled."""
    return _equal(e, "inputs", "equal_inputs")


def is_proved(e: Evidence) -> bool:
    """Whether all tensors to be compared have equal field halves on both sides, so that equality holds for all inputs."""
    return all(
        old.field_digest is not None and old.field_digest == new.field_digest
        for kind in ("outputs", "inputs")
        for _, _, old, new in _pairs(e, kind)
    )


def _equal(e: Evidence, which: str, law: str) -> list[Reason]:
    poisoned = _poisoned(e, which)
    field_only: list[Reason] = []
    for rank, i, old, new in _pairs(e, which):
        if old.dtype != new.dtype or old.shape != new.shape:
            continue
        name = f"{which[:-1]} {i}"
        field_differs = None not in (old.field_digest, new.field_digest) and old.field_digest != new.field_digest
        bits_differ = old.digest != new.digest
        where, expected, seen, num = "", None, None, 0
        if bits_differ and old.data is not None and new.data is not None:
            difference = first_difference(old, new)
            bits_differ = difference is not None
            if difference is not None:
                where, num = str(list(difference.place)), difference.num_elements
                expected, seen = repr(difference.expected), repr(difference.seen)
            if not e.is_ordered and is_rounding(old, new, named_dtypes(e.program)):
                continue
        if bits_differ:
            kind = "poison" if (rank, i) in poisoned else "values" if field_differs or old.field_digest is None or new.field_digest is None else "reassociated"
            why = {
                "poison": "depends on memory that nobody wrote",
                "values": "differs",
                "reassociated": "is the same real function but not bit for bit",
            }[kind]
            at = f", first at {where}: expected {expected}, seen {seen} ({num} elements differ)" if where else ""
            return [
                Reason(law, "FAIL", kind, f"{name} on rank {rank} {why}{at}", rank=rank, node=name, index=where or None, expected=expected, seen=seen, allowed="bitwise equal", detail=_by_layout(e, which, i))
            ]
        if field_differs and not field_only:
            kind = "poison" if (rank, i) in poisoned else "field"
            status = "FAIL" if e.is_exact or kind == "poison" else "PASS"
            message = f"{name} on rank {rank} is another function of the inputs, though equal on the numbers tried"
            field_only.append(Reason(law, status, kind, message, rank=rank, node=name, allowed="equal for all inputs", detail=_by_layout(e, which, i)))  # type: ignore[arg-type]
    return [r for r in field_only if r.status == "FAIL"]


def _by_layout(e: Evidence, which: str, number: int) -> str:
    """The operators above a tensor that depend on where in its storage an operand lies: such faults are of a kind of their own."""
    num_inputs = len(e.program.inputs)
    refs = [Ref(i) for i in range(num_inputs)] if which == "inputs" else e.program.outputs
    if number >= len(refs):
        return ""
    stack, seen, found = [refs[number].value], set(), set()
    while stack:
        value = stack.pop()
        if value < num_inputs or value in seen:
            continue
        seen.add(value)
        op = e.program.ops[value - num_inputs]
        if op.target in _LAYOUT_DEPENDENT:
            found.add(op.target)
        for arg in (*op.args, *op.kwargs.values()):
            stack.extend(item.value for item in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(item, Ref))
    return " ".join(sorted(found))


def _poisoned(e: Evidence, which: str) -> set[tuple[int, int]]:
    """The (rank, number) of tensors that changed when only unwritten memory did."""
    if e.after_again is None or not e.after:
        return set()
    found = set()
    for rank, (one, two) in enumerate(_ranks(e.after[0], e.after_again)):
        for i, (a, b) in enumerate(zip(getattr(one, which), getattr(two, which), strict=False)):
            if a.field_digest != b.field_digest:
                found.add((rank, i))
    return found


def _ranks(before: Outcome, after: Outcome) -> Iterator[tuple[RankOutcome, RankOutcome]]:
    return zip(before.ranks, after.ranks, strict=True)


def _pairs(e: Evidence, which: str) -> Iterator[tuple[int, int, TensorRecord, TensorRecord]]:
    for before, after in zip(e.before, e.after, strict=True):
        for rank, (old, new) in enumerate(_ranks(before, after)):
            if old.error is None and new.error is None:
                for i, pair in enumerate(zip(getattr(old, which), getattr(new, which), strict=False)):
                    yield rank, i, *pair
