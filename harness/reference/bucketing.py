"""Collective bucketing: our own model, which is its specification.

A *bucket* is one collective that does the work of several, its *members*. The pass has two halves.

**Deciding** (``plan_buckets``) looks at rank-independent facts only (order, kinds, groups, dtypes, sizes, dependencies), so that all
ranks decide alike. Collectives of one *key* - kind, group, group size, reduce op, dtype - that stand next to each other in the
order of their kind on their group form a *run*. Within a run members are taken greedily; a collective starts a new bucket where

1. it depends on a member: there is a path from a member to it, through arguments, through memory that one node writes and another
   touches, through the order of collectives on any group, or through another bucket;
2. what a member reads is written before it, so that the member cannot move there;
3. the bucket would exceed its cap.

A collective with several waits, or one that is returned besides its wait, is bucketed all the same: all become the bucket's result.
A run ends at a collective of the same group and kind with another key, since bucketing across it would change the order on the wire;
with ``preserve_cross_kind`` also at one of another kind.

Both halves repeat until nothing changes, so that a second application finds nothing to do: copy-in has taken a bucket's input out of
the way of later writes, which may let it grow.

**Rewriting** (``_merge``) replaces the members of a bucket by: copy-in, one collective, a wait, copy-out. The bucket stands where its last
member stood; its wait stands right behind; users in between move behind it (stable topological sort). What replaces a member's result
is a tensor with a storage of its own, of the dtype, shape and strides of the original.

Modes:

``default``
    copy-in by flatten and concatenate, one collective, copy-out by narrow and clone.
``custom_ops``
    the packing operators that the installed torch registers (``bucketing::_pre_bucket_all_gather``, ``_pre_bucket_reduce_scatter``).
``custom_ops_multidtype``
    all_gathers of several dtypes share a bucket of bytes. Members are laid out by descending item size and each rank's chunk is padded to a
    multiple of the largest, so that every member starts at a multiple of its item size whatever the numbers of elements are.
``coalesced``
    the coalesced collectives, which need neither copy-in nor copy-out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal, get_args

import torch
from torch.fx import Graph, GraphModule, Node

from harness.graph import bucket_dtypes, emit, emit_item, group_rank, is_collective, is_wait, start_of, target_name, waits
from harness.ops import TABLE

__all__ = [
    "Bucket",
    "BucketingOptions",
    "BucketingReport",
    "DeclineReason",
    "Declined",
    "bucket_collectives",
    "plan_buckets",
]

Mode = Literal["default", "custom_ops", "custom_ops_multidtype", "coalesced"]

_C10D: Final = "_c10d_functional."
_KINDS: Final = {
    _C10D + "all_gather_into_tensor.default": "all_gather",
    _C10D + "reduce_scatter_tensor.default": "reduce_scatter",
    _C10D + "all_reduce.default": "all_reduce",
}
_CASTS: Final = ("prims.convert_element_type.default", "aten._to_copy.default")


@dataclass(frozen=True, kw_only=True)
class BucketingOptions:
    """What the pass is to do.

    Attributes:
        kinds: of collectives to bucket.
        mode: see the module's docstring.
        cap_bytes: the greatest size of a bucket, the larger of input and output counted: one number, a function of the bucket's
            index in its run, or None for no cap. A single collective may exceed it.
        fsdp_only: only all_gathers that derive from exactly one placeholder, and reduce_scatters whose waited result
            reaches graph outputs through unary operators alone. all_reduces have no such mark and are left alone.
        merge_casts: a cast in front of an all_gather that nobody else uses becomes part of copy-in (not in ``coalesced``).
        preserve_cross_kind: keep the order between collectives of different kinds on one group too.

    Raises:
        ValueError: an unknown kind or mode, or a cap below 1.
    """

    kinds: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    mode: Mode = "default"
    cap_bytes: Callable[[int], int] | int | None = None
    fsdp_only: bool = False
    merge_casts: bool = True
    preserve_cross_kind: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode {self.mode!r}; must be one of {', '.join(get_args(Mode))}")
        unknown = set(self.kinds) - set(_KINDS.values())
        if unknown:
            raise ValueError(f"kinds {sorted(unknown)}; must be of {', '.join(_KINDS.values())}")
        if isinstance(self.cap_bytes, int) and self.cap_bytes < 1:
            raise ValueError(f"cap_bytes {self.cap_bytes}; must be 1 or more")

    def cap(self, index: int) -> float:
        """The cap of the bucket with this index in its run, in bytes."""
        if self.cap_bytes is None:
            return math.inf
        return self.cap_bytes(index) if callable(self.cap_bytes) else self.cap_bytes


class DeclineReason(Enum):
    """Why a collective was not bucketed."""

    KIND_NOT_ASKED_FOR = "its kind is not among those to bucket"
    NOT_FSDP = "it does not look like a collective of FSDP"
    NO_WAIT = "nobody waits for it"
    WAIT_THROUGH_VIEW = "it is waited for through a view of its result"
    RESULT_WRITTEN = "its result is written in place"
    DEPENDS_ON_MEMBER = "it depends on a member of the bucket before it"
    INPUT_WRITTEN = "its input is written between it and the bucket's place"
    OVER_CAP = "the bucket before it is full"
    ONLY_ONE = "no neighbour on its group has the same kind, reduce op and dtype"


@dataclass(frozen=True)
class Declined:
    """A collective that was left as it was: its node's name, and why."""

    node: str
    reason: DeclineReason

    def __str__(self) -> str:
        return f"{self.node} is not bucketed: {self.reason.value}"


