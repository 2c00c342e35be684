"""Tables and paragraphs in Markdown, the same for every page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

LINE_LENGTH = 100


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] | None = None
) -> str:
    """A Markdown table, with a line break at its end.

    Args:
        heads: The heads of the columns.
        rows: One entry per column.
        numbers: Heads of the columns to align right; by default all but the first.
    """
    right = [bool(i) if numbers is None else head in numbers for i, head in enumerate(heads)]
    rule = "|" + "".join("---:|" if number else "---|" for number in right)
    return "\n".join([_line(heads), rule, *map(_line, rows), ""])


def _line(entries: Sequence[str]) -> str:
    # entries may be formatted, but must stay in their column
    cells = [re.sub(r"(?<!\\)\|", r"\\|", " ".join(entry.split("\n"))) for entry in entries]
    return f"| {' | '.join(cells).lstrip()} |"


def paragraph(text: str, indent: str = "") -> str:
    """Text broken into lines, each with an indent such as ``> ``."""
    width = LINE_LENGTH - len(indent)
    lines = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(lines, indent)
