"""Shared pages of memory: what a rank does, told to the controller, and which case it has done, told to the other ranks.

A rank that hangs inside a collective cannot answer; its board still says what it was doing. The memory is anonymous: nothing is left of
it when the processes are gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from typing import Final, NamedTuple

__all__ = ["Board", "Seen", "Turnstile", "anonymous_file"]

_SIZE: Final = 4096
_CASE, _SINCE, _LENGTH = 0, 1, 2
_TEXT_AT: Final = 24
_MOST_TEXT: Final = 1024
_PAUSE_S: Final = 5e-5

_FUTEX_CALL: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.byteorder == "little" else None
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1
_LIBC: Final = ctypes.CDLL(None)


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

    A rank that must wait sleeps on the number that the rank it waits for will write (a futex), so that waiting takes no core from others.

    Args:
        file: of the page that the ranks share; may be closed afterwards.
        rank, world_size: whose end this is.
    """

    def __init__(self, file: int, rank: int, world_size: int) -> None:
        size = 8 * 3 * world_size
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        page = mmap.mmap(file, size)
        cells = memoryview(page).cast("q")
        self._done, self._met, self._stopped = (cells[i * world_size : (i + 1) * world_size] for i in range(3))
        self._rank = rank
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self._addresses = {id(self._done): start, id(self._met): start + 8 * world_size}

    def done(self, case: int, *, stop: bool) -> None:
        """This rank has done ``case``, a number above 0; with ``stop`` no rank goes on with what follows it."""
        if stop:
            self._stopped[self._rank] = case
        self._tell(self._done, case)

    def enter(self, case: int, first: int) -> bool:
        """Wait until all ranks have done the case before ``case`` in a run that begins with ``first``; False where one of them stopped the run."""
        if case > first:
            self._await(self._done, case - 1)
        return not any(first <= stopped < case for stopped in self._stopped)

    def meet(self, case: int) -> None:
        """Within ``case``: wait until all ranks have come here."""
        self._tell(self._met, case)
        self._await(self._met, case)

    def _tell(self, cells: memoryview, number: int) -> None:
        cells[self._rank] = number
        _futex(self._addresses[id(cells)] + 8 * self._rank, _FUTEX_WAKE, _ALL)

    def _await(self, cells: memoryview, number: int) -> None:
        for rank in range(len(cells)):
            while (seen := cells[rank]) < number:
                _futex(self._addresses[id(cells)] + 8 * rank, _FUTEX_WAIT, seen)


def _futex(address: int, operation: int, value: int) -> None:
    """The system call on the low half of a number; where this machine's is not known, waiting is a short sleep."""
    if _FUTEX_CALL is None:
        if operation == _FUTEX_WAIT:
            time.sleep(_PAUSE_S)
        return
    _LIBC.syscall(ctypes.c_long(_FUTEX_CALL), ctypes.c_void_p(address), operation, value & 0xFFFFFFFF, None, None, 0)


def anonymous_file(name: str) -> int:
    """A file in memory that has no path."""
    return os.memfd_create(f"harness-{name}", os.MFD_CLOEXEC)
