"""The pairs of pack and unpack that a Program may name as its saved tensor hooks, by what is promised of each; what they do is in ``harness.graph.saved_hooks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

__all__ = ["SAVED_HOOKS", "Traits"]

_FLOATS: Final = frozenset({"float32", "float64"})


class Traits(NamedTuple):
    """What is promised of a pair.

    Attributes:
        summary: what it does.
        is_lossless: unpack gives back the values that pack took, bit by bit.
        is_compressing: a tensor of several elements takes fewer bytes packed.
        is_inlineable: it has a form as graph modules; one without is given as plain functions.
        dtypes: what it acts on; other tensors are left as they are. None: all.
        raises: the half that raises, while it runs and on every tensor with elements.
    """

    summary: str
    is_lossless: bool = True
    is_compressing: bool = False
    is_inlineable: bool = True
    dtypes: frozenset[str] | None = None
    raises: Literal["pack", "unpack"] | None = None


SAVED_HOOKS: Final[Mapping[str, Traits]] = {
    "identity": Traits("packs the tensor itself"),
    "clone": Traits("packs a copy"),
    "float16": Traits("casts to float16; the packed value has the dtype to go back to", False, True, dtypes=_FLOATS),
    "bfloat16": Traits("casts to bfloat16", False, True, dtypes=_FLOATS),
    "float8": Traits("casts to float8_e5m2", False, True, dtypes=_FLOATS),
    "int8": Traits("quantises to int8 with one scale a tensor", False, True, dtypes=_FLOATS),
    "int8_rows": Traits("quantises to int8 with one scale a row", False, dtypes=_FLOATS),
    "bits": Traits("packs eight booleans into a byte", True, True, dtypes=frozenset({"bool"})),
    "move": Traits("moves to the CPU, pinned where it comes from another device"),
    "halves": Traits("slices the flattened tensor into two; the packed value has its sizes"),
    "nested": Traits("packs a dictionary with the tensor, a number, None and a text"),
    "doubled": Traits("packs the tensor times a number that the function captured", dtypes=_FLOATS),
    "buffer": Traits("packs the tensor times a buffer of the graph module", dtypes=_FLOATS),
    "twice": Traits("packs the same tensor twice"),
    "logs": Traits("appends to a list", is_inlineable=False),
    "raises_in_pack": Traits("raises in pack", raises="pack"),
    "raises_in_unpack": Traits("raises in unpack", raises="unpack"),
}
"""By name."""
