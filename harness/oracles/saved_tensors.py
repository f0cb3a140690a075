"""Are inlined saved tensor hooks what hooks are? The tensors they are applied to, what is held until backward, the values, and what they leave behind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from harness.oracles.mutation import MUTATION_LAWS, Runs
from harness.spec.dtypes import DTYPES
from harness.spec.outcome import RankOutcome, TensorRecord
from harness.spec.saved_hooks import Traits
from harness.spec.verdict import Reason, normalise_message

__all__ = ["SAVED_TENSOR_LAWS", "After", "HookLaw", "HookRuns", "Slot"]

_WORTH_IT: Final = 8


class Slot(NamedTuple):
    """A tensor that forward saves."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class After(NamedTuple):
    """A third call of the same compiled function, with other hooks.

    Attributes:
        then: with which, see ``harness.subjects.saved_tensors``.
        expected, compiled: what it is to be, and what was seen.
        num_graphs: how many graphs it added.
        num_packs: how often pack was called on a real tensor; with ``plain`` hooks, how often the model says so is ``num_expected``.
    """

    then: str
    expected: RankOutcome
    compiled: RankOutcome
    num_graphs: int
    num_packs: int
    num_expected: int | None


class HookRuns(NamedTuple):
    """Two calls of a program with hooks, eager and compiled.

    Attributes:
        traits: of the innermost pair.
        is_inlined: whether it was given as graph modules.
        mode: of filtering.
        eager, compiled: what was seen, one a call; eager has plain hooks.
        num_graphs: compiled until the end of each call.
        num_hooked: the saved tensors that the model selects; ``num_filled``: those of them that have elements.
        before: the tensors that forward saves without hooks; ``plain_bytes``: of their storages.
        expected: the tensors that it saves by the model; ``expected_bytes``: of their storages.
        inlined: the tensors that the graph saves after inlining; None where there is no such graph.
        held: the tensors that autograd holds between forward and backward, one entry a call; None where hooks ran at that time; ``held_bytes``: of their storages.
        modelled, replayed: results and gradients of the graph with pack and unpack between its halves, and of the graph after inlining, on the same inputs; ``broken``: what the latter raised.
        packs, unpacks: how often they were called on real tensors, one entry a call.
        num_backward: how often backward ran.
        left: what was left set when a call was over.
        after: a third call, with other hooks.
    """

    traits: Traits
    is_inlined: bool
    mode: str
    eager: tuple[RankOutcome, ...]
    compiled: tuple[RankOutcome, ...]
    num_graphs: tuple[int, ...] = ()
    num_hooked: int = 0
    num_filled: int = 0
    before: tuple[Slot, ...] = ()
    plain_bytes: int = 0
    expected: tuple[Slot, ...] = ()
    expected_bytes: int = 0
    inlined: tuple[Slot, ...] | None = None
    held: tuple[tuple[Slot, ...] | None, ...] = ()
    held_bytes: tuple[int, ...] = ()
    modelled: tuple[TensorRecord | None, ...] = ()
    replayed: tuple[TensorRecord | None, ...] = ()
    broken: str | None = None
    packs: tuple[int, ...] = ()
    unpacks: tuple[int, ...] = ()
    num_backward: int = 1
    left: str | None = None
    after: After | None = None


HookLaw = Callable[[HookRuns], list[Reason]]


def runs(r: HookRuns) -> list[Reason]:
    """What eager runs to its end, compiled runs to its end; pairs that raise on purpose: see ``raises_alike``."""
    return [] if r.traits.raises else _of_calls(r, "runs")


def raises_alike(r: HookRuns) -> list[Reason]:
    """A pair that raises does so in the same stage as in eager with the same exception, wherever the model applies it to a tensor with elements, and nowhere else."""
    error = r.compiled[0].error
    if r.traits.raises is None:
        return []
    stage = "forward" if r.traits.raises == "pack" else "backward 1"
    expected = f"RuntimeError in {stage}: no {r.traits.raises}" if r.num_filled and (stage == "forward" or r.num_backward) else "no error"
    seen = "no error" if error is None else f"{error.type} in {error.node}: {error.message.strip().splitlines()[0] if error.message.strip() else ''}"
    if expected == seen:
        return []
    kind = "not_raised" if error is None else "raised" if expected == "no error" else "other_error"
    return [_reason("raises_alike", kind, f"a pair that raises in {r.traits.raises}: {seen}, not {expected}", expected, seen, normalise_message(seen))]


def equal_outputs(r: HookRuns) -> list[Reason]:
    """Hooks change no output: each holds what it holds in eager."""
    return _of_calls(r, "equal_outputs")


