"""Does our model of a backend agree with the backend? A wrong model must not excuse a wrong pass, nor accuse a right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.oracles.numerics import is_rounding, named_dtypes
from harness.spec.outcome import Outcome, TensorRecord
from harness.spec.program import Program

__all__ = ["disagreement"]

_GEOMETRY: Final = ("dtype", "shape", "stride", "offset", "storage", "version_group")


def disagreement(program: Program, model: Outcome, real: Outcome) -> str | None:
    """Where a program's run on real ranks is not what lockstep says, as one clause; None where they agree.

    Outputs and inputs afterwards must have equal bits, geometry and aliasing, inputs must have been written equally often, and the collectives issued must be the same. Floats
    may be off as ``is_rounding`` allows, where the bytes were kept; where they were not, a difference is reported.
    """
    dtypes = named_dtypes(program)
    for rank, (ours, theirs) in enumerate(zip(model.ranks, real.ranks, strict=True)):
        if (ours.error is None) != (theirs.error is None):
            return f"rank {rank} {'raises' if theirs.error else 'runs'} where lockstep {'raises' if ours.error else 'runs'}"
        if ours.collectives != theirs.collectives:
            return f"rank {rank} issues other collectives"
        for which in ("outputs", "inputs"):
            for i, (a, b) in enumerate(zip(getattr(ours, which), getattr(theirs, which), strict=True)):
                what = _differs(a, b, dtypes, _GEOMETRY if which == "outputs" else (*_GEOMETRY, "version"))
                if what is not None:
                    return f"{which[:-1]} {i} on rank {rank} differs in its {what}"
    return None


def _differs(model: TensorRecord, real: TensorRecord, dtypes: set[str], properties: Sequence[str]) -> str | None:
    for what in properties:
        if getattr(model, what) != getattr(real, what):
            return f"{what} ({getattr(real, what)}, not {getattr(model, what)})"
    return "values" if model.digest != real.digest and not is_rounding(model, real, dtypes) else None
