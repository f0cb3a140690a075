"""What is seen of a rank's tensors after a run: geometry, digests, who shares storages and version counters."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from hashlib import blake2b

import torch
from torch import Tensor

from harness.executors.field_rules import dtype_name
from harness.spec.outcome import TensorRecord

__all__ = ["record"]


def record(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    versions: Sequence[int],
    *,
    halves: Sequence[Tensor | None] | None = None,
    keep: bool = False,
) -> tuple[tuple[TensorRecord, ...], tuple[TensorRecord, ...]]:
    """The records of a rank's inputs and of its outputs.

    Args:
        inputs, outputs: as they are after the run.
        versions: the inputs' version counters before it.
        halves: the field halves of inputs and outputs, in this order.
        keep: put the tensors' bytes into the records.
    """
    tensors = [*inputs, *outputs]
    storages: dict[int, int] = {}
    owners = [storages.setdefault(tensor.untyped_storage()._cdata, len(storages)) for tensor in tensors]
    changes = [*(t._version - v for t, v in zip(inputs, versions, strict=True)), *(t._version for t in outputs)]
    groups = _version_groups(tensors) if len(storages) < len(tensors) else list(range(len(tensors)))
    records = tuple(
        [
            _tensor_record(t, h, storage, change, group, keep)
            for t, h, storage, change, group in zip(tensors, halves or [None] * len(tensors), owners, changes, groups, strict=True)
        ]
    )
    return records[: len(inputs)], records[len(inputs) :]


def _version_groups(tensors: list[Tensor]) -> list[int]:
    """Which tensors share a version counter, found by advancing one and looking at the others."""
    groups: list[int] = []
    for i, tensor in enumerate(tensors):
        group = i
        for j in range(i):
            if tensors[j] is tensor:
                group = groups[j]
            elif tensors[j].untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                before = tensor._version
                torch._C._increment_version([tensors[j]])
                if tensor._version != before:
                    group = groups[j]
            if group != i:
                break
        groups.append(group)
    return groups


def _tensor_record(tensor: Tensor, half: Tensor | None, storage: int, version: int, group: int, keep: bool) -> TensorRecord:
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
    )


def _raw_bytes(tensor: Tensor) -> bytes:
    """The elements in row-major order, as they lie in memory."""
    flat = tensor.contiguous()
    if not flat.is_cpu:
        flat = flat.cpu()
    size = flat.numel() * flat.element_size()
    return string_at(flat.data_ptr(), size) if size else b""
