"""Statements that only a Program with ``autograd`` may have: calls of its functions, and what changes a tensor itself instead of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from harness.ops.core import OpError, OpSpec, fresh, require
from harness.spec.meta import TensorMeta

__all__ = ["APPLY", "AUTOGRAD", "gradient_of", "rebound"]

APPLY: Final = "autograd.apply"
"""Calls the function whose number is the first argument with the tensors that follow; its results are a tuple."""


def _data(self: TensorMeta) -> TensorMeta:
    return self


def _set(self: TensorMeta, source: TensorMeta) -> TensorMeta:
    require(self.dtype == source.dtype, f"set_ of {self.dtype} to {source.dtype}")
    return source


def _resize_storage(self: TensorMeta, num_bytes: int) -> TensorMeta:
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise OpError(f"{num_bytes!r} bytes; must be a number from 0")
    return self


AUTOGRAD: Final[Mapping[str, OpSpec]] = {
    spec.target: spec
    for spec in (
        OpSpec("autograd.data", "view", _data),
        OpSpec("autograd.set_", "inplace", _set, (0,)),
        OpSpec("autograd.resize_storage_", "inplace", _resize_storage, (0,)),
    )
}
"""``x.data``; ``x.set_(source)``, after which ``x`` has source's memory and geometry; ``x.untyped_storage().resize_(num_bytes)``, which gives ``x``."""


def rebound(target: str, args: tuple[Any, ...], result: TensorMeta | tuple[TensorMeta, ...]) -> TensorMeta | None:
    """The metadata that the first argument of an operator has from now on, or None where it stays as it was."""
    return result if target == "autograd.set_" and isinstance(result, TensorMeta) else None


def gradient_of(meta: TensorMeta) -> TensorMeta:
    """A gradient as a function's backward is given it: like the output, in memory of its own."""
    return fresh(meta.shape, meta.dtype)
