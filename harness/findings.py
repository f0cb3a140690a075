"""Findings on disk: written whole or not at all, read back with every fault named."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
from importlib import metadata
from pathlib import Path

from harness.errors import InvalidProgram
from harness.ops import read_finding as parse_finding
from harness.ops import read_program as parse_program
from harness.spec.program import LIMITS, Program
from harness.spec.verdict import Finding, Signature, encode_finding

__all__ = ["environment", "file_name", "load_finding", "load_program", "store_finding", "write_atomically"]


def environment() -> dict[str, str]:
    """Versions of what a finding was seen with; torch's from its distribution, so that nothing is imported."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for distribution in ("torch", "compiler-harness", "hypothesis"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[distribution] = metadata.version(distribution)
    return versions


def file_name(signature: Signature) -> str:
    """A name that people can read and that is the same for the same fault: ``bucketing-inductor-all_gather-applies-1a2b3c4d.json``."""
    words = "-".join((signature.feature, signature.subject, signature.law, signature.kind))
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")[:80]
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=4).hexdigest()
    return f"{slug}-{digest}.json"


def store_finding(finding: Finding, folder: Path) -> Path:
    """Write a finding into ``folder`` (made where missing), replacing one of the same signature; its path is returned.

    Raises:
        OSError: the folder or file cannot be written; what was there stays whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(finding.signature)
    write_atomically(path, encode_finding(finding))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path``, flush it to disk, and rename it over ``path``."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_finding(path: Path) -> Finding:
    """Read a finding.

    Raises:
        InvalidProgram: naming the file, the field, what stood there and what may stand there.
        OSError: the file cannot be read.
    """
    try:
        return parse_finding(_read(path))
    except InvalidProgram as error:
        raise error.at(str(path)) from None


def load_program(path: Path) -> Program:
    """Read a Program from a file; a finding's file gives its Program.

    Raises:
        InvalidProgram: naming the file, the field, what stood there and what may stand there.
        OSError: the file cannot be read.
    """
    data = _read(path)
    try:
        return parse_program(data)
    except InvalidProgram as error:
        with contextlib.suppress(InvalidProgram):
            return parse_finding(data).program
        raise error.at(str(path)) from None


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > LIMITS.file_bytes:
        raise InvalidProgram("$", f"{size} bytes; at most {LIMITS.file_bytes} are read", source=str(path))
    return path.read_bytes()
