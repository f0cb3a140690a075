"""The same judgement on programs with saved tensor hooks: eager with plain hooks against a compiler that inlines them, and its graphs against our model."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from harness.executors.autograd import Case, case_of_program, run_case
from harness.executors.record import record
from harness.graph.private import private
from harness.graph.saved_hooks import PAIRS, Pair, graph_modules, hooks_around, named
from harness.on_autograd import refusal_of
from harness.on_ranks import undecided
from harness.oracles.saved_tensors import SAVED_TENSOR_LAWS, After, HookLaw, HookRuns, Slot
from harness.reference.saved_tensors import Halves, Saved, results, saved_nodes, saved_tensors
from harness.spec.outcome import RankOutcome, TensorRecord
from harness.spec.program import Program
from harness.spec.protocols import Clock
from harness.spec.verdict import Verdict
from harness.subjects.saved_tensors import HookBackend

__all__ = ["check_saved_tensors"]

_NUM_CALLS: Final = 2
_OTHER: Final = ("clone", "halves")
_SEED: Final = 2


def check_saved_tensors(case: Case | Program, subject: HookBackend, *, seed: int = 0, clock: Clock, laws: Mapping[str, HookLaw] = SAVED_TENSOR_LAWS) -> Verdict:
    """Judge what ``subject`` makes of a program with saved tensor hooks.

    Eager has the hooks as plain functions. The compiled form is called twice with the hooks as graph modules, where the pair has that form, and then as ``subject.then`` says.

    Args:
        case: valid, with hooks.
        subject: with the setting to test.
        seed: of the inputs.
        clock: measures the phases ``build``, ``pass`` and ``judge``; compiling and the compiled run are one, ``pass``.
        laws: by name; those that the subject promises make the verdict, others become notes.

    Returns:
        FAIL with every promised law that broke; INCONCLUSIVE where the subject refuses what is documented as unsupported; else PASS,
        ``tested``. ``num_fired`` is the number of saved tensors that hooks are applied to.
    """
    if isinstance(case, Program):
        outside = subject.refuses(case)
        if outside is not None:
            return undecided("outside_contract", outside)
        case = case_of_program(case, seed=seed)
    if not case.autograd.saved_hooks:
        return undecided("outside_contract", "a program without saved tensor hooks")
    pairs = named(case.autograd.saved_hooks)
    with clock.phase("build"):
        eager = run_case(case, num_calls=_NUM_CALLS, around=lambda: hooks_around([(p.pack, p.unpack) for p in pairs]))
    with clock.phase("pass"), subject.session(num_backward=case.autograd.num_backward) as session:
        seen = _compiled(case, pairs, subject, session)
        pairings = session.pairings
    error = next((o.error for o in seen.outcomes if o.error is not None), None)
    if error is not None and refusal_of(error) is not None:
        return undecided("refused", error.message.strip().splitlines()[0])
    with clock.phase("judge"):
        found = _judged(case, pairs[-1], subject, eager, seen, pairings)
        said = {name: law(found) for name, law in laws.items()}
    reasons = tuple(r for name, all_found in said.items() if name in subject.promises for r in all_found)
    notes = tuple(r for name, all_found in said.items() if name not in subject.promises for r in all_found)
    return Verdict("FAIL" if reasons else "PASS", reasons, strength=None if reasons else "tested", num_fired=found.num_hooked, notes=notes, num_trials=len(seen.outcomes))


class _Observed:
    """A pair that counts its calls on real tensors; calls while a compiler traces it do not count.

    ``selected``: the numbers of the calls of pack, within one forward, that are packed; others leave the tensor as it is. None: all.
    """

    def __init__(self, pair: Pair) -> None:
        self.num_packs = 0
        self.num_unpacks = 0
        self.selected: Callable[[], frozenset[int]] | None = None
        self.pair = pair._replace(pack=self.pack, unpack=self.unpack)
        self._own = pair

    def pack(self, tensor: Tensor, *more: Any) -> Any:
        if not _is_real(tensor):
            return self._own.pack(tensor, *more)
        self.num_packs += 1
        if self.selected is None:
            return self._own.pack(tensor, *more)
        number = self.num_packs - 1
        return ("packed", self._own.pack(tensor, *more)) if number in self.selected() else ("left", tensor)

    def unpack(self, value: Any, *more: Any) -> Tensor:
        self.num_unpacks += all(_is_real(t) for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
        if self.selected is None:
            return self._own.unpack(value, *more)
        how, packed = value
        return packed if how == "left" else self._own.unpack(packed, *more)

    def counts(self) -> tuple[int, int]:
        """How often each was called since the last time this was asked."""
        found = self.num_packs, self.num_unpacks
        self.num_packs = self.num_unpacks = 0
        return found


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


class _Seen(NamedTuple):
    """What was seen of the compiled calls, one entry each."""

    outcomes: list[RankOutcome]
    num_graphs: list[int]
    counts: list[tuple[int, int]]
    held: list[tuple[tuple[Slot, ...], int] | None]
    left: str | None


def _compiled(case: Case, pairs: Sequence[Pair], subject: HookBackend, session: Any) -> _Seen:
    innermost = _Observed(pairs[-1])
    with_hooks = [_hooks_of(p) for p in (*pairs[:-1], innermost.pair)]
    hooks = [with_hooks] * _NUM_CALLS
    last = _Observed(pairs[-1])
    if subject.then == "plain":
        hooks.append([(last.pack, last.unpack)])
        last.selected = lambda: _positions(session.pairings[0].before, subject.mode, pairs[-1])
    elif subject.then == "other":
        last = _Observed(_other(pairs[-1]))
        hooks.append([_hooks_of(last.pair)])
    elif subject.then != "nothing":
        hooks.append([] if subject.then == "bare" else with_hooks)
    seen = _Seen([], [], [], [], None)
    left: list[str] = []

    def around() -> AbstractContextManager[None]:
        return hooks_around(hooks[len(seen.num_graphs)])

    def after_forward(roots: Sequence[Tensor]) -> None:
        number = len(seen.num_graphs)
        seen.held.append(_held(roots) if number < _NUM_CALLS and pairs[-1].traits.is_inlineable else None)

    def after_call() -> None:
        observed = innermost if len(seen.num_graphs) < _NUM_CALLS or subject.then in ("bare", "thread") else last
        seen.num_graphs.append(session.num_graphs)
        seen.counts.append(observed.counts())
        left.extend(_left())

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled = session.wrap(fn)
        if subject.then != "thread":
            return compiled
        return lambda *args: _in_thread(compiled, args) if len(seen.num_graphs) == _NUM_CALLS else compiled(*args)

    outcomes = run_case(case, wrap, num_calls=len(hooks), after_call=after_call, around=around, after_forward=after_forward, past_errors=pairs[-1].traits.raises is not None)
    return seen._replace(outcomes=outcomes, left=left[0] if left else None)


def _hooks_of(pair: Pair) -> tuple[Any, Any]:
    return graph_modules(pair) if pair.traits.is_inlineable else (pair.pack, pair.unpack)


def _other(pair: Pair) -> Pair:
    return PAIRS[next(name for name in _OTHER if name != pair.name)]


def _in_thread(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What ``fn`` returns or raises in a thread of its own, under torch's configuration as it is set here."""
    found: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            found.append(context.run(fn, *args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _left() -> Iterator[str]:
    """What is set of saved tensor hooks in this thread; and it is put back, so that it troubles no other case."""
    hooks = private("torch._functorch._aot_autograd.utils", "top_saved_tensors_hooks")()
    if hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        yield "hooks are still set"
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is not None:
        torch._C._autograd._saved_tensors_hooks_enable()
        yield "hooks are still disabled"


def _held(roots: Sequence[Tensor]) -> tuple[tuple[Slot, ...], int]:
    """The tensors that compiled functions save for backward, and the bytes of their storages."""
    nodes: list[Any] = [t.grad_fn for t in roots]
    reached: dict[int, Any] = {}
    while nodes:
        node = nodes.pop()
        if node is not None and id(node) not in reached:
            reached[id(node)] = node
            nodes += [n for n, _ in node.next_functions]
    compiled = [node for node in reached.values() if "CompiledFunction" in type(node).__name__]
    saved = [t for node in compiled for t in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ()))]
    return tuple(_slot(t) for t in saved), _num_bytes(saved)


