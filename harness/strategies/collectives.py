"""Programs of collectives, in all the shapes that stress bucketing.

A program is drawn as a tape: a header and a list of statements, each a few bytes. A builder reads the tape and adds what is possible
with the values that exist then, so that every tape gives a valid program, and deleting a statement or lowering a byte gives a
simpler one. What is in flight is known to the builder: it never reads or writes such memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

from hypothesis import strategies as st

from harness.spec.program import Program
from harness.strategies.builder import Options
from harness.strategies.divergence import DIVERGENCE, SIZELESS_KINDS, diverge, needs_sizeless
from harness.strategies.groups import GROUPS, groups_from
from harness.strategies.starts import KINDS, REDUCE_OPS
from harness.strategies.statements import HEADER, WIDTH, read_tape
from harness.strategies.tensors import ALL_DTYPES

__all__ = ["ALL_DTYPES", "KINDS", "REDUCE_OPS", "collective_programs", "divergent_programs"]

_MIN_STATEMENTS: Final = 1
_MAX_STATEMENTS: Final = 24


def collective_programs(
    *,
    world_sizes: Sequence[int] = (2,),
    max_collectives: int = 6,
    max_ops: int = 24,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[str] = ALL_DTYPES,
    reduce_ops: Sequence[str] = REDUCE_OPS,
    mutation: Literal["any", "epilogue"] = "any",
    divergent: bool = False,
) -> st.SearchStrategy[Program]:
    """Programs with up to ``max_collectives`` collectives, valid on all ranks by construction.

    Shrinks towards one collective on a contiguous input of one element.

    Args:
        world_sizes: to choose from, the simplest first.
        max_collectives: collectives started at most.
        max_ops: ops at most, waits included; below 5 no collective has room.
        kinds: of ``KINDS``; the first is drawn most often.
        dtypes: of inputs and casts, from ``DTYPES``, the simplest first. Comparisons, counts and indices have dtypes of their own.
        reduce_ops: of ``REDUCE_OPS``, the simplest first.
        mutation: ``any`` writes in place anywhere; ``epilogue`` only copies into inputs at the end, as functionalised graphs do.
        divergent: programs on which the ranks part, see ``divergent_programs``.

    Raises:
        ValueError: an option is empty or has a name that is unknown.
    """
    for name, given, known in (("kinds", kinds, KINDS), ("dtypes", dtypes, ALL_DTYPES), ("reduce_ops", reduce_ops, REDUCE_OPS)):
        if not given or not set(given) <= set(known):
            raise ValueError(f"{name}={tuple(given)!r}; must be some of {', '.join(known)}")
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"world_sizes={tuple(world_sizes)!r}; must be numbers of 1 or more")
    options = Options(tuple(kinds), tuple(dtypes), tuple(reduce_ops), max_collectives, max_ops, mutation == "any")
    return _programs(tuple(world_sizes), options, divergent)


@lru_cache(maxsize=256)
def _programs(world_sizes: tuple[int, ...], options: Options, divergent: bool) -> st.SearchStrategy[Program]:
    head = 1 + GROUPS + HEADER + (DIVERGENCE if divergent else 0)
    headers = st.binary(min_size=head, max_size=head)
    statements = st.lists(st.binary(min_size=WIDTH, max_size=WIDTH), min_size=_MIN_STATEMENTS, max_size=_MAX_STATEMENTS)

    def read(drawn: tuple[bytes, list[bytes]]) -> Program:
        header, tape = drawn
        world_size = world_sizes[header[0] % len(world_sizes)]
        groups = groups_from(world_size, header[1 : 1 + GROUPS])
        key, rest = header[1 + GROUPS : 1 + GROUPS + HEADER], header[1 + GROUPS + HEADER :]
        if not divergent:
            return read_tape(world_size, groups, options, key, tape)
        kinds = tuple(k for k in options.kinds if k in SIZELESS_KINDS) if needs_sizeless(rest) else ()
        limited = options._replace(kinds=kinds) if kinds else options
        return diverge(read_tape(world_size, groups, limited, key, tape), rest)

    return st.tuples(headers, statements).map(read)


def divergent_programs(*, world_sizes: Sequence[int] = (2, 3, 4)) -> st.SearchStrategy[Program]:
    """Programs marked ``divergent``: ranks part over a collective, or a group does not treat all ranks alike.

    A rank leaves a collective out, starts it later than the others or with another reduce op or source, or a group has unequal parts
    or lacks some ranks. What depends on such a collective is run by the ranks that have it, and is no output.

    Args:
        world_sizes: to choose from, the simplest first.
    """
    return collective_programs(world_sizes=world_sizes, divergent=True)
