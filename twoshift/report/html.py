"""Pages from templates: self-contained, and safe whatever names are in them."""

from __future__ import annotations

from importlib import resources
from typing import Any

from twoshift import __version__
from twoshift.errors import MissingExtra
from twoshift.report.columns import heading
from twoshift.report.numbers import decimal, typographic


def fill(template: str, **values: Any) -> str:
    """Fill a template; it has the style, the script and the version besides ``values``."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as e:
        raise MissingExtra("a page needs jinja2", cure="pip install 'twoshift[report]'") from e
    environment = Environment(
        loader=PackageLoader("twoshift.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"heading": heading, "signed": typographic, "decimal": decimal}
    files = resources.files("twoshift.report") / "templates"
    return environment.get_template(template).render(
        version=__version__,
        style=(files / "page.css").read_text(),
        script=(files / "page.js").read_text(),
        **values,
    )