@dataclass(frozen=True)
class Bucket:
    """One bucket.

    Attributes:
        members: the names of the collectives' nodes, in their order.
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        group: the group's name.
        size_bytes: the larger of input and output, summed over the members.
    """

    members: tuple[str, ...]
    kind: str
    group: str
    size_bytes: int


@dataclass(frozen=True)
class BucketingReport:
    """What the pass did: every collective of the graph is a member of a bucket or declined."""

    buckets: tuple[Bucket, ...]
    declined: tuple[Declined, ...]


@dataclass(frozen=True)
class _Collective:
    """A collective that may be bucketed; ``reads_at`` is the position where what copy-in reads is read now."""

    node: Node
    kind: str
    group: str
    group_size: int | None
    reduce_op: str | None
    key: tuple[Any, ...]
    size_bytes: int
    position: int
    merges_cast: bool
    reads_at: int

    @property
    def source(self) -> Node:
        """What copy-in reads: the collective's input, or what the cast in front of it was made from."""
        own = _input(self.node)
        return _input(own) if self.merges_cast else own


def bucket_collectives(gm: GraphModule, options: BucketingOptions = BucketingOptions()) -> BucketingReport:
    """Bucket the collectives of ``gm`` in place; the graph is sorted topologically and lints afterwards.

    Must be called with torch.distributed initialised (a fake world will do): copy-in of ``custom_ops`` holds the rank.

    Args:
        gm: a graph of functional collectives with ``meta["val"]`` on every node; each node's value is a tensor, or a list of them.
        options: see there.
    """
    merged: dict[Node, Bucket] = {}
    while True:
        plan, declined = plan_buckets(gm.graph, options)
        for members in plan:
            described = _described(members, merged)
            merged[_merge(gm.graph, members, options)] = described
        if not plan:
            break
        _stable_sort(gm.graph, options.preserve_cross_kind)
    gm.graph.lint()
    gm.recompile()
    made = {node.name for node in merged}
    return BucketingReport(tuple(merged.values()), tuple(d for d in declined if d.node not in made))


def _described(members: list[_Collective], merged: dict[Node, Bucket]) -> Bucket:
    """The bucket for the report; a member that is itself a bucket is taken out of ``merged`` and its members are named instead."""
    names: list[str] = []
    for collective in members:
        inner = merged.pop(collective.node, None)
        names.extend(inner.members if inner else (collective.node.name,))
    return Bucket(tuple(names), members[0].kind, members[0].group, sum(c.size_bytes for c in members))


# Deciding


def plan_buckets(graph: Graph, options: BucketingOptions) -> tuple[list[list[_Collective]], list[Declined]]:
    """Which collectives share a bucket, and why each other one does not."""
    effects = _Effects(graph, options.preserve_cross_kind)
    declined: list[Declined] = []
    buckets: list[list[_Collective]] = []
    for run in _runs(graph, options, effects, declined):
        for bucket in _split(run, options, effects, declined):
            effects.contract([c.node for c in bucket])
            buckets.append(bucket)
    return sorted(buckets, key=lambda bucket: bucket[0].position), declined


