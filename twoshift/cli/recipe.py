"""``twoshift recipe``: how a benchmark's models are trained, and how they are adapted."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from twoshift.cli._options import one_of, when_stopped

app = typer.Typer(
    help="Settings of training and test time, by benchmark.",
    no_args_is_help=True,
    epilog="Example: twoshift recipe show visda-c",
)
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead")]
STAGES = ("source", "adapter", "test_time")


@app.command("ls", epilog="Example: twoshift recipe ls --json")
@when_stopped("Nothing was changed.")
def ls_command(as_json: AsJson = False) -> None:
    """List benchmarks and recipes."""
    from twoshift.bench.plan import benchmarks
    from twoshift.train.recipes import SourceRecipe, recipe_names

    named = [p for b in benchmarks().values() for p in b.profiles.values()]
    inside = {p.source_recipe.get("recipe") for p in named}
    others = {*recipe_names(SourceRecipe)} - inside
    rows = []
    for name in [*benchmarks(), *sorted(others)]:
        for profile in profiles(name):
            content = everything(name, profile)
            facts = {k: content["source"][k] for k in ("dataset", "architecture", "epochs")}
            rows.append({"name": name, "profile": profile, **facts})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], box=None, header_style="bold")
    for row in rows:
        table.add_row(*(str(value or "") for value in row.values()))
    Console().print(table)


@app.command("show", epilog="Example: twoshift recipe show visda-c --stage source > my-visda.yaml")
@when_stopped("Nothing was changed.")
def show_command(
    name: Annotated[str, typer.Argument(help="A benchmark, or a recipe; see: twoshift recipe ls")],
    profile: Annotated[
        str | None, typer.Option(help="Profile of a benchmark: paper, or cpu if it has one")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="source, adapter or test_time; the first two are files for --recipe"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how source model and adapter are trained, and the settings at test time.

    With --stage source or adapter it is a recipe by itself: edit it, and train by
    twoshift train source --recipe FILE.
    """
    import yaml

    content = everything(name, profile)
    if stage is not None:
        content = content[one_of("stage", stage, [s for s in STAGES if s in content])]
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    else:
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
        typer.echo(text, nl=False)


def profiles(name: str) -> list[str | None]:
    """Those of a benchmark, the paper's first; a recipe has none."""
    from twoshift.bench.plan import benchmarks

    benchmark = benchmarks().get(name)
    return [None] if benchmark is None else sorted(benchmark.profiles, key=lambda p: p != "paper")


def everything(name: str, profile: str | None = None) -> dict[str, Any]:
    """Source recipe, adapter recipe, streams and test-time settings of a benchmark or recipe.

    A recipe has no streams, and some are for source models only.
    """
    from twoshift.bench import presets
    from twoshift.bench.plan import benchmarks, full_recipe
    from twoshift.errors import UnknownName
    from twoshift.registry import near_miss
    from twoshift.train.recipes import AdapterRecipe, SourceRecipe, recipe_names

    known = [p for p in profiles(name) if p is not None]
    if profile is not None and profile not in known:
        raise UnknownName(f"{name} has no profile {profile!r}", cure=near_miss(profile, known))
    if known:
        benchmark = benchmarks()[name]
        chosen = benchmark.profiles[profile or known[0]]
        streams = benchmark.model_dump(include={"corruptions", "severity", "labels", "batch_size"})
        return {
            "source": full_recipe(SourceRecipe, chosen.source_recipe),
            "adapter": full_recipe(AdapterRecipe, chosen.adapter_recipe),
            "streams": streams,
            "test_time": test_time(benchmark.preset),
        }
    recipes = recipe_names(SourceRecipe)
    if name not in recipes:
        cure = near_miss(name, [*benchmarks(), *recipes])
        raise UnknownName(f"unknown benchmark or recipe {name!r}", cure=cure)
    content = {"source": full_recipe(SourceRecipe, {"recipe": name})}
    if name in recipe_names(AdapterRecipe):
        content["adapter"] = full_recipe(AdapterRecipe, {"recipe": name})
    preset = presets.of_dataset(content["source"]["dataset"].partition(":")[0])
    return {**content, "test_time": test_time(preset)}


def test_time(preset: str | None) -> dict[str, Any]:
    """The settings of a preset, by method; those not listed have their defaults."""
    from twoshift import estimators, methods
    from twoshift.bench.presets import estimator_preset
    from twoshift.bench.presets import preset as settings_of

    plain = {m: settings_of(preset, m, with_adapter=False) for m in methods.methods}
    with_iabn = {
        m: _changed(plain[m], settings_of(preset, m, with_adapter=False, with_iabn=True))
        for m in plain
    }
    with_adapter: dict[str, Any] = {}
    for m in plain:
        with_adapter |= _changed(plain[m], settings_of(preset, m, with_adapter=True))
    content = {
        "methods": _filled(plain),
        "with_iabn": _filled(with_iabn),
        "with_adapter": with_adapter,
        "estimators": _filled({e: estimator_preset(preset, e) for e in estimators.estimators}),
    }
    return _filled(content)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in after.items() if before.get(k) != v}


def _filled(content: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in content.items() if v}
