"""Lockstep's second arithmetic: values in a prime field, so that equality of two graphs holds for all inputs.

Every tensor has a *concrete* half in its true dtype and a *field* half, an int64 tensor of the same shape and strides whose
elements lie in ``[0, P)`` with ``P = 2**31 - 1``. Inputs are drawn uniformly; each operator acts on field halves as follows.

==========  =========================================================================================================
view, move  the same operator, run on the field half, so that aliasing and mutation are real
arithmetic  exact modulo P: add, sub, mul, neg, division by the inverse, sums, means, matrix products
cast        the identity where the target represents every source value, else an elementwise keyed hash onto the target's
            *representable set*; values in that set are fixed, so that narrowing what was widened is the identity
pointwise   an elementwise hash keyed by the operator and its constants, without position, so that it commutes with movement
opaque      a hash of all operands with their positions
max, min    the operand whose keyed hash is greatest (least): a random total order, so associative and commutative
bool        comparisons and masks come from the concrete half: they are control, not values
==========  =========================================================================================================

**Probability of error.** Let two graphs differ as functions in one output element. Up to hashes both elements are rational
functions of the inputs of degree at most D (numerator and denominator together), so by the Schwartz-Zippel lemma a random
point makes them agree with probability at most 2D/P. A hash is modelled as a random function; it hides a difference
between its arguments with probability at most 1/P besides, and each of the H hash operators may be the place, which gives
``(1 + H) * 2D/P`` a trial. A narrowing cast fixes a fraction ``REPRESENTABLE = 2**-10`` of all values for each of the K dtypes
around that the target represents, so that a graph which wrongly leaves one out goes unseen with probability at most
``K * 2**-10`` on one element. Trials are independent, hence ``error_bound(D, H, K) ** trials`` (K = 0 where nothing is
narrowed); ``trials_needed`` gives the number that makes this smaller than ``1e-12``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from harness.spec.dtypes import represents

__all__ = ["MAX_ERROR", "P", "REPRESENTABLE", "Field", "error_bound", "trials_needed"]

P: Final = 2**31 - 1
REPRESENTABLE: Final = 2.0**-10
MAX_ERROR: Final = 1e-12

_LOW: Final = 2**10 - 1
_MASK: Final = 2**31 - 1
_C1: Final = 0x2545F4914F6CDD1D
_C2: Final = 0x1B873593CC9E2D51
_LIMB: Final = 16
_WIDEST: Final = frozenset({"float64", "int64"})


def error_bound(degree: int, num_hashes: int, num_narrow: int) -> float:
    """The probability that one trial misses a difference in one element, by the derivation above; at most 1."""
    return min(1.0, max((1 + num_hashes) * 2 * degree / P, num_narrow * REPRESENTABLE))


def trials_needed(degree: int, num_hashes: int, num_narrow: int, *, most: int = 8) -> int:
    """How many trials bring the error below ``MAX_ERROR``; from 2 to ``most``."""
    bound = error_bound(degree, num_hashes, num_narrow)
    trials = 2
    while bound**trials >= MAX_ERROR and trials < most:
        trials += 1
    return trials


class Field:
    """The arithmetic of one trial: its keys are drawn from ``seed``; two Fields of the same arguments are the same functions.

    Args:
        seed: of all keys.
        dtypes: the names of all dtypes that occur in the graphs to be compared: casts recognise values of these.

    Attributes:
        poison: draws what memory holds that nobody wrote; each run gets one of its own, so that a result which depends on
            such memory differs between two runs.
    """

    def __init__(self, seed: int, dtypes: frozenset[str]) -> None:
        self.seed = seed
        self._keys: dict[object, int] = {}
        self._affine: dict[str, tuple[int, int, int]] = {}
        self._within: dict[str, tuple[str, ...]] = {}
        self._dtypes = tuple(sorted(dtypes))
        self.poison = torch.Generator()

    def key(self, *parts: object) -> int:
        """A 62-bit key that depends on the seed and ``parts`` alone."""
        key = self._keys.get(parts)
        if key is None:
            digest = hashlib.blake2b(repr((self.seed, parts)).encode(), digest_size=8).digest()
            key = self._keys[parts] = int.from_bytes(digest, "little") >> 2
        return key

    def hash(self, x: Tensor, *parts: object) -> Tensor:
        """An elementwise keyed hash of ``x`` into the field."""
        return _mix(x, self.key(*parts)).bitwise_and_(_MASK).remainder_(P)

    def order(self, x: Tensor) -> Tensor:
        """A key an element, whose order is the random total order that max and min select by."""
        return _mix(x, self.key("order"))

    def constant(self, value: float | int | bool) -> int:
        """A Python number as a field element: dyadic numbers exactly, n/d for small d as that rational."""
        if isinstance(value, float) and not math.isfinite(value):
            return self.key("constant", str(value)) % P
        return _rational(value)

    def random(self, size: Sequence[int], stride: Sequence[int], dtype: str, generator: torch.Generator) -> Tensor:
        """Uniform values of the given geometry, in the representable set of ``dtype`` where that is narrow."""
        out = torch.empty_strided(size, stride, dtype=torch.int64)
        out.random_(0, P, generator=generator)
        return self._representable(out, dtype)

    def cast(self, x: Tensor, source: str, target: str) -> Tensor:
        """``x``, whose values are of dtype ``source``, as ``target``; may return ``x`` itself."""
        if source == target or represents(target, source):
            return x
        fixed = None
        for dtype in self._narrow_within(target):
            a, b, _ = self._affine_of(dtype)
            member = (x * a).add_(b).remainder_(P).bitwise_and_(_LOW).eq_(0)
            fixed = member if fixed is None else fixed.bitwise_or_(member)
        image = self._representable(self.hash(x, "cast", target), target)
        return image if fixed is None else torch.where(fixed.bool(), x, image)

    def _narrow_within(self, target: str) -> tuple[str, ...]:
        found = self._within.get(target)
        if found is None:
            within = {target, *(d for d in self._dtypes if represents(target, d))}
            found = self._within[target] = tuple(sorted(within - _WIDEST))
        return found

    def _representable(self, x: Tensor, dtype: str) -> Tensor:
        if dtype in _WIDEST:
            return x
        _, b, inverse = self._affine_of(dtype)
        return x.bitwise_and_(~_LOW).sub_(b).mul_(inverse).remainder_(P)

    def _affine_of(self, dtype: str) -> tuple[int, int, int]:
        """``(a, b, 1/a)``: x is representable in ``dtype`` where the low bits of ``(a*x + b) mod P`` are 0."""
        found = self._affine.get(dtype)
        if found is None:
            a = self.key("affine", dtype) % (P - 1) + 1
            found = self._affine[dtype] = (a, self.key("affine", dtype, "b") % P, pow(a, P - 2, P))
        return found

    def inverse(self, x: Tensor) -> Tensor:
        """The inverse of each element, by Fermat's little theorem; 0 for 0."""
        result, base, exponent = torch.ones_like(x), x.clone(), P - 2
        while exponent:
            if exponent & 1:
                result.mul_(base).remainder_(P)
            base.mul_(base).remainder_(P)
            exponent >>= 1
        return result

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """The exact product of two matrices (or batches of them), by 16-bit limbs through float64; inner size below 2**20."""
        low = (1 << _LIMB) - 1
        a_hi, a_lo = (a >> _LIMB).double(), (a & low).double()
        b_hi, b_lo = (b >> _LIMB).double(), (b & low).double()
        hi = (a_hi @ b_hi).long().remainder_(P)
        mid = (a_hi @ b_lo + a_lo @ b_hi).long().remainder_(P)
        lo = (a_lo @ b_lo).long()
        return hi.mul_(1 << _LIMB).add_(mid).remainder_(P).mul_(1 << _LIMB).add_(lo).remainder_(P)

    def extremum(self, a: Tensor, b: Tensor, *, greatest: bool) -> Tensor:
        """Of each pair the one that is later (earlier) in the random total order."""
        ka, kb = self.order(a), self.order(b)
        return torch.where(ka >= kb if greatest else ka <= kb, a, b)

    def extremum_dims(self, x: Tensor, dims: Sequence[int], keepdim: bool, *, greatest: bool) -> Tensor:
        """The extremum over ``dims``."""
        for dim in sorted((d % max(x.dim(), 1) for d in dims), reverse=True):
            if x.dim() == 0:
                return x.clone()
            keys = self.order(x)
            index = (keys.argmax(dim, keepdim=True)) if greatest else keys.argmin(dim, keepdim=True)
            x = x.gather(dim, index)
            if not keepdim:
                x = x.squeeze(dim)
        return x

    def product(self, x: Tensor, dim: int = 0) -> Tensor:
        """The product along one dimension."""
        result = torch.ones_like(x.select(dim, 0))
        for i in range(x.shape[dim]):
            result = result.mul_(x.select(dim, i)).remainder_(P)
        return result

    def reduce(self, values: Sequence[Tensor], op: str) -> Tensor:
        """What a reducing collective does to one field half a rank, in rank order."""
        result = values[0].clone()
        for value in values[1:]:
            if op in ("sum", "avg"):
                result.add_(value)
            elif op == "product":
                result.mul_(value).remainder_(P)
            else:
                result = self.extremum(result, value, greatest=op == "max")
        if op == "avg":
            return result.remainder_(P).mul_(pow(len(values), P - 2, P)).remainder_(P)
        return result.remainder_(P) if op == "sum" else result

    def opaque(self, operands: Sequence[Tensor], shape: Sequence[int], *parts: object) -> Tensor:
        """Every element of the result depends on all operands, on its own position and on ``parts``."""
        total = 0
        for k, operand in enumerate(operands):
            flat = operand.reshape(-1)
            position = torch.arange(flat.numel(), dtype=torch.int64)
            total += int(self.hash(flat + position.mul_(self.key("position", k) % P).remainder_(P), "opaque", k).sum())
        numel = 1
        for size in shape:
            numel *= size
        out = torch.arange(numel, dtype=torch.int64).add_(total % P).remainder_(P)
        return self.hash(out, "opaque", tuple(map(int, shape)), *parts).reshape(tuple(shape))


@lru_cache(maxsize=4096)
def _rational(value: float | int | bool) -> int:
    """A finite number as a field element."""
    if isinstance(value, int):
        return value % P
    small = Fraction(value).limit_denominator(1024)
    exact = small if float(small) == value else Fraction(value)
    return exact.numerator % P * pow(exact.denominator % P, P - 2, P) % P


def _mix(x: Tensor, key: int) -> Tensor:
    y = x * _C1
    y.add_(key)
    y.bitwise_xor_(y >> 31)
    y.mul_(_C2)
    return y.bitwise_xor_(y >> 29)

