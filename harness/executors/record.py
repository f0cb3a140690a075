"""What is seen of a rank's tensors after a run: geometry, digests, who shares storages and version counters."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from hashlib import blake2b

import torch
from torch import Tensor

from harness.executors.field_rules import dtype_name
from harness.spec.outcome import TensorRecord
from harness.spec.program import storage_numel

__all__ = ["record", "version_of"]


def record(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    versions: Sequence[int],
    *,
    halves: Sequence[Tensor | None] | None = None,
    keep: bool = False,
    with_groups: bool = True,
) -> tuple[tuple[TensorRecord, ...], tuple[TensorRecord, ...]]:
    """The records of a rank's inputs and of its outputs.

    Args:
        inputs, outputs: as they are after the run.
        versions: the inputs' version counters before it.
        halves: the field halves of inputs and outputs, in this order.
        keep: put the tensors' bytes into the records.
        with_groups: find out who shares version counters, which advances them: not while autograd still has tensors saved.
    """
    tensors = [*inputs, *outputs]
    storages: dict[int, int] = {}
    owners = [storages.setdefault(tensor.untyped_storage()._cdata, len(storages)) for tensor in tensors]
    changes = [*(version_of(t) - v for t, v in zip(inputs, versions, strict=True)), *(version_of(t) for t in outputs)]
    connected = [(t.requires_grad, _has_grad_fn(t)) for t in tensors]
    groups = _version_groups(tensors) if with_groups and len(storages) < len(tensors) else list(range(len(tensors)))
    records = tuple(
        [
            _tensor_record(t, h, storage, change, group, keep, *grad)
            for t, h, storage, change, group, grad in zip(tensors, halves or [None] * len(tensors), owners, changes, groups, connected, strict=True)
        ]
    )
    return records[: len(inputs)], records[len(inputs) :]


def _has_grad_fn(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was written in a way that autograd cannot replay: it refuses when asked
        return True


def _version_groups(tensors: list[Tensor]) -> list[int]:
    """Which tensors share a version counter, found by advancing one and looking at the others."""
    groups: list[int] = []
    for i, tensor in enumerate(tensors):
        group = i
        for j in range(i):
            if tensors[j] is tensor:
                group = groups[j]
            elif tensors[j].untyped_storage()._cdata == tensor.untyped_storage()._cdata and not (tensor.is_inference() or tensors[j].is_inference()):
                before = tensor._version
                torch._C._increment_version([tensors[j]])
                if tensor._version != before:
                    group = groups[j]
            if group != i:
                break
        groups.append(group)
    return groups


def _tensor_record(
    tensor: Tensor, half: Tensor | None, storage: int, version: int, group: int, keep: bool, requires_grad: bool, has_grad_fn: bool
) -> TensorRecord:
    data = _raw_bytes(tensor)
    field_data = None if half is None else _raw_bytes(half)
    return TensorRecord(
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        storage,
        tensor.untyped_storage().nbytes(),
        blake2b(data, digest_size=16).hexdigest(),
        None if field_data is None else blake2b(field_data, digest_size=16).hexdigest(),
        version,
        group,
        data if keep else None,
        field_data if keep else None,
        requires_grad,
        has_grad_fn,
    )


def _raw_bytes(tensor: Tensor) -> bytes:
    """The elements in row-major order, as they lie in memory; none where the storage was resized to less than they need."""
    if tensor.untyped_storage().nbytes() < tensor.element_size() * storage_numel(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())):
        return b""
    flat = tensor.detach().contiguous()
    if not flat.is_cpu:
        flat = flat.cpu()
    size = flat.numel() * flat.element_size()
    return string_at(flat.data_ptr(), size) if size else b""


def version_of(tensor: Tensor) -> int:
    """The version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
