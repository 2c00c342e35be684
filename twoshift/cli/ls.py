"""``twoshift ls``: methods, models, data sets, streams, estimators, adapters by name; alarms."""

from __future__ import annotations

import inspect
import json
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import AsJson, one_of, tell, when_stopped
from twoshift.errors import SettingError, UnknownName
from twoshift.registry import did_you_mean, documented, near_miss, signature_settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twoshift.registry import Registry

EXAMPLE = "Example: twoshift ls methods tent"
ALARMS = "alarms"  # what a watch wrote to a folder, not a kind of things to choose from
RECOMMENDED = "recommended"  # a function and a preset: what users look for among the methods


class Kind(StrEnum):
    """Kinds of things to list."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    corruptions = "corruptions"
    orders = "orders"
    schedules = "schedules"
    estimators = "estimators"
    adapters = "adapters"


PAGES = {  # where the documentation describes them; a method has a page of its own
    Kind.models: "models.md",
    Kind.datasets: "data.md",
    Kind.corruptions: "data.md",
    Kind.orders: "data.md",
    Kind.schedules: "data.md",
    Kind.estimators: "estimators.md",
    Kind.adapters: "method.md",
}


@when_stopped("Nothing was changed.")
def ls_command(
    kind: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(Kind)}, by default all of them; or {ALARMS}"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="One of them: what it needs, and its settings; the folder of alarms"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List methods, models, data sets, what streams are made of, ...; or describe one."""
    if kind == ALARMS:
        _show_alarms(name, as_json)
        return
    kinds = list(Kind) if kind is None else [_kind(kind)]
    if name is None:
        rows = {k: entries(k) for k in kinds}
        shown: list[RenderableType] = [] if as_json else _lines(rows)
        content = [row for found in rows.values() for row in found]
    else:
        content = [details(kinds[0], name)]
        shown = [] if as_json else _page(content[0])
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in shown:
        console.print(line, no_wrap=name is None, overflow="ellipsis" if name is None else None)
    if name is not None:  # as it is: a path that was broken into lines could not be copied
        console.print("\n[bold]card[/] ", content[0]["card"], soft_wrap=True)


def _show_alarms(folder: str | None, as_json: bool) -> None:
    """Print the alarms that a watch or a guard wrote to a folder."""
    if folder is None:
        cure = "Name the folder: twoshift ls alarms DIR."
        raise SettingError("the folder of alarms", must_be="given", cure=cure)
    from twoshift.watch.alarms import read_log

    alarms, bad = read_log(folder)
    if bad:
        tell(f"{bad} {'line' if bad == 1 else 'lines'} could not be read.", "yellow")
    if as_json:
        typer.echo(json.dumps(alarms, indent=2))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for alarm in alarms:
        over = "now" if alarm["ended"] is None else f"image {alarm['ended']}"
        where = f"{alarm['stream']}, " if alarm["stream"] else ""
        heading = f"  {where}image {alarm['since']} to {over}, {float(alarm['sure']):.1%} sure"
        console.print(Text.assemble((str(alarm["kind"]), "bold red"), heading))
        console.print(Text(f"  {alarm['time']}  {alarm['message']}. {alarm['advice']}"))
    if not alarms:
        console.print("No alarms.")


def _kind(text: str) -> Kind:
    """A kind by name; of a name that is no kind but listed, it says where."""
    is_near = text in list(Kind) or did_you_mean(text, Kind)
    for kind in () if is_near else Kind:
        if text in _names(kind):
            raise UnknownName(f"unknown kind {text!r}", cure=f"Type: twoshift ls {kind} {text}")
    return Kind(one_of("kind", text, [*Kind, ALARMS]))


def _names(kind: Kind) -> list[str]:
    extra = [RECOMMENDED] if kind is Kind.methods else []
    return sorted([*_registry(kind), *extra])


def _registry(kind: Kind) -> Registry[Any]:
    of_data = {Kind.corruptions, Kind.orders, Kind.schedules}
    module = "data" if kind is Kind.datasets else f"data.{kind}" if kind in of_data else kind
    return getattr(import_module(f"twoshift.{module}"), kind)


