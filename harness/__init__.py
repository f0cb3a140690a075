"""A test-and-verification harness for compiler correctness. Importing it imports no torch."""

from __future__ import annotations

from harness.errors import Deadlock, Divergence, HarnessError, InvalidProgram, UnknownSubject, Unsupported

__all__ = ["Deadlock", "Divergence", "HarnessError", "InvalidProgram", "UnknownSubject", "Unsupported"]
