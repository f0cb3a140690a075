"""Shared pages of memory: what a rank does, told to the controller, and which case it has done, told to the other ranks.

A rank that hangs inside a collective cannot answer; its board still says what it was doing. The memory is anonymous: nothing is left of
it when the processes are gone.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Final, NamedTuple

__all__ = ["Board", "Seen", "Turnstile", "anonymous_file"]

_SIZE: Final = 4096
_CASE, _SINCE, _LENGTH = 0, 1, 2
_TEXT_AT: Final = 24
_MOST_TEXT: Final = 1024
_PAUSE_S: Final = 5e-5


class Seen(NamedTuple):
    """What a rank's board says.

    Attributes:
        case: its number, or 0 before the first.
        since: when it was begun, by ``time.monotonic``, which all processes of a machine share.
        place: where it is within the case, as ``transformed: all_reduce_1``.
    """

    case: int
    since: float
    place: str


class Board:
    """Maps the page of an anonymous file, which may be closed afterwards."""

    def __init__(self, file: int) -> None:
        if os.fstat(file).st_size < _SIZE:
            os.ftruncate(file, _SIZE)
        page = memoryview(mmap.mmap(file, _SIZE))
        self._numbers, self._times, self._text = page.cast("q"), page.cast("d"), page[_TEXT_AT:]

    def begin(self, case: int) -> None:
        """A case, numbered above 0, begins now."""
        self._times[_SINCE] = time.monotonic()  # before the number, so that no reader finds a case with the time of none
        self._numbers[_LENGTH] = 0
        self._numbers[_CASE] = case

    def at(self, place: str) -> None:
        """The case came to ``place``."""
        text = place.encode()[:_MOST_TEXT]
        self._text[: len(text)] = text
        self._numbers[_LENGTH] = len(text)

    def read(self) -> Seen:
        """What it says now; a place that is being written may be read half."""
        case, since = self._numbers[_CASE], self._times[_SINCE]
        return Seen(case, since, bytes(self._text[: self._numbers[_LENGTH]]).decode(errors="replace"))


class Turnstile:
    """Lets no rank go on before all ranks have come as far, so that no collective of one case, or of one graph, meets one of another.

    Args:
        file: of the page that the ranks share; may be closed afterwards.
        rank, world_size: whose end this is.
    """

    def __init__(self, file: int, rank: int, world_size: int) -> None:
        size = 8 * (2 * world_size + 1)
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._cells = memoryview(mmap.mmap(file, size)).cast("q")
        self._rank = rank
        self._world_size = world_size

    def done(self, case: int, *, stop: bool) -> None:
        """This rank has done ``case``, a number above 0; with ``stop`` no rank goes on with what follows it."""
        if stop:
            self._cells[self._world_size] = case
        self._cells[self._rank] = case

    def meet(self, case: int) -> None:
        """Within ``case``: wait until all ranks have come here."""
        cells, first = self._cells, self._world_size + 1
        cells[first + self._rank] = case
        while any(cells[first + rank] < case for rank in range(self._world_size)):
            time.sleep(_PAUSE_S)

    def wait(self, case: int) -> bool:
        """Wait until all ranks have done ``case``; False where one of them said that this, or by now a later one, is the end."""
        cells, ranks = self._cells, range(self._world_size)
        while any(cells[rank] < case for rank in ranks):
            time.sleep(_PAUSE_S)
        return cells[self._world_size] < case


def anonymous_file(name: str) -> int:
    """A file in memory that has no path."""
    return os.memfd_create(f"harness-{name}", os.MFD_CLOEXEC)
