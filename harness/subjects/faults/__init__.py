"""Errors seeded on purpose, to prove that the harness sees them: each breaks the law it names, and that law alone must say so first."""

from __future__ import annotations

from harness.subjects.faults.collectives import FAULTS, Fault

__all__ = ["FAULTS", "Fault"]
