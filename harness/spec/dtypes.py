"""Element types by name, and what can be said of them without torch."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["DTYPES", "DType", "promote", "represents"]


class DType(NamedTuple):
    """One element type.

    ``precision_bits`` counts the significant bits (the implicit one included for floats, the sign left out for
    integers); ``exponent`` is the range of powers of two, ``(lowest subnormal, highest)``, for floats.
    """

    name: str
    itemsize: int
    kind: str  # "float", "int", "uint" or "bool"
    precision_bits: int
    exponent: tuple[int, int] = (0, 0)


DTYPES: Final[dict[str, DType]] = {
    d.name: d
    for d in (
        DType("float64", 8, "float", 53, (-1074, 1023)),
        DType("float32", 4, "float", 24, (-149, 127)),
        DType("bfloat16", 2, "float", 8, (-133, 127)),
        DType("float16", 2, "float", 11, (-24, 15)),
        DType("float8_e4m3fn", 1, "float", 4, (-9, 8)),
        DType("float8_e5m2", 1, "float", 3, (-16, 15)),
        DType("int64", 8, "int", 63),
        DType("int32", 4, "int", 31),
        DType("int16", 2, "int", 15),
        DType("int8", 1, "int", 7),
        DType("uint8", 1, "uint", 8),
        DType("bool", 1, "bool", 1),
    )
}

_CATEGORY = {"bool": 0, "uint": 1, "int": 1, "float": 2}


def represents(wide: str, narrow: str) -> bool:
    """Whether every value of ``narrow`` is a value of ``wide``, so that the cast between them is the identity."""
    w, n = DTYPES[wide], DTYPES[narrow]
    if w.name == n.name:
        return True
    if w.kind == "bool":
        return False
    if n.kind == "bool":
        return True
    if n.kind == "float":
        return (
            w.kind == "float"
            and w.precision_bits >= n.precision_bits
            and w.exponent[0] <= n.exponent[0]
            and w.exponent[1] >= n.exponent[1]
        )
    if w.kind == "float":
        return w.precision_bits >= n.precision_bits and w.exponent[1] >= n.precision_bits
    if w.kind == "uint":
        return n.kind == "uint" and w.precision_bits >= n.precision_bits
    return w.precision_bits >= n.precision_bits


def promote(a: str, b: str) -> str:
    """The dtype of a pointwise operation on two tensors of one or more dimensions each.

    Source: ``torch.promote_types`` (torch 2.13.0); the test compares the whole table with it.

    Raises:
        KeyError: for a pair that torch refuses to promote (float8 with anything else).
    """
    x, y = DTYPES[a], DTYPES[b]
    if a == b:
        return a
    if a.startswith("float8") or b.startswith("float8"):
        raise KeyError(f"no promotion between {a} and {b}")
    if _CATEGORY[x.kind] != _CATEGORY[y.kind]:
        return a if _CATEGORY[x.kind] > _CATEGORY[y.kind] else b
    if x.kind == "float":
        if {a, b} == {"bfloat16", "float16"}:
            return "float32"
        return a if x.itemsize > y.itemsize else b
    if x.kind != y.kind:
        signed, unsigned = (x, y) if x.kind == "int" else (y, x)
        return signed.name if signed.itemsize > unsigned.itemsize else "int16"
    return a if x.itemsize > y.itemsize else b
