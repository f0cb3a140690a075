"""The one way to torch's private names: torch moves them between releases, and then this says so."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import Unsupported

__all__ = ["bucket_dtypes", "group_rank", "private"]


@lru_cache(maxsize=None)
def private(module: str, name: str) -> Any:
    """The attribute ``name`` of torch's module ``module``.

    Raises:
        Unsupported: the installed torch has no such module, or no such name in it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{module}.{name}", None, f"torch {torch.__version__} lacks it ({error})") from None


def group_rank(name: str) -> int:
    """This process's rank within the group that c10d knows by ``name``."""
    return dist.get_rank(private("torch.distributed.distributed_c10d", "_resolve_process_group")(name))


def bucket_dtypes() -> tuple[torch.dtype, ...]:
    """The table by which the bucketing operators of the installed torch number dtypes."""
    return tuple(private("torch._inductor.fx_passes.bucketing", "_ALL_DTYPES"))
