"""What the documents show: fenced blocks of code, and command lines in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NESTED = re.compile(r"^````.*?^````$", re.MULTILINE | re.DOTALL)  # a document in the document
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, *languages: str) -> list[str]:
    """The code of every block in one of the languages."""
    text = NESTED.sub("", (ROOT / document).read_text())
    return [code for language, code in FENCE.findall(text) if language in languages]


def run_python(document: str, **given: object) -> dict[str, object]:
    """Execute all Python of a document, in one namespace that holds what is given."""
    space: dict[str, object] = {"__name__": "__document__", **given}
    for code in blocks(document, "python"):
        exec(compile(code, document, "exec"), space)
    return space


def commands(document: str) -> list[list[str]]:
    """Arguments of every ``twoshift`` line; a backslash goes on in the next line."""
    lines = "\n".join(blocks(document, "console", "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [rest for program, *rest in filter(None, words) if program == "twoshift"]