def _slot(tensor: Tensor) -> Slot:
    return Slot(str(tensor.dtype).removeprefix("torch."), tuple(_number(size) for size in tensor.shape))


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(_number(storage.nbytes()) for storage in storages.values())


def _number(size: Any) -> Any:
    """The value of a symbolic size in the call that was traced."""
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _positions(halves: Halves, mode: str, pair: Pair) -> frozenset[int]:
    return frozenset(i for i, one in enumerate(saved_tensors(halves, mode, pair.pack)) if one.is_hooked)


def _judged(case: Case, pair: Pair, subject: HookBackend, eager: list[RankOutcome], seen: _Seen, pairings: Sequence[Any]) -> HookRuns:
    is_inlined = pair.traits.is_inlineable
    calls = seen.outcomes[:_NUM_CALLS]
    found = HookRuns(
        pair.traits,
        is_inlined,
        subject.mode,
        tuple(eager),
        tuple(calls),
        tuple(seen.num_graphs[:_NUM_CALLS]),
        packs=tuple(c[0] for c in seen.counts[:_NUM_CALLS]),
        unpacks=tuple(c[1] for c in seen.counts[:_NUM_CALLS]),
        num_backward=case.autograd.num_backward,
        left=seen.left,
        after=_after(case, pair, subject, seen, pairings),
    )
    if not pairings:
        return found
    before, after = pairings[0]
    saved = saved_tensors(before, subject.mode if is_inlined else "all", pair.pack)
    packed = [leaf for one in saved for leaf in (one.packed if is_inlined else [one.node.meta["val"]]) if isinstance(leaf, Tensor)]
    hooked = [one for one in saved if one.is_hooked]
    held = [h for h in seen.held[:_NUM_CALLS] if h is not None]
    found = found._replace(
        num_hooked=len(hooked),
        num_filled=sum(_number(one.node.meta["val"].numel()) > 0 for one in hooked),
        before=tuple(_slot(one.node.meta["val"]) for one in saved),
        plain_bytes=_num_bytes([one.node.meta["val"] for one in saved]),
        expected=tuple(map(_slot, packed)),
        expected_bytes=_num_bytes(packed),
        held=tuple(slots for slots, _ in held),
        held_bytes=tuple(num_bytes for _, num_bytes in held),
    )
    if after is None:
        return found
    found = found._replace(inlined=tuple(_slot(n.meta["val"]) for n in saved_nodes(after)))
    if pair.traits.raises is not None or not is_inlined:
        return found
    modelled = _replayed(before, before, saved, pair)
    try:
        return found._replace(modelled=modelled, replayed=_replayed(before, after, saved, None))
    except Exception as error:
        return found._replace(broken=f"{type(error).__name__}: {error}".strip().splitlines()[0])