def _runs(graph: Graph, options: BucketingOptions, effects: _Effects, declined: list[Declined]) -> list[list[_Collective]]:
    """Runs of neighbouring collectives of one key; one that cannot be bucketed at all ends a run and is declined."""
    open_runs: dict[tuple[str, ...], list[_Collective]] = {}
    finished: list[list[_Collective]] = []
    for node in graph.nodes:
        name = target_name(node) if node.op == "call_function" else ""
        spec = TABLE[name].collective if name in TABLE else None
        if spec is None:
            continue
        group = str(node.args[spec.group])
        place = (group,) if options.preserve_cross_kind else (group, spec.kind)
        reason = _unfit(node, name, options, effects)
        if reason is not None:
            declined.append(Declined(node.name, reason))
            if place in open_runs:
                finished.append(open_runs.pop(place))
            continue
        collective = _describe(node, _KINDS[name], group, options, effects)
        run = open_runs.get(place)
        if run is not None and run[0].key == collective.key:
            run.append(collective)
        else:
            if run is not None:
                finished.append(run)
            open_runs[place] = [collective]
    return [*finished, *open_runs.values()]


def _unfit(node: Node, name: str, options: BucketingOptions, effects: _Effects) -> DeclineReason | None:
    kind = _KINDS.get(name)
    if kind is None or kind not in options.kinds:
        return DeclineReason.KIND_NOT_ASKED_FOR
    own_waits = waits(node)
    if not own_waits:
        return DeclineReason.NO_WAIT
    if any(not is_wait(user) and user.op != "output" for user in node.users):
        return DeclineReason.WAIT_THROUGH_VIEW
    if effects.is_result_written(node):
        return DeclineReason.RESULT_WRITTEN
    if options.fsdp_only and not _is_fsdp(node, kind, own_waits):
        return DeclineReason.NOT_FSDP
    return None


def _is_fsdp(node: Node, kind: str, own_waits: Sequence[Node]) -> bool:
    if kind == "all_gather":
        return _num_placeholders_above(node, at_most=2) == 1
    if kind == "reduce_scatter":
        return all(_flows_to_outputs(wait) for wait in own_waits)
    return False


def _num_placeholders_above(node: Node, *, at_most: int) -> int:
    seen: set[Node] = set()
    stack, found = [*node.all_input_nodes], 0
    while stack and found < at_most:
        above = stack.pop()
        if above in seen:
            continue
        seen.add(above)
        if above.op == "placeholder":
            found += 1
        stack.extend(above.all_input_nodes)
    return found


def _flows_to_outputs(wait: Node) -> bool:
    stack, reached = [wait], False
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                reached = True
            elif len(user.all_input_nodes) != 1:
                return False
            else:
                stack.append(user)
    return reached


def _describe(node: Node, kind: str, group: str, options: BucketingOptions, effects: _Effects) -> _Collective:
    spec = TABLE[target_name(node)].collective
    assert spec is not None
    group_size = None if spec.group_size is None else node.args[spec.group_size]
    reduce_op = None if spec.reduce_op is None else node.args[spec.reduce_op]
    value, own = node.meta["val"], _input(node)
    shares_dtypes = kind == "all_gather" and options.mode == "custom_ops_multidtype"
    key = (kind, group, group_size, reduce_op, None if shares_dtypes else value.dtype, value.device)
    size = max(v.numel() * v.element_size() for v in (value, own.meta["val"]))
    position = effects.position[node]
    merges_cast = kind == "all_gather" and options.merge_casts and options.mode != "coalesced" and _is_own_cast(own)
    reads_at = effects.position[own] if merges_cast else position
    return _Collective(node, kind, group, group_size, reduce_op, key, size, position, merges_cast, reads_at)  # type: ignore[arg-type]


def _is_own_cast(node: Node) -> bool:
    return node.op == "call_function" and target_name(node) in _CASTS and len(node.users) == 1


