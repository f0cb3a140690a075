"""Views between collectives: an entry for each operator of ``harness.ops.views``; bytes as in ``operators``."""

from __future__ import annotations

from typing import Any, Final

from harness.ops.core import view_stride
from harness.spec.dtypes import DTYPES
from harness.spec.meta import TensorMeta
from harness.spec.program import DTypeArg
from harness.strategies.builder import MAX_NUMEL, Builder
from harness.strategies.operands import Fits, Make, both, has_dims, has_rows, is_any, operand

__all__ = ["VIEWS"]


def _shaped(fits: Fits) -> Make:
    """The operand in another shape: flat, with a dimension of 1 in front, or with its first two dimensions as one."""

    def make(b: Builder, s: bytes, target: str) -> None:
        x = operand(b, s, fits)
        if x is None:
            return
        meta = x.meta
        shapes = [(meta.numel,), (1, *meta.shape), meta.shape]
        if len(meta.shape) >= 2:
            shapes.append((meta.shape[0] * meta.shape[1], *meta.shape[2:]))
        if meta.numel % 2 == 0:
            shapes.append((2, meta.numel // 2))
        if target != "aten.reshape.default":
            shapes = [shape for shape in shapes if view_stride(meta, shape) is not None]
        b.read(target, x, shapes[s[4] % len(shapes)])

    return make


def _flatten(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(1))
    if x is not None:
        b.read(target, x, 0, s[4] % len(x.meta.shape))


def _reinterpretations(b: Builder, meta: TensorMeta) -> list[str]:
    """Integers of the same size, and bytes: not floats, whose NaNs are not kept bit for bit."""
    if not meta.shape or meta.stride[-1] != 1 or meta.dtype == "bool":
        return []
    sizes = (1, DTYPES[meta.dtype].itemsize)
    return [d for d in b.options.dtypes if d != meta.dtype and DTYPES[d].kind in ("int", "uint") and DTYPES[d].itemsize in sizes]


def _reinterpret(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, lambda m: bool(_reinterpretations(b, m)))
    if x is not None:
        dtypes = _reinterpretations(b, x.meta)
        b.read(target, x, DTypeArg(dtypes[s[4] % len(dtypes)]))


def _transpose(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(2))
    if x is not None:
        ndim = len(x.meta.shape)
        b.read(target, x, s[4] % ndim, (s[4] + 1 + s[5] % (ndim - 1)) % ndim)


def _permute(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(2))
    if x is not None:
        order = list(range(len(x.meta.shape)))
        turn = 1 + s[4] % (len(order) - 1)
        b.read(target, x, tuple(order[turn:] + order[:turn]))


def _slice(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, _has_some)
    if x is None:
        return
    dim = next(d for d in _dims(x.meta, s[5]) if x.meta.shape[d])
    size = x.meta.shape[dim]
    start = (1 + s[4]) % size if size > 1 else s[4] % 2
    length = 1 + s[6] % (size - start) if size > start else 0
    if target == "aten.narrow.default":
        b.read(target, x, dim, start, length)
    elif s[7] >= 192:
        b.read(target, x, dim, start, start + length, 2)
    else:
        b.read(target, x, dim, start, start + length)


def _has_some(meta: TensorMeta) -> bool:
    return any(meta.shape)


def _dims(meta: TensorMeta, byte: int) -> list[int]:
    """All dimensions, beginning with the one that a byte chooses."""
    ndim = len(meta.shape)
    return [(byte + d) % ndim for d in range(ndim)]


def _select(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, _has_some)
    if x is not None:
        dim = next(d for d in _dims(x.meta, s[5]) if x.meta.shape[d])
        b.read(target, x, dim, s[4] % x.meta.shape[dim])


def _split(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, both(has_rows, lambda m: m.shape[0] <= 8))
    if x is None:
        return
    rows = x.meta.shape[0]
    if target == "aten.unbind.int":
        b.read_all(target, x, 0)
    elif target == "aten.split.Tensor":
        b.read_all(target, x, 1 + s[4] % rows, 0)
    else:
        first = s[4] % (rows + 1)
        b.read_all(target, x, (first, rows - first), 0)


def _unsqueeze(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(0, 5))
    if x is not None:
        b.read(target, x, s[4] % (len(x.meta.shape) + 1))


def _squeeze(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_any)
    if x is not None and target == "aten.squeeze.dim":
        b.read(target, x, s[4] % max(len(x.meta.shape), 1))
    elif x is not None:
        b.read(target, x)


def _expand(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, lambda m: m.numel <= MAX_NUMEL // 3 and len(m.shape) <= 5)
    if x is not None:
        shape = [2 + s[4] % 2 if size == 1 and s[5] % 2 else size for size in x.meta.shape]
        b.read(target, x, tuple(shape if shape != list(x.meta.shape) else [2, *shape]))


def _as_strided(b: Builder, s: bytes, target: str) -> None:
    """All elements in a row, every second one, or windows that overlap."""
    x = operand(b, s, lambda m: m.is_contiguous and 0 not in m.shape)
    if x is None:
        return
    numel, offset = x.meta.numel, x.meta.offset
    options: list[tuple[Any, ...]] = [((numel,), (1,), offset), (((numel + 1) // 2,), (2,), offset)]
    if numel > 1:
        options += [((numel - 1, 2), (1, 1), offset), ((numel - 1,), (1,), offset + 1)]
    b.read(target, x, *options[s[4] % len(options)])


def _diagonal(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(2))
    if x is not None:
        b.read(target, x, (0, 1, -1)[s[4] % 3], 0, 1)


def _same(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, is_any)
    if x is not None:
        b.read(target, x)


def _t(b: Builder, s: bytes, target: str) -> None:
    x = operand(b, s, has_dims(0, 2))
    if x is not None:
        b.read(target, x)


VIEWS: Final[list[tuple[tuple[str, Make], int]]] = [
    ((f"aten.{name}", make), weight)
    for name, make, weight in (
        ("view.default", _shaped(is_any), 3),
        ("reshape.default", _shaped(is_any), 3),
        ("slice.Tensor", _slice, 4),
        ("transpose.int", _transpose, 4),
        ("select.int", _select, 2),
        ("split_with_sizes.default", _split, 2),
        ("expand.default", _expand, 2),
        ("unsqueeze.default", _unsqueeze, 1),
        ("t.default", _t, 1),
        ("permute.default", _permute, 1),
        ("_unsafe_view.default", _shaped(is_any), 1),
        ("flatten.using_ints", _flatten, 1),
        ("narrow.default", _slice, 1),
        ("split.Tensor", _split, 1),
        ("unbind.int", _split, 1),
        ("squeeze.default", _squeeze, 1),
        ("squeeze.dim", _squeeze, 1),
        ("as_strided.default", _as_strided, 2),
        ("diagonal.default", _diagonal, 1),
        ("detach.default", _same, 1),
        ("alias.default", _same, 1),
        ("view.dtype", _reinterpret, 1),
    )
]
"""Name, entry and weight."""
