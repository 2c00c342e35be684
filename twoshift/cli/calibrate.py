"""``twoshift calibrate``: find out what must be known of a trained classifier."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoshift.cli._options import (
    ModelSettings,
    OwnModel,
    SkipBad,
    Trained,
    Weights,
    check_whose,
    when_stopped,
)
from twoshift.cli.train import assignments, progress_bar
from twoshift.errors import SettingError, StorageError, TwoshiftError, TwoshiftWarning

if TYPE_CHECKING:
    from twoshift.calibration import Calibration
    from twoshift.data.base import ImageSet

EXAMPLE = (
    "Example: twoshift calibrate --model my_net.py:make_model --weights my_net.pth "
    "--data folder:photos --out facts"
)
OF_BOTH, OF_SOURCE = {"data", "also"}, {"source", "folds"}  # the other options are those of --model
KEYWORD = re.compile(r"\b(source_prior|class_counts|held_out|output|head|mean|std)=('?)([\w.]*)\2")
SIZE = 224  # the usual pixels of test images


def calibrate_command(
    context: typer.Context,
    model: OwnModel = None,
    weights: Weights = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --model, labelled images: folder:PATH, list:FILE, arrays:FILE.npz, "
            "cifar10 ...; with --source, the folder of the data sets"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the facts")] = None,
    held_out: Annotated[
        str | None,
        typer.Option(help="Images that are new to the model, if it was trained on --data"),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --data: train or test")] = "train",
    size: Annotated[
        int, typer.Option(min=1, help="Side of the images, for files of images")
    ] = SIZE,
    source_prior: Annotated[
        str, typer.Option(help="Labels in the logits: auto, training or uniform")
    ] = "auto",
    class_counts: Annotated[
        str | None, typer.Option(help="Training images of every class: 500,200,100")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Path of the classifier head")] = None,
    output: Annotated[str | None, typer.Option(help="Entry of the output with the logits")] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean of the pixels, if the model does not normalise: 0.5")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of the pixels")] = None,
    change: ModelSettings = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch")] = 64,
    skip_bad: SkipBad = False,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A fact that takes minutes, for the method of that name: dart"),
    ] = None,
    source: Trained = None,
    folds: Annotated[
        int, typer.Option(help="With --source: models to train on parts of the data; 0 for none")
    ] = 5,
) -> None:
    """Find out what must be known of a trained classifier.

    With --model, any classifier is run on labelled images, and the facts are written to --out. With
    --source, every fold of the training images of a model that twoshift trained is predicted by a
    model trained on the others, and the facts are saved with it; the same command resumes.
    """
    check_whose("calibrate", model, source)
    _check_options(context, of_source=source is not None)
    if source is not None:
        _cross_fit(source, folds, data, also or [])
        return
    if data is None or out is None:
        missing = "--data" if data is None else "--out"
        raise SettingError("calibrate --model", must_be=f"given {missing}", cure=EXAMPLE)
    _check_writable(out)
    assert model is not None
    images = _images(data, split, size, skip_bad)
    others = None if held_out is None else _images(held_out, "test", size, skip_bad)
    facts = _calibrate(
        model,
        weights,
        images,
        others,
        batch_size,
        assignments(change),
        source_prior=source_prior,
        class_counts=_numbers("--class-counts", class_counts),
        head=head,
        output=int(output) if output and output.isdecimal() else output,
        mean=_numbers("--mean", mean),
        std=_numbers("--std", std),
        also=also or [],
    )
    facts.save(out)
    typer.echo(f"facts in {out}")
    if skip_bad:
        skipped = sum(part.skipped for part in (images, others) if part is not None)
        typer.echo(f"skipped  {skipped:,} images that cannot be read")
    _show(facts)


def _calibrate(
    model: str,
    weights: str | None,
    images: ImageSet,
    held_out: ImageSet | None,
    batch_size: int,
    settings: dict[str, Any],
    **options: Any,
) -> Calibration:
    from twoshift.calibration import calibrate
    from twoshift.data.stream import Stream
    from twoshift.models.given import open_model

    net = open_model(model, weights, len(images.classes), settings)
    if held_out is not None:
        options["held_out"] = Stream(held_out.aligned(images.classes), batch_size=batch_size)
    with _in_options() as said, progress_bar("calibration") as progress:
        facts = calibrate(
            net,
            Stream(images, batch_size=batch_size),
            classes=images.classes,
            progress=lambda done, total: progress(done, total or done, f"{done:,} images"),
            **options,
        )
    for message in said:
        typer.echo(f"warning: {message}", err=True)
    return facts


@contextmanager
def _in_options() -> Iterator[list[str]]:
    """Warnings, each once, and errors, which name options here where Python has arguments."""
    said: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TwoshiftWarning)
            yield said
    except TwoshiftError as e:
        cure = None if e.cure is None else _options_in(e.cure)
        raise type(e)(_options_in(e.what), must_be=e.must_be, got=e.got, cure=cure) from e
    said += dict.fromkeys(_options_in(str(warning.message)) for warning in caught)


def _options_in(text: str) -> str:
    """``source_prior='uniform'`` as ``--source-prior uniform``."""
    return KEYWORD.sub(lambda m: f"--{m[1].replace('_', '-')} {m[3]}".rstrip(), text)


def _check_options(context: typer.Context, of_source: bool) -> None:
    """Refuse options that would have no effect."""
    for option in context.command.params:
        name = str(option.name)
        given = context.get_parameter_source(name)
        if name in OF_BOTH or given is None or given.name != "COMMANDLINE":
            continue
        if (name in OF_SOURCE) is not of_source:
            form = "--source" if of_source else "--model"
            raise SettingError(f"calibrate {form} has no option {option.opts[0]}")


def _check_writable(out: Path) -> None:
    """Before the work rather than after it."""
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        must_be = "a folder that can be written"
        raise StorageError(f"cannot write {out}: {place}", must_be=must_be)


def _images(name: str, split: str, size: int, skip_bad: bool) -> ImageSet:
    from twoshift.data import load
    from twoshift.data.base import datasets
    from twoshift.data.files import drop_bad, frame_of
    from twoshift.registry import parameters_of

    entry = datasets[name.partition(":")[0]]
    decoding: dict[str, Any] = {}
    if "size" in parameters_of(entry):
        decoding = {"size": size, "frame": frame_of(size)}
    images = load(name, split, **decoding)
    return drop_bad(images) if skip_bad else images


def _numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(option, must_be="numbers with commas between them", got=text) from None


@when_stopped("The same command continues: what was trained is kept.")
def _cross_fit(source: Path, folds: int, data: str | None, also: list[str]) -> None:
    from twoshift.calibration import crossfit
    from twoshift.train.checkpoint import load_source

    with progress_bar("calibration") as progress:
        known = load_source(source)
        facts = crossfit(known, folds=folds, data=data, also=also, progress=progress)
    typer.echo(f"calibration in {source}: {'held-out' if facts.held_out else 'training'} images")
    _show(facts)


def _show(calibration: Calibration) -> None:
    for statistics in ("running", "batch"):
        facts = calibration.of(statistics)
        if "accuracy" in facts:
            typer.echo(
                f"{statistics:7s}  accuracy {facts['accuracy']:.4f}, "
                f"balanced {facts['balanced_accuracy']:.4f}, "
                f"temperature {facts['temperature']:.3f}, "
                f"confidence threshold {facts['confidence_threshold']:.3f}"
            )
    known = calibration.classifier
    if known is None:
        return
    contained = calibration.facts.get("assumes") is not None
    typer.echo(f"head     {known.head}")
    typer.echo(f"labels   {'those of the training are' if contained else 'none'} in the logits")
    if known.reading is not None:
        typer.echo(f"         {known.reading}")