def equal_inputs(r: HookRuns) -> list[Reason]:
    """Hooks change no input."""
    return _of_calls(r, "equal_inputs")


def equal_grads(r: HookRuns) -> list[Reason]:
    """With a lossless pair every leaf has the gradient that it has in eager; with others, eager saves other tensors than a partitioner, and so rightly differs."""
    return _of_calls(r, "equal_grads") if r.traits.is_lossless else []


def equal_metadata(r: HookRuns) -> list[Reason]:
    """Hooks change no dtype and no shape of an output."""
    return _of_calls(r, "equal_metadata")


def equal_inlined(r: HookRuns) -> list[Reason]:
    """The graph after inlining gives, bit by bit, what the graph before gives with pack and unpack called between its halves."""
    if r.broken is not None:
        return [_reason("equal_inlined", "raises", f"the graph after inlining raises {r.broken}", "no error", r.broken, normalise_message(r.broken))]
    if len(r.modelled) != len(r.replayed):
        return [_reason("equal_inlined", "num_results", f"{len(r.replayed)} results and gradients, not {len(r.modelled)}", str(len(r.modelled)), str(len(r.replayed)))]
    for number, (old, new) in enumerate(zip(r.modelled, r.replayed, strict=True)):
        expected, seen = (None if t is None else (t.dtype, t.shape, t.digest) for t in (old, new))
        if expected != seen:
            return [_reason("equal_inlined", "values", f"result {number} of the two halves differs from that with the hooks called", str(expected), str(seen))]
    return []


def packed_as_modelled(r: HookRuns) -> list[Reason]:
    """The graph after inlining saves the tensors that the model's does, in this order: every selected tensor was packed, once, and no other."""
    if r.inlined is None or r.inlined == r.expected:
        return []
    return [_slots("packed_as_modelled", "the graph saves", r.expected, r.inlined)]


def held_as_modelled(r: HookRuns) -> list[Reason]:
    """Between forward and backward autograd holds the tensors that the model says."""
    for held in r.held:
        if held is not None and held != r.expected:
            return [_slots("held_as_modelled", "autograd holds", r.expected, held)]
    return []


def none_bypasses(r: HookRuns) -> list[Reason]:
    """In mode ``all`` no tensor is held as it was before packing, but where that is what was packed."""
    if r.mode != "all":
        return []
    for held in (*r.held, r.inlined):
        extra = Counter(held or ()) - Counter(r.expected)
        for slot in r.before:
            if extra[slot]:
                return [_reason("none_bypasses", "unpacked", f"{slot} is held as it was before packing", str(Counter(r.expected)[slot]), str(Counter(held)[slot]))]
    return []


def calls_counted(r: HookRuns) -> list[Reason]:
    """Plain hooks: pack is called once a forward on every saved tensor, unpack as often in each backward. Inlined ones are part of the graph and not called, or as often as the model says."""
    counts = {"pack": (r.packs, 1), "unpack": (r.unpacks, r.num_backward)}
    for half, (seen, times) in counts.items():
        for number, count in enumerate(seen):
            outcome = r.compiled[number]
            allowed = (0, r.num_hooked * times) if r.is_inlined else (r.num_hooked * times,)
            if outcome.error is None and count not in allowed:
                expected = " or ".join(map(str, allowed))
                return [_reason("calls_counted", half, f"{half} was called {count} times, not {expected}", expected, str(count))]
    return []


def bytes_as_modelled(r: HookRuns) -> list[Reason]:
    """The bytes held between forward and backward are those of the model, and with a pair that compresses fewer than without hooks."""
    found = []
    for seen in r.held_bytes[:1]:
        if seen != r.expected_bytes:
            found.append(_reason("bytes_as_modelled", "amount", f"{seen} bytes are held, not {r.expected_bytes}", str(r.expected_bytes), str(seen)))
        if seen >= r.plain_bytes and _compresses(r):
            found.append(_reason("bytes_as_modelled", "not_lower", f"{seen} bytes are held, without hooks {r.plain_bytes}", f"less than {r.plain_bytes}", str(seen)))
    return found


def _compresses(r: HookRuns) -> bool:
    """Whether every saved tensor is hooked and has memory of its own, and those that the pair acts on are not too small for it."""
    acted_on = [slot.num_elements for slot in r.before if slot.dtype in (r.traits.dtypes or ())]
    own_bytes = sum(slot.num_elements * DTYPES[slot.dtype].itemsize for slot in r.before)
    return r.traits.is_compressing and r.num_hooked == len(r.before) and r.plain_bytes == own_bytes and min(acted_on, default=0) >= _WORTH_IT


