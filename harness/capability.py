"""What this machine and this torch can do. Each answer is None, or the reason why not, as ``needs 4 CUDA devices, found 1``."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["auto_num_workers", "num_cuda_devices", "why_not_backend"]

_WORKER_BYTES = 3 * 2**30


def num_cuda_devices() -> int:
    """How many CUDA devices this process may use; ``CUDA_VISIBLE_DEVICES`` is respected."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def why_not_backend(backend: str, world_size: int) -> str | None:
    """Why a group of ``world_size`` ranks over ``gloo`` or ``nccl`` cannot be formed here; None where it can."""
    import torch.distributed as dist

    if backend not in ("gloo", "nccl"):
        return f"backend {backend!r}; must be gloo or nccl"
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"the installed torch has no {backend}"
    if backend == "gloo":
        return None
    found = num_cuda_devices()
    return None if found >= world_size else f"needs {world_size} CUDA device{'s' * (world_size > 1)}, found {found}"


def auto_num_workers(world_size: int, *, use_cuda: bool) -> int:
    """How many test processes this machine carries side by side.

    With CUDA as many as can each lease a device a rank, at least one; else one a core, as far as memory reaches.
    """
    if use_cuda and (devices := num_cuda_devices()):
        return max(devices // world_size, 1)
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(cores, memory // _WORKER_BYTES), 1)
