"""The field arithmetic: exact where it claims to be, and blind to nothing it claims to see."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.executors.algebra import MAX_ERROR, P, REPRESENTABLE, Field, error_bound, trials_needed
from harness.spec.dtypes import DTYPES, represents

ALL = frozenset(DTYPES)
elements = st.integers(0, P - 1)
vectors = st.lists(elements, min_size=1, max_size=6).map(lambda xs: torch.tensor(xs, dtype=torch.int64))
dtypes = st.sampled_from(sorted(DTYPES))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_matmul_is_exact(seed: int, n: int, k: int, m: int) -> None:
    """A matrix product through 16-bit limbs equals the product over Python's integers, modulo P."""
    a = torch.randint(0, P, (n, k), generator=_generator(seed))
    b = torch.randint(0, P, (k, m), generator=_generator(seed + 1))
    expected = [[sum(int(a[i, q]) * int(b[q, j]) for q in range(k)) % P for j in range(m)] for i in range(n)]
    assert Field(seed, ALL).matmul(a, b).tolist() == expected


def test_matmul_is_exact_at_its_extreme() -> None:
    """The largest elements and a long inner dimension lose no bit."""
    a = torch.full((1, 4096), P - 1, dtype=torch.int64)
    assert int(Field(0, ALL).matmul(a, a.t())) == 4096 * (P - 1) ** 2 % P


@given(vectors)
def test_inverse(x: torch.Tensor) -> None:
    """Every element but 0 times its inverse is 1."""
    product = (x * Field(0, ALL).inverse(x)) % P
    assert product.tolist() == [int(v != 0) for v in x.tolist()]


@given(st.integers(-(2**40), 2**40), st.integers(0, 30), st.integers(1, 60))
def test_constants_are_the_rationals_they_stand_for(n: int, power: int, d: int) -> None:
    """Dyadic constants and n/d for small d map to that rational in the field, so that c * d gives n back."""
    field = Field(0, ALL)
    assert field.constant(n / 2**power) * pow(2, power) % P == field.constant(n) if float(n) / 2**power * 2**power == n else True
    assert field.constant(1 / d) * d % P == 1
    assert field.constant(float(Fraction(3, d))) * d % P == 3 % P


@given(dtypes, dtypes, st.integers(0, 5))
def test_narrowing_what_was_widened_is_the_identity(narrow: str, wide: str, seed: int) -> None:
    """A value of a narrow dtype, cast to one that represents it and back, is itself."""
    field = Field(seed, ALL)
    x = field.random((16,), (1,), narrow, _generator(seed))
    if represents(wide, narrow):
        assert torch.equal(field.cast(field.cast(x, narrow, wide), wide, narrow), x)


@given(dtypes, dtypes, st.integers(0, 5))
def test_casts_are_idempotent_and_seen(source: str, target: str, seed: int) -> None:
    """A lossy cast changes nearly every value, a second one to the same dtype none (unless it is one of the widest)."""
    field = Field(seed, frozenset({source, target}))
    x = field.random((4096,), (1,), source, _generator(seed))
    once = field.cast(x, source, target)
    if target not in ("int64", "float64"):
        assert torch.equal(field.cast(once, source, target), once)
    num_fixed = int((once == x).sum())
    if not represents(target, source):
        common = sum(represents(target, d) and represents(source, d) for d in {source, target})
        assert num_fixed <= 4096 * (REPRESENTABLE * 2 + 0.02) or common
    else:
        assert num_fixed == 4096


@given(dtypes, dtypes, st.permutations(range(8)))
def test_casts_commute_with_movement(source: str, target: str, order: list[int]) -> None:
    """Casting and then moving elements is moving and then casting."""
    field = Field(1, ALL)
    x = field.random((8,), (1,), source, _generator())
    assert torch.equal(field.cast(x, source, target)[order], field.cast(x[order], source, target))


@given(vectors, st.randoms(use_true_random=False))
def test_extrema_are_a_total_order(x: torch.Tensor, random: object) -> None:
    """The greatest is the same in any order of asking, and greatest and least of two are the two."""
    field = Field(3, ALL)
    y, z = x.flip(0), (x + 17) % P
    for greatest in (True, False):
        left = field.extremum(field.extremum(x, y, greatest=greatest), z, greatest=greatest)
        right = field.extremum(x, field.extremum(z, y, greatest=greatest), greatest=greatest)
        assert torch.equal(left, right)
    total = field.extremum(x, y, greatest=True) + field.extremum(x, y, greatest=False)
    assert torch.equal(total, x + y)


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
def test_reduction_in_two_parts(op: str) -> None:
    """Reducing a concatenation is the concatenation of reductions, which bucketing relies on."""
    field = Field(5, ALL)
    ranks = [torch.randint(0, P, (7,), generator=_generator(r)) for r in range(4)]
    whole = field.reduce(ranks, op)
    parts = torch.cat([field.reduce([r[:3] for r in ranks], op), field.reduce([r[3:] for r in ranks], op)])
    assert torch.equal(whole, parts)
    if op == "avg":
        assert torch.equal(whole * 4 % P, torch.stack(ranks).sum(0) % P)


def test_hash_values_are_field_elements_and_differ() -> None:
    """A keyed hash stays in the field, differs between keys and between values."""
    field = Field(0, ALL)
    x = torch.arange(100_000)
    a, b = field.hash(x, "relu"), field.hash(x, "exp")
    assert int(a.min()) >= 0 and int(a.max()) < P
    assert int((a == b).sum()) < 5
    assert a.unique().numel() > 99_990
    assert not torch.equal(Field(1, ALL).hash(x, "relu"), a)


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 12))
def test_trials_reach_the_bound(degree: int, hashes: int, narrow: int) -> None:
    """The stated number of trials brings the error below the limit, unless the most allowed do not suffice."""
    trials = trials_needed(degree, hashes, narrow)
    assert 2 <= trials <= 8
    assert trials == 8 or error_bound(degree, hashes, narrow) ** trials < MAX_ERROR
