"""The one way to torch's private names: torch moves them between releases, and then this says so."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from harness.errors import Unsupported

__all__ = ["private"]


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