def _input(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _split(run: list[_Collective], options: BucketingOptions, effects: _Effects, declined: list[Declined]) -> list[list[_Collective]]:
    """A run as buckets of two or more; each one left alone is declined with the reason that parted it from its neighbour."""
    closed: list[tuple[list[_Collective], DeclineReason | None]] = []
    horizon = effects.horizon(run[0].position, run[-1].position)
    bucket: list[_Collective] = []
    why: DeclineReason | None = None
    below: set[Node] = set()
    size, next_write = 0, math.inf
    for collective in run:
        reason: DeclineReason | None = None
        if bucket and collective.node in below:
            reason = DeclineReason.DEPENDS_ON_MEMBER
        elif bucket and next_write < collective.position:
            reason = DeclineReason.INPUT_WRITTEN
        elif bucket and size + collective.size_bytes > options.cap(len(closed)):
            reason = DeclineReason.OVER_CAP
        if reason is not None:
            closed.append((bucket, why))
            bucket, why, below, size, next_write = [], reason, set(), 0, math.inf
        bucket.append(collective)
        size += collective.size_bytes
        next_write = min(next_write, effects.next_write(collective.source, collective.reads_at))
        effects.add_below(collective.node, below, until=horizon)
    closed.append((bucket, why))
    parted = [reason for _, reason in closed[1:]] + [None]
    for (members, before), after in zip(closed, parted, strict=True):
        if len(members) == 1:
            declined.append(Declined(members[0].node.name, before or after or DeclineReason.ONLY_ONE))
    return [members for members, _ in closed if len(members) > 1]


class _Effects:
    """What orders nodes: arguments, memory that one writes and another touches, and collectives on one group.

    Args:
        graph: whose order of nodes is the order of effects. A node may stand before its arguments.
        cross_kind: whether collectives of different kinds on one group keep their order.
    """

    def __init__(self, graph: Graph, cross_kind: bool) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.after: dict[Node, list[Node]] = {}
        self.next_on_group: dict[Node, Node] = {}
        self._storages: dict[Node, tuple[int, ...]] = {}
        self._writes: dict[int, list[int]] = {}
        self._buckets: dict[Node, list[Node]] = {}
        self._spans: list[tuple[int, int]] = []
        for node in graph.nodes:
            self._find_storages(node)
        self._link_memory(graph)
        self._link_groups(graph, cross_kind)

    def _find_storages(self, node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [source for source in top.all_input_nodes if source not in self._storages]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if top in self._storages:
                continue
            alias = _aliased_argument(top)
            if alias is not None:
                self._storages[top] = self._storages[alias]
            elif _is_unknown(top):
                above = dict.fromkeys(s for source in top.all_input_nodes for s in self._storages[source])
                self._storages[top] = (*above, len(self._storages))
            else:
                self._storages[top] = (len(self._storages),)

    def _touched(self, node: Node) -> dict[int, None]:
        """The storages that a node reads or writes; a wait still holds the input of what it waits for."""
        sources = list(node.all_input_nodes)
        start = start_of(node) if is_wait(node) else None
        if start is not None:
            sources.extend(start.all_input_nodes)
        return dict.fromkeys(s for source in sources for s in self._storages[source])

    def _link_memory(self, graph: Graph) -> None:
        last_write: dict[int, Node] = {}
        readers: dict[int, list[Node]] = {}
        for node in graph.nodes:
            written = {s for source in _written_arguments(node) for s in self._storages[source]}
            for storage in self._touched(node):
                writer = last_write.get(storage)
                if writer is not None:
                    self.after.setdefault(writer, []).append(node)
                if storage in written:
                    for reader in readers.pop(storage, ()):
                        self.after.setdefault(reader, []).append(node)
                    last_write[storage] = node
                    self._writes.setdefault(storage, []).append(self.position[node])
                else:
                    readers.setdefault(storage, []).append(node)

    def _link_groups(self, graph: Graph, cross_kind: bool) -> None:
        last: dict[tuple[str, ...], Node] = {}
        for node in graph.nodes:
            spec = TABLE.get(target_name(node)) if node.op == "call_function" else None
            if spec is None or spec.collective is None:
                continue
            group = str(node.args[spec.collective.group])
            place = (group,) if cross_kind else (group, spec.collective.kind)
            if place in last:
                self.next_on_group[last[place]] = node
            last[place] = node

    def is_result_written(self, start: Node) -> bool:
        """Whether anybody writes to a collective's result in place."""
        return any(s in self._writes for s in self._storages[start])

    def next_write(self, source: Node, position: int) -> float:
        """Where the memory of ``source`` is written next after ``position``; infinity where never."""
        found: float = math.inf
        for storage in self._storages[source]:
            writes = self._writes.get(storage, [])
            at = bisect_right(writes, position)
            found = min(found, writes[at] if at < len(writes) else math.inf)
        return found

    def contract(self, members: list[Node]) -> None:
        """From now on ``members`` are one: what depends on one of them depends on all."""
        for node in members:
            self._buckets[node] = members
        self._spans.append((self.position[members[0]], self.position[members[-1]]))

    def horizon(self, first: int, last: int) -> int:
        """How far one must look for paths between positions ``first`` and ``last``: to the end of every bucket reached from there."""
        for begin, end in sorted(self._spans):
            if begin <= last < end:
                last = end
        return last

    def add_below(self, member: Node, below: set[Node], *, until: int) -> None:
        """Add to ``below`` all that depends on ``member``, as far as position ``until``."""
        stack = [*member.users, *self.after.get(member, ())]
        while stack:
            node = stack.pop()
            if node in below or self.position.get(node, 0) > until:
                continue
            below.add(node)
            for one in self._buckets.get(node, (node,)):
                below.add(one)
                stack.extend(one.users)
                stack.extend(self.after.get(one, ()))
                if one in self.next_on_group:
                    stack.append(self.next_on_group[one])

    def edges(self) -> Iterator[tuple[Node, Node]]:
        """All orders between nodes that arguments do not give."""
        for source, nodes in self.after.items():
            for node in nodes:
                if node is not source:
                    yield source, node
        yield from self.next_on_group.items()


def _aliased_argument(node: Node) -> Node | None:
    """The argument whose memory a node's result shares: of a view, an item, a wait, an in-place operator."""
    if node.op != "call_function" or not node.args:
        return None
    name = target_name(node)
    spec = TABLE.get(name)
    position: Any = None
    if name == "getitem":
        position = node.args[0]
    elif spec is not None and spec.collective is not None and spec.collective.out is not None:
        position = node.kwargs.get(spec.collective.out)
    elif spec is not None and spec.writes:
        position = node.args[spec.writes[0]]
    elif spec is not None and spec.kind in ("view", "wait"):
        position = node.args[0]
    return position if isinstance(position, Node) else None


def _is_unknown(node: Node) -> bool:
    return node.op == "call_function" and target_name(node) != "getitem" and target_name(node) not in TABLE


def _written_arguments(node: Node) -> list[Node]:
    """The arguments that a node writes; of an operator that the table does not know, by its schema."""
    name = target_name(node)
    if node.op != "call_function" or name == "getitem":
        return []
    spec = TABLE.get(name)
    if spec is not None and not spec.writes and (spec.collective is None or spec.collective.out is None):
        return []
    if spec is None:
        parameters = getattr(getattr(node.target, "_schema", None), "arguments", ())
        written = [a for a, p in zip(node.args, parameters, strict=False) if p.alias_info is not None and p.alias_info.is_write]
    else:
        written = [node.args[position] for position in spec.writes]
        if spec.collective is not None and spec.collective.out is not None:
            written.append(node.kwargs.get(spec.collective.out))
    flat = [item for arg in written for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [item for item in flat if isinstance(item, Node)]


# Rewriting


def _merge(graph: Graph, bucket: list[_Collective], options: BucketingOptions) -> Node:
    """Replace the members by one collective behind the last of them, which is returned."""
    made: list[Node] = []
    with graph.inserting_before(bucket[-1].node.next):
        results = _BUILDERS[bucket[0].kind](_Emitter(graph, made), bucket, options)
    for collective, result in zip(bucket, results, strict=True):
        node, own = collective.node, _input(collective.node)
        for wait in waits(node):
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        if collective.merges_cast:
            graph.erase_node(own)
    _inherit(made, bucket)
    return next(node for node in made if is_collective(node))


def _inherit(nodes: Iterable[Node], bucket: Sequence[_Collective]) -> None:
    """New nodes keep where the first member came from, and name all members."""
    first = bucket[0].node
    kept: dict[str, Any] = {k: first.meta[k] for k in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom") if k in first.meta}
    members = tuple(c.node.name for c in bucket)
    for node in nodes:
        node.meta.update(kept)
        node.meta["bucket_members"] = members


class _Emitter:
    """Adds nodes at the graph's insertion point and remembers them."""

    def __init__(self, graph: Graph, made: list[Node]) -> None:
        self.graph = graph
        self.made = made

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Node:
        node = emit(self.graph, target, args, kwargs)
        self.made.append(node)
        return node

    def item(self, node: Node, index: int) -> Node:
        item = emit_item(self.graph, node, index)
        self.made.append(item)
        return item

    def flat(self, node: Node, dtype: torch.dtype) -> Node:
        """The elements in row-major order, as ``dtype``."""
        if node.meta["val"].dtype is not dtype:
            node = self("prims.convert_element_type.default", node, dtype)
        return self.shaped(node, [node.meta["val"].numel()])

    def shaped(self, node: Node, shape: Sequence[int]) -> Node:
        """``node`` itself where it has that shape already, else a reshape of it."""
        return node if list(node.meta["val"].shape) == list(shape) else self("aten.reshape.default", node, list(shape))

    def owned(self, piece: Node, shape: Sequence[int]) -> Node:
        """A piece of a bucket as a tensor of ``shape`` in memory of its own."""
        copied = self("aten.clone.default", piece, memory_format=torch.contiguous_format)
        return self.shaped(copied, shape)


def _merge_all_gather(e: _Emitter, bucket: list[_Collective], options: BucketingOptions) -> list[Node]:
    sources = [c.source for c in bucket]
    group, size = bucket[0].group, bucket[0].group_size
    assert size is not None
    vals = [c.node.meta["val"] for c in bucket]
    numels = [v.numel() // size for v in vals]
    if options.mode == "coalesced":
        return _waited_items(e, e(_C10D + "all_gather_into_tensor_coalesced.default", list(sources), size, group), len(bucket))
    if len({v.dtype for v in vals}) > 1:
        return _gather_bytes(e, vals, numels, sources, size, group)
    dtype = vals[0].dtype
    if options.mode == "default":
        packed = e("aten.cat.default", [e.flat(s, dtype) for s in sources])
        gathered = e(_C10D + "all_gather_into_tensor.default", packed, size, group)
    else:
        buffer, rank = _pre_bucket(e, sources, dtype, size, group), group_rank(group)
        chunk = e("aten.slice.Tensor", buffer, 0, sum(numels) * rank, sum(numels) * (rank + 1))
        gathered = e(_C10D + "all_gather_into_tensor_out.default", chunk, size, group, out=buffer)
    rows = e("aten.view.default", e(_C10D + "wait_tensor.default", gathered), [size, sum(numels)])
    pieces = e("aten.split_with_sizes.default", rows, numels, 1)
    return [e.owned(e.item(pieces, i), v.shape) for i, v in enumerate(vals)]


def _pre_bucket(e: _Emitter, sources: list[Node], dtype: torch.dtype, size: int, group: str) -> Node:
    number = bucket_dtypes().index(dtype)
    rank = group_rank(group)
    return e("bucketing._pre_bucket_all_gather.default", list(sources), size, dtype, [number] * len(sources), rank)


def _gather_bytes(e: _Emitter, vals: Sequence[Any], numels: list[int], sources: list[Node], size: int, group: str) -> list[Node]:
    """One gather of bytes: members by descending item size, chunks padded to a multiple of the largest."""
    widest = max(v.element_size() for v in vals)
    order = sorted(range(len(vals)), key=lambda i: (-vals[i].element_size(), i))
    num_bytes = [numels[i] * vals[i].element_size() for i in order]
    padding = -sum(num_bytes) % widest
    parts = [e("aten.view.dtype", e.flat(sources[i], vals[i].dtype), torch.uint8) for i in order]
    if padding:
        parts.append(e("aten.full.default", [padding], 0, dtype=torch.uint8, device=vals[0].device, pin_memory=False))
    packed = e("aten.cat.default", parts)
    gathered = e(_C10D + "wait_tensor.default", e(_C10D + "all_gather_into_tensor.default", packed, size, group))
    rows = e("aten.view.default", gathered, [size, sum(num_bytes) + padding])
    pieces = e("aten.split_with_sizes.default", rows, [*num_bytes, *([padding] if padding else [])], 1)
    results: dict[int, Node] = {}
    for place, i in enumerate(order):
        copied = e("aten.clone.default", e.item(pieces, place), memory_format=torch.contiguous_format)
        flat = e("aten.view.default", copied, [num_bytes[place] * size])
        typed = e("aten.view.dtype", flat, vals[i].dtype)
        results[i] = e("aten.view.default", typed, list(vals[i].shape))
    return [results[i] for i in range(len(vals))]


def _merge_reduce_scatter(e: _Emitter, bucket: list[_Collective], options: BucketingOptions) -> list[Node]:
    sources = [c.source for c in bucket]
    group, size, op = bucket[0].group, bucket[0].group_size, bucket[0].reduce_op
    assert size is not None
    vals = [c.node.meta["val"] for c in bucket]
    if options.mode == "coalesced":
        return _waited_items(e, e(_C10D + "reduce_scatter_tensor_coalesced.default", list(sources), op, size, group), len(bucket))
    numels = [v.numel() for v in vals]
    if options.mode == "default":
        rows = [e("aten.reshape.default", s, [size, n]) for s, n in zip(sources, numels, strict=True)]
        packed = e("aten.reshape.default", e("aten.cat.default", rows, 1), [sum(numels) * size])
    else:
        packed = e("bucketing._pre_bucket_reduce_scatter.default", list(sources), size)
    scattered = e(_C10D + "wait_tensor.default", e(_C10D + "reduce_scatter_tensor.default", packed, op, size, group))
    pieces = e("aten.split_with_sizes.default", scattered, numels)
    return [e.owned(e.item(pieces, i), v.shape) for i, v in enumerate(vals)]


def _merge_all_reduce(e: _Emitter, bucket: list[_Collective], options: BucketingOptions) -> list[Node]:
    sources = [c.source for c in bucket]
    group, op = bucket[0].group, bucket[0].reduce_op
    vals = [c.node.meta["val"] for c in bucket]
    if options.mode == "coalesced":
        return _waited_items(e, e(_C10D + "all_reduce_coalesced.default", list(sources), op, group), len(bucket))
    packed = e("aten.cat.default", [e.flat(s, vals[0].dtype) for s in sources])
    reduced = e(_C10D + "wait_tensor.default", e(_C10D + "all_reduce.default", packed, op, group))
    pieces = e("aten.split_with_sizes.default", reduced, [v.numel() for v in vals])
    return [e.owned(e.item(pieces, i), v.shape) for i, v in enumerate(vals)]


def _waited_items(e: _Emitter, coalesced: Node, count: int) -> list[Node]:
    return [e(_C10D + "wait_tensor.default", e.item(coalesced, i)) for i in range(count)]


_BUILDERS: Final = {"all_gather": _merge_all_gather, "reduce_scatter": _merge_reduce_scatter, "all_reduce": _merge_all_reduce}


def _stable_sort(graph: Graph, cross_kind: bool) -> None:
    """Put every node behind its arguments and behind what memory and groups order before it, otherwise in the order there was."""
    effects = _Effects(graph, cross_kind)
    position = effects.position
    below: dict[Node, dict[Node, None]] = {node: dict.fromkeys(node.users) for node in position}
    for source, node in effects.edges():
        if position[source] < position[node]:
            below[source][node] = None
    missing = dict.fromkeys(position, 0)
    for nodes in below.values():
        for node in nodes:
            missing[node] += 1
    order: list[Node] = []
    by_position = list(position)
    heap = [at for node, at in position.items() if not missing[node]]
    heapify(heap)
    while heap:
        node = by_position[heappop(heap)]
        order.append(node)
        for later in below[node]:
            missing[later] -= 1
            if not missing[later]:
                heappush(heap, position[later])
    assert len(order) == len(position), "buckets depend on each other in a circle"
    if order != by_position:
        last = order[-1]
        for node in order[:-1]:
            last.prepend(node)
