"""Is a compiled program with a backward what eager is? Stage by stage: values, gradients, connectivity, aliases, versions; and its joint graph by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from harness.oracles.numerics import first_difference, is_rounding
from harness.spec.outcome import Counters, JointRecord, RankOutcome, Stage, TensorRecord
from harness.spec.verdict import Reason, first_line, normalise_message

__all__ = ["MUTATION_LAWS", "MutationLaw", "Runs"]

_STALE: Final = ("modified by an inplace operation", "is being modified inplace", "has been modified inplace")
_INEXACT: Final = ("float32",)


class Runs(NamedTuple):
    """One call of a program, eager and compiled.

    Attributes:
        eager, compiled: what was seen.
        num_graphs: how many graphs the compiler made until then.
        joint: the joint graph that the compiler made, where it shows one.
        expected: the same by our model: counters of all inputs, and the copies in their halves.
    """

    eager: RankOutcome
    compiled: RankOutcome
    num_graphs: int = 1
    joint: JointRecord | None = None
    expected: JointRecord | None = None


MutationLaw = Callable[[Runs], list[Reason]]


def runs(r: Runs) -> list[Reason]:
    """What eager runs to its end, compiled runs to its end."""
    error = r.compiled.error
    if r.eager.error is not None or error is None:
        return []
    message = f"raises {error.type} in {error.node}: {first_line(error.message)}"
    return [_reason("runs", error.type, message, error.node, "no error", error.message)]


def refuses(r: Runs) -> list[Reason]:
    """What eager refuses, compiled refuses, at whichever stage. Stale saved tensors: see ``refuses_stale``."""
    error = r.eager.error
    if error is None or r.compiled.error is not None or _is_stale_accepted(r):
        return []
    message = f"runs, where eager raises {error.type} in {error.node}: {first_line(error.message)}"
    return [_reason("refuses", "not_refused", message, error.node, error.message, "no error", normalise_message(error.message))]


def refuses_stale(r: Runs) -> list[Reason]:
    """Where eager refuses because a saved tensor, or the base of a view, was written since, compiled refuses it too.

    Nothing promises it of a write inside the compiled graph: functionalised, the saved value is another than the written one, and its
    gradient the right one of the program as it stands. Writes outside are caught through ``versions_advance``.
    """
    if not _is_stale_accepted(r):
        return []
    assert r.eager.error is not None
    return [_reason("refuses_stale", "not_refused", f"runs, where eager raises in {r.eager.error.node}: {first_line(r.eager.error.message)}", r.eager.error.node, r.eager.error.message, "no error")]


def _is_stale_accepted(r: Runs) -> bool:
    return r.compiled.error is None and r.eager.error is not None and any(text in r.eager.error.message for text in _STALE)


def equal_outputs(r: Runs) -> list[Reason]:
    """Every output holds after every stage what it holds in eager."""
    return _equal(r, "outputs", "equal_outputs")


def equal_inputs(r: Runs) -> list[Reason]:
    """Every input holds after every stage what it holds in eager: no mutation is lost, doubled, or made in the other half."""
    return _equal(r, "inputs", "equal_inputs")


def equal_grads(r: Runs) -> list[Reason]:
    """Every leaf has the gradient that it has in eager, and none where it has none."""
    for stage, eager, compiled in _stages(r):
        for i, (old, new) in enumerate(zip(eager.grads, compiled.grads, strict=False)):
            name = f"gradient of input {i}"
            if (old is None) != (new is None):
                kind = "missing" if new is None else "zeros_for_none" if _is_zero(new) else "extra"
                expected, seen = ("no gradient" if t is None else f"{t.dtype}{list(t.shape)}" for t in (old, new))
                return [_reason("equal_grads", kind, f"{name} after {stage}: {seen}, where eager has {expected}", name, expected, seen)]
            if old is not None and new is not None:
                if (old.dtype, old.shape) != (new.dtype, new.shape):
                    expected, seen = f"{old.dtype}{list(old.shape)}", f"{new.dtype}{list(new.shape)}"
                    return [_reason("equal_grads", "metadata", f"{name} after {stage} is {seen}, not {expected}", name, expected, seen)]
                if found := _differs("equal_grads", name, stage, old, new):
                    return [found]
    return []


def grad_output_kept(r: Runs) -> list[Reason]:
    """The gradients that a caller hands to backward hold afterwards what they hold in eager, also where a function writes to them."""
    return _equal(r, "seeds", "grad_output_kept")


def equal_metadata(r: Runs) -> list[Reason]:
    """There are as many outputs as in eager, each of the same dtype and shape."""
    for stage, eager, compiled in _stages(r):
        if len(eager.outputs) != len(compiled.outputs):
            expected, seen = str(len(eager.outputs)), str(len(compiled.outputs))
            return [_reason("equal_metadata", "num_outputs", f"{seen} outputs, not {expected}", None, expected, seen)]
        for name, old, new in _tensors(eager, compiled):
            for kind, expected, seen in (("dtype", old.dtype, new.dtype), ("shape", str(old.shape), str(new.shape))):
                if expected != seen:
                    return [_reason("equal_metadata", kind, f"{name} after {stage} has {kind} {seen}, not {expected}", name, expected, seen)]
    return []


def equal_strides(r: Runs) -> list[Reason]:
    """Every input and output has the strides that it has in eager."""
    for stage, eager, compiled in _stages(r):
        for name, old, new in _tensors(eager, compiled):
            if old.shape == new.shape and old.significant_stride != new.significant_stride:
                return [_reason("equal_strides", "stride", f"{name} after {stage} has stride {new.stride}, not {old.stride}", name, str(old.stride), str(new.stride))]
    return []


def same_connectivity(r: Runs) -> list[Reason]:
    """Inputs and outputs require grad, and have a ``grad_fn``, where they do in eager."""
    for stage, eager, compiled in _stages(r):
        for name, old, new in _tensors(eager, compiled):
            for kind in ("requires_grad", "has_grad_fn"):
                expected, seen = str(getattr(old, kind)), str(getattr(new, kind))
                if expected != seen:
                    return [_reason("same_connectivity", kind, f"{name} after {stage}: {kind} is {seen}, not {expected}", name, expected, seen)]
    return []


def same_aliasing(r: Runs) -> list[Reason]:
    """Inputs and outputs share memory where they do in eager, and nowhere else."""
    for stage, eager, compiled in _stages(r):
        names, old, new = zip(*_tensors(eager, compiled), strict=True) if eager.inputs or eager.outputs else ((), (), ())
        for j in range(len(names)):
            for i in range(j):
                if not (old[i].storage_bytes and old[j].storage_bytes and new[i].storage_bytes and new[j].storage_bytes):
                    continue
                was, now = old[i].storage == old[j].storage, new[i].storage == new[j].storage
                if was != now:
                    kind = "shared" if now else "parted"
                    verb = "share" if now else "do not share"
                    return [_reason("same_aliasing", kind, f"{names[i]} and {names[j]} {verb} memory after {stage}", names[j], str(was), str(now), _roles(names[i], names[j]))]
    return []


def versions_advance(r: Runs) -> list[Reason]:
    """The version counter of every input advances where it does in eager, so that stale saved tensors are still caught."""
    for stage, eager, compiled in _stages(r):
        for i, (old, new) in enumerate(zip(eager.inputs, compiled.inputs, strict=True)):
            if old.version and not new.version:
                return [_reason("versions_advance", "kept", f"input {i} has version +0 after {stage}, eager +{old.version}", f"input {i}", str(old.version), "0")]
    return []


def versions_equal(r: Runs) -> list[Reason]:
    """Version counters advance by as much as in eager: nothing promises it."""
    for stage, eager, compiled in _stages(r):
        for i, (old, new) in enumerate(zip(eager.inputs, compiled.inputs, strict=True)):
            if old.version != new.version:
                return [_reason("versions_equal", "amount", f"input {i} has version +{new.version} after {stage}, eager +{old.version}", f"input {i}", str(old.version), str(new.version))]
    return []


def one_graph(r: Runs) -> list[Reason]:
    """The whole program is one graph of the compiler: no graph break, and nothing ran eagerly for want of a graph."""
    if r.compiled.error is not None or r.num_graphs == 1:
        return []
    return [_reason("one_graph", "num_graphs", f"{r.num_graphs} graphs were compiled", None, "1", str(r.num_graphs))]


def counters_agree(r: Runs) -> list[Reason]:
    """The counters that are noted for an input after forward and after backward are those of our model."""
    if r.joint is None or r.expected is None or not r.joint.after_forward:
        return []
    for i, *noted in zip(r.joint.in_graph, r.joint.after_forward, r.joint.after_backward, strict=True):
        expected = r.expected.after_forward[i], r.expected.after_backward[i]
        for when, old, new in zip(("forward", "backward"), _advances(*expected), _advances(*noted), strict=True):
            if old != new:
                told, seen = (f"{_told(a)}, then {_told(b)}" for a, b in (expected, noted))
                return [_reason("counters_agree", when, f"input {i} has counters {seen} in {when}, the model {told}", f"input {i}", told, seen)]
    return []


def copies_in_their_halves(r: Runs) -> list[Reason]:
    """The epilogue has one copy for each half in which an input was mutated, marked for that half."""
    if r.joint is None or r.expected is None:
        return []
    seen = [c for c in r.joint.copies if c[1] == "backward" or c[0] in r.joint.in_graph]
    expected = [c for c in r.expected.copies if c[1] == "backward" or c[0] in r.joint.in_graph]
    for copy in dict.fromkeys((*expected, *seen)):
        if expected.count(copy) != seen.count(copy):
            number, half = copy
            kind = "lost" if not seen.count(copy) else "extra" if not expected.count(copy) else "doubled"
            message = f"{seen.count(copy)} copies of input {number} in {half or 'no'} half, the model has {expected.count(copy)}"
            return [_reason("copies_in_their_halves", kind, message, f"input {number}", str(expected), str(seen))]
    return []


def functional_until_epilogue(r: Runs) -> list[Reason]:
    """The joint graph writes nothing but its inputs, at its end."""
    if r.joint is None or not r.joint.stray:
        return []
    return [_reason("functional_until_epilogue", "stray", f"{r.joint.stray[0]} writes an intermediate", None, "no mutation", r.joint.stray[0])]


MUTATION_LAWS: Final[Mapping[str, MutationLaw]] = {
    law.__name__: law
    for law in (
        runs,
        refuses,
        refuses_stale,
        equal_outputs,
        equal_inputs,
        equal_grads,
        grad_output_kept,
        equal_metadata,
        equal_strides,
        same_connectivity,
        same_aliasing,
        versions_advance,
        versions_equal,
        one_graph,
        counters_agree,
        copies_in_their_halves,
        functional_until_epilogue,
    )
}
"""The laws of the feature ``mutation``, by name."""


def _stages(r: Runs) -> Iterator[tuple[str, Stage, Stage]]:
    """The stages that both runs reached."""
    for eager, compiled in zip(r.eager.stages, r.compiled.stages, strict=False):
        yield eager.name, eager, compiled


def _tensors(eager: Stage, compiled: Stage) -> Iterator[tuple[str, TensorRecord, TensorRecord]]:
    for which in ("inputs", "outputs"):
        for i, (old, new) in enumerate(zip(getattr(eager, which), getattr(compiled, which), strict=False)):
            yield f"{which[:-1]} {i}", old, new


def _equal(r: Runs, which: str, law: str) -> list[Reason]:
    for stage, eager, compiled in _stages(r):
        for i, (old, new) in enumerate(zip(getattr(eager, which), getattr(compiled, which), strict=False)):
            if (old.dtype, old.shape) == (new.dtype, new.shape) and (found := _differs(law, f"{which[:-1]} {i}", stage, old, new)):
                return [found]
    return []


def _differs(law: str, name: str, stage: str, old: TensorRecord, new: TensorRecord) -> Reason | None:
    """How two tensors of one dtype and shape differ by more than rounding."""
    if old.digest == new.digest:
        return None
    if len(old.data or b"") != len(new.data or b""):
        sizes = f"{old.storage_bytes} bytes", f"{new.storage_bytes} bytes"
        return _reason(law, "storage_size", f"{name} after {stage} has a storage of {sizes[1]}, not {sizes[0]}", name, *sizes)
    difference = first_difference(old, new)
    if difference is None or is_rounding(old, new, _INEXACT):
        return None
    at, expected, seen = str(list(difference.place)), repr(difference.expected), repr(difference.seen)
    message = f"{name} differs after {stage}, first at {at}: expected {expected}, seen {seen} ({difference.num_elements} elements differ)"
    return Reason(law, "FAIL", "values", message, node=name, index=at, expected=expected, seen=seen, allowed="rounding", detail=_kind_of(stage))


def _kind_of(stage: str) -> str:
    return stage.rstrip(" 0123456789")


def _reason(law: str, kind: str, message: str, node: str | None, expected: str, seen: str, detail: str = "") -> Reason:
    return Reason(law, "FAIL", kind, message, node=node, expected=expected, seen=seen, detail=detail)


def _roles(one: str, other: str) -> str:
    return " and ".join(sorted(name.split()[0] for name in (one, other)))


def _advances(forward: Counters, backward: Counters) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which counters advanced in forward, and which in backward."""
    first, last = ((c.data, c.storage, c.resize) for c in (forward, backward))
    return tuple(f > 0 for f in first), tuple(b > f for f, b in zip(first, last, strict=True))


def _told(counters: Counters) -> str:
    return f"data {counters.data}, storage {counters.storage}, resize {counters.resize}"


def _is_zero(record: TensorRecord) -> bool:
    return record.data is not None and not any(record.data)