def _after(case: Case, pair: Pair, subject: HookBackend, seen: _Seen, pairings: Sequence[Any]) -> After | None:
    """The third call; it is compared with eager without hooks, for those of ``_OTHER`` are lossless."""
    if len(seen.outcomes) <= _NUM_CALLS:
        return None
    num_expected = None
    if subject.then == "plain" and pairings:
        num_expected = len(saved_nodes(pairings[0].before))
    num_graphs = seen.num_graphs[_NUM_CALLS] - seen.num_graphs[_NUM_CALLS - 1]
    return After(subject.then, run_case(case)[0], seen.outcomes[_NUM_CALLS], num_graphs, seen.counts[_NUM_CALLS][0], num_expected)


def _replayed(given: Halves, halves: Halves, saved: Sequence[Saved], pair: Pair | None) -> tuple[TensorRecord | None, ...]:
    """Results and gradients of two halves on random inputs; ``pair``: called between them on the hooked tensors. ``given`` tells the inputs."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs = [_drawn(n.meta["val"], generator) for n in given.forward.graph.find_nodes(op="placeholder")]
    num_saved = len(results(given.forward)) - given.num_outputs
    tangents = [_drawn(n.meta["val"], generator) for n in given.backward.graph.find_nodes(op="placeholder")[num_saved:]]
    with torch.no_grad():
        made = list(halves.forward(*inputs))
        kept = made[halves.num_outputs :]
        tensors, sizes = [k for k in kept if isinstance(k, Tensor)], [k for k in kept if not isinstance(k, Tensor)]
        if pair is not None:
            tensors = [pair.unpack(pair.pack(t)) if one.is_hooked else t for one, t in zip(saved, tensors, strict=True)]
        grads = list(halves.backward(*sizes, *tensors, *tangents))
        found = [t if isinstance(t, Tensor) else None for t in (*made[: halves.num_outputs], *grads)]
        told = iter(record([], [t for t in found if t is not None], [], with_groups=False)[1])
    return tuple(None if t is None else next(told) for t in found)


def _drawn(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor):
        return _number(value)
    shape = [_number(size) for size in value.shape]
    if value.is_floating_point():
        drawn = torch.randn(shape, generator=generator, dtype=value.dtype)
    else:
        drawn = torch.randint(0, 2, shape, generator=generator).to(value.dtype)
    return torch.empty_strided(shape, [_number(step) for step in value.stride()], dtype=value.dtype).copy_(drawn)
