"""Hypothesis strategies that draw Programs; plural nouns, keyword-only options."""

from __future__ import annotations

from harness.strategies.collectives import collective_programs, divergent_programs
from harness.strategies.groups import group_lists
from harness.strategies.tensors import tensor_specs

__all__ = ["collective_programs", "divergent_programs", "group_lists", "tensor_specs"]