def nothing_left(r: HookRuns) -> list[Reason]:
    """When a call is over, by an error too, no hook is set and hooks are not disabled."""
    return [] if r.left is None else [_reason("nothing_left", "left", f"after a call: {r.left}", "nothing", r.left)]


def keyed(r: HookRuns) -> list[Reason]:
    """Another call with the same hooks makes no new graph; with other hooks it makes one."""
    if len(r.num_graphs) > 1 and r.num_graphs[1] != r.num_graphs[0]:
        return [_reason("keyed", "recompiled", f"the second call with the same hooks made {r.num_graphs[1] - r.num_graphs[0]} graphs", "0", str(r.num_graphs[1] - r.num_graphs[0]))]
    if r.after is not None and r.is_inlined and r.after.num_graphs != 1 and r.after.compiled.error is None:
        return [_reason("keyed", f"stale_{r.after.then}", f"{r.after.num_graphs} graphs were made for {r.after.then} hooks after others", "1", str(r.after.num_graphs))]
    return []


def equal_plain(r: HookRuns) -> list[Reason]:
    """The same compiled program with the same hooks as plain functions, called on the tensors that the mode selects, has bit by bit the same gradients."""
    if r.after is None or r.after.then != "plain" or r.after.compiled.error is not None:
        return []
    for inlined, plain in zip(r.compiled[0].stages, r.after.compiled.stages, strict=False):
        for number, (old, new) in enumerate(zip(inlined.grads, plain.grads, strict=True)):
            expected, seen = (None if t is None else t.digest for t in (new, old))
            if expected != seen:
                return [_reason("equal_plain", "values", f"gradient of input {number} after {plain.name} is another than with plain hooks", str(expected), str(seen))]
    return []


def equal_after(r: HookRuns) -> list[Reason]:
    """Hooks do not leak: the third call, without hooks or with others, is what eager is without or with those, in its own thread too."""
    after = r.after
    if after is None:
        return []
    if after.num_expected is not None and after.compiled.error is None and after.num_packs != after.num_expected:
        return [_reason("equal_after", "num_packs", f"with {after.then} hooks pack was called {after.num_packs} times, not {after.num_expected}", str(after.num_expected), str(after.num_packs))]
    if after.then == "plain":
        return []
    for law in ("runs", "equal_outputs", "equal_grads"):
        if found := MUTATION_LAWS[law](Runs(after.expected, after.compiled)):
            return [_renamed(found[0], "equal_after", f"{after.then} {found[0].detail}".strip())]
    return []


SAVED_TENSOR_LAWS: Final[Mapping[str, HookLaw]] = {
    law.__name__: law
    for law in (
        runs,
        raises_alike,
        equal_outputs,
        equal_inputs,
        equal_grads,
        equal_metadata,
        equal_inlined,
        packed_as_modelled,
        held_as_modelled,
        none_bypasses,
        calls_counted,
        bytes_as_modelled,
        nothing_left,
        keyed,
        equal_plain,
        equal_after,
    )
}
"""The laws of the feature ``saved_tensors``, by name."""


def _of_calls(r: HookRuns, law: str) -> list[Reason]:
    """What a law of the feature ``mutation`` says of the first call that breaks it."""
    for number, (eager, compiled) in enumerate(zip(r.eager, r.compiled, strict=False)):
        if found := MUTATION_LAWS[law](Runs(eager, compiled)):
            return [_renamed(f, law, f"{f.detail} second call".strip()) for f in found] if number else found
    return []


def _renamed(reason: Reason, law: str, detail: str) -> Reason:
    return Reason(law, reason.status, reason.kind, reason.message, reason.rank, reason.node, reason.index, reason.expected, reason.seen, reason.allowed, detail)


def _slots(law: str, what: str, expected: tuple[Slot, ...], seen: tuple[Slot, ...]) -> Reason:
    lost, extra = Counter(expected) - Counter(seen), Counter(seen) - Counter(expected)
    kind = "other" if lost and extra else "missing" if lost else "extra" if extra else "order"
    old, new = (", ".join(map(str, slots)) or "nothing" for slots in (expected, seen))
    return _reason(law, kind, f"{what} {new}; the model says {old}", old, new)


def _reason(law: str, kind: str, message: str, expected: str, seen: str, detail: str = "") -> Reason:
    return Reason(law, "FAIL", kind, message, expected=expected, seen=seen, detail=detail)
