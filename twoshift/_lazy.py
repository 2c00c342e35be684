"""Names that are imported when they are first used, as a stub beside the module lists them."""

from __future__ import annotations

import ast
from pathlib import Path


def homes(file: str) -> dict[str, str]:
    """Each name in the stub of a package, and the module it comes from.

    Args:
        file: The ``__init__.py`` of the package; the stub is the ``__init__.pyi`` beside it.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
