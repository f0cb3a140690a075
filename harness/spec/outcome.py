"""Outcome: what one run of one program observably did on every rank, free of torch, so that it can be stored and judged again."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CollectiveRecord", "Counters", "ErrorRecord", "Flight", "JointRecord", "MetaFault", "Outcome", "RankOutcome", "Stage", "TensorRecord"]


class TensorRecord(Struct, frozen=True, omit_defaults=True):
    """One tensor as it was found after the run.

    Attributes:
        dtype: by name.
        shape, stride, offset: in elements.
        storage: a number that is the same for tensors of one rank that share memory; inputs come first.
        storage_bytes: the size of that whole storage.
        digest: of the concrete values, row-major, every NaN alike (hexadecimal).
        field_digest: of the field half, or None where there is none (memory was reinterpreted).
        version: the version counter, less what it was before the run for inputs.
        version_group: like ``storage``, but for version counters: tensors with the same number share one.
        data: the raw row-major bytes, only when asked for.
        field_data: the field half as row-major int64 bytes, only when asked for.
        requires_grad, has_grad_fn: of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    storage_bytes: int
    digest: str
    field_digest: str | None = None
    version: int = 0
    version_group: int = 0
    data: bytes | None = None
    field_data: bytes | None = None
    requires_grad: bool = False
    has_grad_fn: bool = False

    @property
    def significant_stride(self) -> tuple[int, ...]:
        """Strides that matter: a dimension of size 1 has any, and an empty tensor has none."""
        if 0 in self.shape:
            return ()
        return tuple(step if size != 1 else 0 for size, step in zip(self.shape, self.stride, strict=True))


class CollectiveRecord(Struct, frozen=True):
    """One collective as one rank issued it.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        group: the name of the group.
        reduce_op: ``sum``, ``avg``, ``max``, ``min``, ``product``, or None.
        dtypes: one a tensor (several when coalesced).
        num_bytes: the bytes of this rank's input.
        node: the name of the node that issued it.
    """

    kind: str
    group: str
    reduce_op: str | None
    dtypes: tuple[str, ...]
    num_bytes: int
    node: str


class ErrorRecord(Struct, frozen=True):
    """An exception that ended the run: its type's name, its message, and the node that raised it, where known."""

    type: str
    message: str
    node: str | None = None


class Flight(Struct, frozen=True):
    """A collective's memory that was touched between its start and its wait.

    Attributes:
        collective: the node that started it.
        node: the node that touched the memory (or ``output``).
        access: ``read_output``, ``write_output``, ``write_input``.
    """

    collective: str
    node: str
    access: str


class MetaFault(Struct, frozen=True):
    """A node whose recorded metadata is not what executed.

    Attributes:
        node, target: which node, and its operator.
        expected: what ``meta["val"]`` says, as ``float32[2, 3] stride (3, 1)``.
        seen: what executed.
    """

    node: str
    target: str
    expected: str
    seen: str


class Stage(Struct, frozen=True, omit_defaults=True):
    """What was there after forward, or after one run of backward.

    Attributes:
        name: ``forward``, ``backward 1``, ``backward 2``, ... or ``double backward``.
        inputs, outputs: of the program, as they are now.
        grads: of the leaves, one an input; None where an input is no leaf or was not reached.
        seeds: the gradients that backward was given, as they are now.
    """

    name: str
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    grads: tuple[TensorRecord | None, ...] = ()
    seeds: tuple[TensorRecord, ...] = ()


class Counters(Struct, frozen=True):
    """How often an input was changed: its data, the storage that it has (``set_``), the size of that storage."""

    data: int = 0
    storage: int = 0
    resize: int = 0


class JointRecord(Struct, frozen=True):
    """What a functionaliser made of forward and backward together.

    Attributes:
        has_backward: whether there is a backward in it.
        num_inputs: of the joint graph, without the gradients that backward is given.
        in_graph: the inputs whose mutation in forward the graph itself puts back.
        after_forward, after_backward: the counters of each of ``in_graph``; empty where the functionaliser noted none.
        copies: the epilogue: which input, and the half that the copy must be in, ``forward`` or ``backward``.
        stray: operators that write anything else.
    """

    has_backward: bool
    num_inputs: int
    in_graph: tuple[int, ...]
    after_forward: tuple[Counters, ...]
    after_backward: tuple[Counters, ...]
    copies: tuple[tuple[int, str], ...]
    stray: tuple[str, ...]


class RankOutcome(Struct, frozen=True, omit_defaults=True):
    """What one rank did: graph outputs, inputs afterwards, collectives in order of issue, touches in flight, untrue metadata, an error.

    A run with a backward has ``stages`` instead of outputs and inputs; those before an error are kept.
    """

    outputs: tuple[TensorRecord, ...] = ()
    inputs: tuple[TensorRecord, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()
    in_flight: tuple[Flight, ...] = ()
    untrue: tuple[MetaFault, ...] = ()
    error: ErrorRecord | None = None
    stages: tuple[Stage, ...] = ()


class Outcome(Struct, frozen=True, omit_defaults=True):
    """One trial on all ranks.

    Attributes:
        ranks: in rank order.
        trial: which numbers the concrete half had: ``small`` (exact small integers) or ``normal`` (ordinary floats).
        refused: why the executor declined, where it did (documented as unsupported); then ``ranks`` is empty.
    """

    ranks: tuple[RankOutcome, ...] = ()
    trial: str = "normal"
    refused: str | None = None
