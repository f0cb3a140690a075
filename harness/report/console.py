"""Output of the command line: JSON lines for programs; tables, a progress bar and plain lines for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.spec.protocols import OptionValue
from harness.spec.verdict import Reason, Verdict

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["EVENT_SCHEMA_VERSION", "Output", "Row", "reason_line", "variant_name", "verdict_word"]

EVENT_SCHEMA_VERSION: Final = 1
_PLAIN_WIDTH: Final = 200
_PLAIN_EVERY_SECONDS: Final = 10.0
_MAX_LISTED: Final = 4


class Row(msgspec.Struct, frozen=True):
    """One judged setting of a subject.

    Attributes:
        variant: its name for people.
        verdict: on the program.
        known: for every failing reason the id of the ledger's fault, or None.
    """

    variant: str
    verdict: Verdict
    known: tuple[str | None, ...] = ()

    def as_event(self) -> dict[str, Any]:
        """The fields of a ``verdict`` event."""
        fields: dict[str, Any] = {
            "variant": self.variant,
            "status": self.verdict.status,
            "strength": self.verdict.strength,
            "num_fired": self.verdict.num_fired,
            "vacuous": self.verdict.is_vacuous,
            "reasons": msgspec.to_builtins(self.verdict.reasons),
            "notes": msgspec.to_builtins(self.verdict.notes),
            "known": sorted({i for i in self.known if i is not None}),
        }
        return fields


class Output:
    """Where all output goes: events where JSON is asked for, else text.

    Args:
        as_json: one JSON object a line, nothing else.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        terminal = sys.stdout.isatty()
        self.console = Console(
            file=sys.stdout, width=None if terminal else _PLAIN_WIDTH, highlight=False, markup=False, emoji=False
        )

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches."""
        return self.console.is_terminal and not self.as_json

    def event(self, name: str, /, **fields: Any) -> None:
        """One JSON line, where JSON is asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps({"schema_version": EVENT_SCHEMA_VERSION, "event": name, **fields}) + "\n")
            sys.stdout.flush()

    def line(self, text: str = "", style: str | None = None) -> None:
        """One line of text, not wrapped, where text is asked for."""
        if not self.as_json:
            self.console.print(text, style=style, soft_wrap=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns, the numbers' headers beginning with ``#``; framed on a terminal only."""
        if self.as_json or not rows:
            return
        if not self.console.is_terminal:
            widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
            for row in (header, *rows):
                text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                self.line(text.rstrip())
            return
        table = Table(show_edge=False, header_style="bold")
        for name in header:
            table.add_column(name, justify="right" if name.startswith("#") else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def verdicts(self, rows: Sequence[Row]) -> None:
        """A table of verdicts, then what each failing or undecided one has to say, the same reasons once."""
        self.table(
            ("variant", "verdict", "strength", "#fired", "known as"),
            [
                (
                    row.variant,
                    verdict_word(row.verdict),
                    "" if row.verdict.is_vacuous else row.verdict.strength or "",
                    str(row.verdict.num_fired),
                    ", ".join(sorted({i for i in row.known if i is not None})),
                )
                for row in rows
            ],
        )
        said: dict[tuple[Reason, ...], list[Row]] = {}
        for row in rows:
            if row.verdict.reasons:
                said.setdefault(tuple(replace(r, ranks=()) for r in row.verdict.reasons), []).append(row)
        for alike in said.values():
            self.line()
            self.line(_listed([row.variant for row in alike]), style="bold")
            for reason in alike[0].verdict.reasons:
                self.line("  " + reason_line(reason), style="red" if reason.status == "FAIL" else "yellow")
                for rank in reason.ranks:
                    self.line(indent(rank, "    "))

    def progress(self, total: float) -> Bar:
        """A bar where a person watches, plain lines elsewhere, nothing with JSON."""
        return Bar(self, total)


class Bar:
    """Shows how far a hunt is; a context manager."""

    def __init__(self, output: Output, total: float) -> None:
        self._output = output
        self._last = time.monotonic()
        self._shown = 0.0
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        if output.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=output.console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Bar:
        self._context: AbstractContextManager[Any] = self._bar if self._bar is not None else nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def update(self, done: float, text: str) -> None:
        """``done`` of the total, and what to say about it."""
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            if now - self._shown > 0.1:
                self._shown = now
                self._bar.update(self._task, completed=done, description=text)
        elif now - self._last >= _PLAIN_EVERY_SECONDS:
            self._last = now
            self._output.line(text)


def verdict_word(verdict: Verdict) -> str:
    """``FAIL``, ``INCONCLUSIVE``, ``PASS``, or ``vacuous`` for a PASS on which nothing happened."""
    return "vacuous" if verdict.is_vacuous else verdict.status


def reason_line(reason: Reason) -> str:
    """The law, where it broke, what was expected, seen and allowed."""
    where = [
        f"{name} {value}"
        for name, value in (("rank", reason.rank), ("node", reason.node), ("index", reason.index))
        if value is not None
    ]
    said = [
        f"{name}: {_short(value)}"
        for name, value in (("expected", reason.expected), ("seen", reason.seen), ("allowed", reason.allowed))
        if value is not None and " ".join(value.split()) not in reason.message and value != "no error"
    ]
    place = f" [{', '.join(where)}]" if where else ""
    return f"{reason.law} ({reason.kind}): {reason.message}{place}" + "".join(f"; {part}" for part in said)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."


def variant_name(label: str, options: Mapping[str, OptionValue]) -> str:
    """The label, with those options that it does not show."""
    extra = [
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in options.items()
        if value is not None and value is not False and str(value) not in label
    ]
    return " ".join((label, *extra))
