"""Read YAML files that users wrote: small ones, of plain values, that end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from twoshift.errors import SettingError, StorageError

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000  # after aliases are written out, of which a few lines can mean billions
DEEPEST = 20


def read_yaml(path: Path, what: str) -> Any:
    """The content of a YAML file.

    Args:
        path: The file.
        what: What it is, for messages: ``"recipe mine.yaml"``.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise StorageError(f"cannot read {what}", must_be="a file", cure="Check the path.")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise SettingError(what, must_be=f"at most {MOST_BYTES:,} bytes", got=f"{size:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise StorageError(f"cannot read {what}: {e.strerror or e}", cure="Check the path.") from e
    except UnicodeDecodeError as e:
        got = f"the byte {e.object[e.start]:#04x} at {e.start}"
        cure = "Save it as UTF-8 in your editor."
        raise SettingError(what, must_be="text in UTF-8", got=got, cure=cure) from e
    return parse_yaml(text, what)


def parse_yaml(text: str, what: str) -> Any:
    """What a YAML text says.

    Args:
        text: The text.
        what: What it is, for messages.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and _values(root, {}) > MOST_VALUES:
            raise SettingError(what, must_be=f"at most {MOST_VALUES:,} values, aliases written out")
        return yaml.safe_load(text)
    except (RecursionError, _Endless):
        raise SettingError(what, must_be=f"at most {DEEPEST} levels deep") from None
    except SettingError:
        raise
    # beside YAMLError, a tag such as !!timestamp raises what its constructor happens to raise
    except Exception as e:
        raise SettingError(f"{what} is not YAML: {str(e)[:500]}") from e


class _Endless(Exception):
    """Levels without end."""


def _values(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """Number of values below a node; a node that is used again counts again."""
    if depth > DEEPEST:
        raise _Endless
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in children for part in pair]
        known[id(node)] = 1 + sum(_values(child, known, depth + 1) for child in children)
    return known[id(node)]
