"""Pairs of pack and unpack for ``torch.autograd.graph.saved_tensors_hooks``: as plain functions, and as graph modules that AOTAutograd inlines.

A pair acts on tensors of its dtypes and packs others as they are. In a graph module the pair is one call, which is traced with the dtype and
sizes of each saved tensor when it is inlined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from harness.spec.saved_hooks import SAVED_HOOKS, Traits

__all__ = ["LOG", "PAIRS", "Pair", "graph_modules", "hooks_around", "named"]

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

LOG: Final[deque[str]] = deque(maxlen=1000)
"""What the pair ``logs`` wrote last."""

_FACTOR: Final = 2.0
_BITS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_INT8_MAX: Final = 127


class Pair(NamedTuple):
    """A pair by name; ``buffer`` is a constant that both functions take as a second argument."""

    name: str
    pack: Pack
    unpack: Unpack
    traits: Traits
    buffer: float | None = None


def named(names: Sequence[str]) -> list[Pair]:
    """The pairs of a Program, the outermost first."""
    return [PAIRS[name] for name in names]


def graph_modules(pair: Pair) -> tuple[GraphModule, GraphModule]:
    """New graph modules of pack and unpack; torch tells hooks apart by the identity of these."""
    return _module_of(pair.pack, pair.buffer), _module_of(pair.unpack, pair.buffer)


def _module_of(function: Callable[..., Any], buffer: float | None) -> GraphModule:
    graph = Graph()
    args = [graph.placeholder("value")]
    root = torch.nn.Module()
    if buffer is not None:
        root.register_buffer("factor", torch.tensor(buffer))
        args.append(graph.get_attr("factor"))
    graph.output(graph.call_function(function, tuple(args)))
    return GraphModule(root, graph)


@contextmanager
def hooks_around(hooks: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Set pairs of hooks, the outermost first."""
    with ExitStack() as stack:
        for pack, unpack in hooks:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield


def _itself(value: Any) -> Any:
    return value


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _for(dtypes: frozenset[str], pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """The pair that acts on ``dtypes``: what it packs is a tuple, what it leaves is the tensor."""

    def packed(tensor: Tensor) -> Any:
        return pack(tensor) if str(tensor.dtype).removeprefix("torch.") in dtypes else tensor

    def unpacked(value: Any) -> Tensor:
        return unpack(value) if isinstance(value, tuple) else value

    return packed, unpacked


def _cast_to(dtype: torch.dtype) -> tuple[Pack, Unpack]:
    return lambda tensor: (tensor.to(dtype), tensor.dtype), lambda value: value[0].to(value[1])


def _to_int8(tensor: Tensor) -> Any:
    return _quantised(tensor, tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()))


def _rows_to_int8(tensor: Tensor) -> Any:
    return _quantised(tensor, tensor.abs().amax(-1, keepdim=True) if tensor.numel() and tensor.dim() else tensor.new_zeros(()))


def _quantised(tensor: Tensor, largest: Tensor) -> Any:
    scale = (largest / _INT8_MAX).clamp(min=torch.finfo(tensor.dtype).tiny)
    return (tensor / scale).round().to(torch.int8), scale


def _from_int8(value: Any) -> Tensor:
    quantised, scale = value
    return quantised.to(scale.dtype) * scale


def _to_bits(tensor: Tensor) -> Any:
    flat = tensor.reshape(-1)
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -tensor.numel() % len(_BITS))).view(-1, len(_BITS))
    return sum(padded[:, i] * bit for i, bit in enumerate(_BITS)), tuple(tensor.shape)


def _from_bits(value: Any) -> Tensor:
    packed, shape = value
    numel = 1
    for size in shape:
        numel *= size
    return torch.stack([(packed & bit) != 0 for bit in _BITS], 1).reshape(-1)[:numel].view(shape)


def _to_cpu(tensor: Tensor) -> Any:
    return tensor.to("cpu") if tensor.is_cpu else tensor.to("cpu").pin_memory(), tensor.device


def _from_cpu(value: Any) -> Tensor:
    return value[0].to(value[1])


def _halves(tensor: Tensor) -> Any:
    flat = tensor.reshape(-1)
    middle = tensor.numel() // 2
    return flat[:middle], flat[middle:], tuple(tensor.shape)


def _whole(value: Any) -> Tensor:
    return torch.cat([value[0], value[1]]).view(value[2])


def _to_dict(tensor: Tensor) -> Any:
    return {"tensor": tensor.clone(), "number": 3, "nothing": None, "text": "kept"}


def _from_dict(value: Any) -> Tensor:
    return value["tensor"]


def _times(tensor: Tensor, factor: Any = _FACTOR) -> Any:
    return (tensor * factor,) if tensor.is_floating_point() else tensor


def _divided(value: Any, factor: Any = _FACTOR) -> Tensor:
    return value[0] / factor if isinstance(value, tuple) else value


def _twice(tensor: Tensor) -> Any:
    return tensor, tensor


def _first(value: Any) -> Tensor:
    return value[0]


def _noted(half: str) -> Callable[[Any], Any]:
    def note(value: Any) -> Any:
        LOG.append(f"{half} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        return value

    return note


def _raising(half: str) -> Callable[[Any], Any]:
    def raising(value: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((value != value).all(), f"no {half}")
        return value

    return raising


def _of(name: str, functions: tuple[Pack, Unpack], buffer: float | None = None) -> Pair:
    traits = SAVED_HOOKS[name]
    pack, unpack = functions if traits.dtypes is None or buffer is not None else _for(traits.dtypes, *functions)
    return Pair(name, pack, unpack, traits, buffer)


PAIRS: Final[Mapping[str, Pair]] = {
    pair.name: pair
    for pair in (
        _of("identity", (_itself, _itself)),
        _of("clone", (_cloned, _itself)),
        _of("float16", _cast_to(torch.float16)),
        _of("bfloat16", _cast_to(torch.bfloat16)),
        _of("float8", _cast_to(torch.float8_e5m2)),
        _of("int8", (_to_int8, _from_int8)),
        _of("int8_rows", (_rows_to_int8, _from_int8)),
        _of("bits", (_to_bits, _from_bits)),
        _of("move", (_to_cpu, _from_cpu)),
        _of("halves", (_halves, _whole)),
        _of("nested", (_to_dict, _from_dict)),
        _of("doubled", (_times, _divided)),
        _of("buffer", (_times, _divided), _FACTOR),
        _of("twice", (_twice, _first)),
        _of("logs", (_noted("pack"), _noted("unpack"))),
        _of("raises_in_pack", (_raising("pack"), _itself)),
        _of("raises_in_unpack", (_itself, _raising("unpack"))),
    )
}
"""By name; what each promises is in ``harness.spec.saved_hooks``."""
