"""Tables and progress for the command line: with rich where it is installed, else plain text."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

# Looked for here, and imported where it draws: it would be half of what importing mha_ext takes.
HAVE_RICH = importlib.util.find_spec("rich") is not None

Row = Sequence[str] | None  # None draws a line


class Advance(Protocol):
    """What `progress` gives: called with the name of the step that begins."""

    def __call__(self, step: str, /) -> None: ...


def plain_table(headers: Sequence[str], rows: Sequence[Row]) -> str:
    """The table as aligned text: the first column to the left, numbers to the right.

    A header may have several lines.
    """
    header_lines = [header.split("\n") for header in headers]
    height = max(len(lines) for lines in header_lines)
    top = [
        [([""] * (height - len(lines)) + lines)[line] for lines in header_lines]
        for line in range(height)
    ]
    cells = [*top, *(row for row in rows if row is not None)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def text(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([first, *others]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [rule if row is None else text(row) for row in rows]
    return "\n".join([*(text(row) for row in top), rule, *body])


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Row], file: TextIO | None = None
) -> None:
    """Prints a table: with rich on a terminal that is wide enough, as plain text elsewhere."""
    file = file or sys.stdout
    if HAVE_RICH and file.isatty() and print_rich_table(title, headers, rows, file):
        return
    print(f"{title}\n\n{plain_table(headers, rows)}\n", file=file, flush=True)


def print_rich_table(title: str, headers: Sequence[str], rows: Sequence[Row], file: TextIO) -> bool:
    """Prints a table with rich; where the terminal is narrower, nothing, and it returns False."""
    import rich.box
    import rich.console
    import rich.markup
    import rich.table

    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for column, header in enumerate(headers):
        table.add_column(
            header, justify="right" if column else "left", no_wrap=True, vertical="bottom"
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            style = "bold" if row[0].strip() == "mha_ext" else None
            table.add_row(*(rich.markup.escape(cell) for cell in row), style=style)
    console = rich.console.Console(file=file)
    anywhere = console.options.update(width=1 << 16)
    if console.measure(table, options=anywhere).maximum > console.width:
        return False
    console.print(table)
    return True


@contextmanager
def progress(steps: int) -> Iterator[Advance]:
    """Shows on stderr how far it is: a bar on a terminal, elsewhere a line for every step."""
    if HAVE_RICH and sys.stderr.isatty():
        import rich.console
        import rich.progress

        with rich.progress.Progress(
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=rich.console.Console(stderr=True),
            transient=True,
            auto_refresh=False,  # a thread that draws would disturb what is being timed
        ) as bar:
            task = bar.add_task("", total=steps)
            started = False

            def advance(step: str, /) -> None:
                nonlocal started
                bar.update(task, description=step, advance=1 if started else 0, refresh=True)
                started = True

            yield advance
        return

    done = 0

    def announce(step: str, /) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{steps}] {step}", file=sys.stderr, flush=True)

    yield announce


def check_output(path: str | Path) -> None:
    """Raises a ValueError where a file cannot be written, before anything is measured for it."""
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ValueError(f"the folder of {path} does not exist")
    try:
        folder, there = place.is_dir(), place.exists()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    if folder:
        raise ValueError(f"{path} is a folder; name a file in it")
    if not os.access(place if there else place.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written; name a file where that is allowed")
