"""The file that ``harness check`` is given: a stored Program, or Python that is traced into one."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from harness.errors import HarnessError, InvalidProgram
from harness.findings import load_program
from harness.spec.program import Program

if TYPE_CHECKING:
    from torch import Tensor

    from harness.executors.autograd import Case

__all__ = ["MAX_TRACED_WORLD_SIZE", "read_case", "read_source"]

MAX_TRACED_WORLD_SIZE: Final = 64


def read_source(path: Path) -> Case | Program:
    """What a Compiler is given: the Program of a ``.json`` file, or a ``.py`` file as it stands, with whatever Python is in it.

    The file has ``program(*tensors)`` and ``inputs(rank, world_size)``, and may have ``COMPILE`` (the name of a global function that is
    compiled instead of ``program``), ``num_backward`` (how often backward runs, 1 where left out) and ``backward_seed``.

    Raises:
        InvalidProgram: naming file and field or line, and what is wrong there.
        OSError: the file cannot be read.
    """
    if path.suffix != ".py":
        return read_case(path)
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    with contextlib.redirect_stdout(sys.stderr):
        _checked(path)
        from harness.executors.autograd import case_of_file

        with _blaming(path, "making its inputs"):
            return case_of_file(path)


def read_case(path: Path) -> Program:
    """The Program of a file.

    A ``.json`` file holds a Program or a Finding. A ``.py`` file has ``program(*tensors)`` and
    ``inputs(rank, world_size)``, and may have ``WORLD_SIZE`` (2 where left out) and ``COMPILE`` (the name of a global
    function that ``program`` calls; for passes over graphs the whole of ``program`` is traced all the same). It is run
    once a rank; what it prints goes to standard error.

    Raises:
        InvalidProgram: naming file and field, or for Python file and line, and what is wrong there.
        Unsupported: the traced function calls an operator that is not in the table.
        OSError: the file cannot be read.
    """
    if path.suffix == ".json":
        return load_program(path)
    if path.suffix != ".py":
        raise InvalidProgram(
            str(path), f"a {path.suffix or 'nameless'} file; must be a Program (.json) or Python (.py)"
        )
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    with contextlib.redirect_stdout(sys.stderr):
        return _traced(path)


def _checked(path: Path) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """The file's ``program``, ``inputs`` and ``WORLD_SIZE``."""
    with _blaming(path, "loading it"):
        module = _load(path)
    program, inputs = _function(module, path, "program"), _function(module, path, "inputs")
    world_size = getattr(module, "WORLD_SIZE", 2)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= MAX_TRACED_WORLD_SIZE:
        reason = f"{world_size!r}; must be a number of ranks from 1 to {MAX_TRACED_WORLD_SIZE}"
        raise InvalidProgram("WORLD_SIZE", reason, source=str(path))
    compiled = getattr(module, "COMPILE", None)
    if compiled is not None and not callable(getattr(module, str(compiled), None)):
        raise InvalidProgram("COMPILE", f"{compiled!r}; must be the name of a global function", source=str(path))
    return program, inputs, world_size


def _traced(path: Path) -> Program:
    program, inputs, world_size = _checked(path)
    from harness.graph import trace

    with _blaming(path, "tracing program"):
        return trace(program, _as_tuple(inputs), world_size, with_places=True)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"harness_case_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        signature = {"program": "program(*tensors)", "inputs": "inputs(rank, world_size)"}[name]
        seen = "is missing" if found is None else f"is a {type(found).__name__}"
        raise InvalidProgram(name, f"{seen}; must be a function {signature}", source=str(path))
    return found


def _as_tuple(inputs: Callable[..., Any]) -> Callable[[int, int], tuple[Tensor, ...]]:
    def call(rank: int, world_size: int) -> tuple[Tensor, ...]:
        given = inputs(rank, world_size)
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)

    return call


@contextlib.contextmanager
def _blaming(path: Path, doing: str) -> Iterator[None]:
    """Turn what the user's file raises into one line with its place in that file."""
    try:
        yield
    except HarnessError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split()) or "(no message)"
        where = f"{path}:{line}" if line else str(path)
        raise InvalidProgram(where, f"{type(error).__name__} while {doing}: {text[:400]}") from error


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the user's file that had a part in ``error``."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
    lines += [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return lines[-1] if lines else None
