"""Leases of devices, so that several test processes, and several users of one machine, never share one.

A lease is a lock on a file named after the device. The kernel gives it up when the process that holds it ends, however it does.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from harness.errors import HarnessError

__all__ = ["NoDevice", "cuda_identities", "lease"]

_PAUSE_S: Final = 0.1


class NoDevice(HarnessError):
    """Too few devices are free.

    Cause: other processes hold leases for longer than was waited. Remedy: wait, or use fewer ranks or workers.
    """


def cuda_identities() -> tuple[str, ...]:
    """What the CUDA devices that this process sees are called on the whole machine, in the order of their indices."""
    import torch

    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


@contextmanager
def lease(identities: Sequence[str], count: int, *, wait_s: float = 600.0, folder: Path | None = None) -> Iterator[tuple[int, ...]]:
    """Hold ``count`` of the devices; gives their positions in ``identities``.

    All are taken at once or none, so that two that wait for several devices cannot block each other.

    Args:
        identities: one a device, the same for every process that may use it.
        count: how many.
        wait_s: how long to wait for them.
        folder: of the lock files, the same for all users; in the folder for temporary files where left out.

    Raises:
        NoDevice: there are fewer devices, or too few became free in time.
    """
    if count > len(identities):
        raise NoDevice(f"needs {count} devices, found {len(identities)}")
    where = folder or Path(tempfile.gettempdir()) / "harness-leases"
    where.mkdir(exist_ok=True, parents=True)
    with suppress(PermissionError):
        where.chmod(0o1777)
    end = time.monotonic() + wait_s
    while (held := _take(where, identities, count)) is None:
        if time.monotonic() >= end:
            raise NoDevice(f"needs {count} of {len(identities)} devices; they were not free for {wait_s:g} s")
        time.sleep(_PAUSE_S)
    try:
        yield tuple(held)
    finally:
        for lock in held.values():
            lock.release()


def _take(folder: Path, identities: Sequence[str], count: int) -> dict[int, FileLock] | None:
    held: dict[int, FileLock] = {}
    for i, identity in enumerate(identities):
        if len(held) == count:
            break
        lock = FileLock(folder / f"{identity}.lock", mode=0o666, blocking=False)
        with suppress(Timeout, PermissionError):
            lock.acquire()
            with suppress(PermissionError):
                os.chmod(lock.lock_file, 0o666)
            held[i] = lock
    if len(held) == count:
        return held
    for lock in held.values():
        lock.release()
    return None