def entries(kind: Kind) -> list[dict[str, Any]]:
    """Name, description and settings of every entry of a kind; for methods also their needs."""
    return [_row(kind, name) for name in _names(kind)]


def details(kind: Kind, name: str) -> dict[str, Any]:
    """A row of `entries`, with the meaning of each setting and where to read on."""
    if name not in (known := _names(kind)):
        what = f"unknown {_registry(kind).kind} {name!r}"
        raise UnknownName(what, cure=near_miss(name, known))
    row = _row(kind, name)
    meanings = {**_shared_meanings(kind), **documented(_entry(kind, name))}
    row["meanings"] = {s: meanings.get(s, "").replace("`", "") for s in row["settings"]}
    if name == RECOMMENDED:
        row["use"] = f"twoshift run --source DIR --preset {RECOMMENDED}"
    row["card"] = _card(kind, name)
    return row


def _row(kind: Kind, name: str) -> dict[str, Any]:
    entry = _entry(kind, name)
    row = {
        "kind": _registry(kind).kind,
        "name": name,
        "description": (inspect.getdoc(entry) or "").splitlines()[0],
        "settings": signature_settings(entry),
    }
    if kind is not Kind.methods:
        return row
    if name == RECOMMENDED:
        needs = ["a calibration: twoshift calibrate"]
        return row | {"title": RECOMMENDED, "reference": "this project", "needs": needs}
    return row | {"title": entry.title, "reference": entry.reference, "needs": sorted(entry.needs)}


def _entry(kind: Kind, name: str) -> Any:
    if kind is Kind.methods and name == RECOMMENDED:
        from twoshift.recommend import recommended

        return recommended
    return _registry(kind)[name]


def _shared_meanings(kind: Kind) -> dict[str, str]:
    """Of settings that several entries have: they are explained once."""
    from twoshift.train.recipes import Decoding

    registry = _registry(kind)
    shared = documented(Decoding) if kind is Kind.datasets else {}
    for name in registry:
        shared |= documented(registry[name])
    return shared


def _card(kind: Kind, name: str) -> str:
    """Where the documentation is: in this clone, or in the repository."""
    page = "beyond.md" if name == RECOMMENDED else PAGES.get(kind, f"methods/{name}.md")
    here = Path(__file__).parents[2] / "docs" / page
    return str(here) if here.is_file() else f"docs/{page} in the repository of twoshift"


def _lines(rows: dict[Kind, list[dict[str, Any]]]) -> list[RenderableType]:
    """One line per entry, under a heading per kind."""
    from rich.text import Text

    lines: list[RenderableType] = []
    for kind, found in rows.items():
        width = max(len(row["name"]) for row in found)
        lines.append(Text.assemble((kind, "bold"), f"  more about one: twoshift ls {kind} NAME"))
        lines += [
            Text.assemble("  ", (f"{row['name']:{width}}", "cyan"), f"  {row['description']}")
            for row in found
        ]
    return lines


def _page(row: dict[str, Any]) -> list[RenderableType]:
    """All about one entry: facts by name, then its settings."""
    from rich.table import Table
    from rich.text import Text

    facts: dict[str, str] = {k: row[k] for k in ("title", "reference", "use") if k in row}
    if "needs" in row:
        facts["needs"] = ", ".join(row["needs"]) or "nothing besides the model"
    upper = Table(box=None, show_header=False, pad_edge=False)
    upper.add_column(style="bold", no_wrap=True)
    upper.add_column(overflow="fold")
    for name, value in facts.items():
        upper.add_row(name, Text(value))
    heading = Text.assemble((row["name"], "bold cyan"), f" ({row['kind']}): {row['description']}")
    page: list[RenderableType] = [heading, ""]
    if facts:
        page += [upper, ""]
    if not row["settings"]:
        return [*page, "It has no settings."]
    lower = Table("setting", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for name, default in row["settings"].items():
        lower.add_row(Text(name, "cyan"), Text(json.dumps(default)), Text(row["meanings"][name]))
    return [*page, lower]
