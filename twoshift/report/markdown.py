"""Names of records in Markdown: shown as they are, whatever characters they have."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\`*\[\]<>|#~$]|(?<!\w)_|_(?!\w)")


def plain(text: str) -> str:
    """Text for one line of Markdown, a cell of a table or a heading, with nothing that formats."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))
