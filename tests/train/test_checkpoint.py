import json
import shutil

import pytest
import torch

from tests.saved import card_in, change, refit
from tests.train import toy
from twoshift import models, storage
from twoshift.adapters import LabelShiftAdapter, load_adapter, save_adapter
from twoshift.errors import CheckpointError, StorageError
from twoshift.storage import _folders
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import SourceCard, load_source, save_source
from twoshift.train.source import train_source

WEIGHTS = "model"


@pytest.fixture
def folder(source_folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(source_folder, tmp_path / "model")


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def edit(path):
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (truncate, WEIGHTS, r"model-\w{12}\.safetensors is truncated or edited"),
        (flip_a_bit, WEIGHTS, r"model-\w{12}\.safetensors is truncated or edited"),
        (lambda path: path.unlink(), WEIGHTS, r"model-\w{12}\.safetensors is missing"),
        (edit, "card", r"card\.json was edited"),
        (truncate, "card", r"card\.json is damaged"),
        (lambda path: path.write_text("[]"), "card", r"card\.json is damaged"),
        (lambda path: path.unlink(), "card", "no source model in"),
    ],
)
def test_a_damaged_source_model_is_refused(folder, damage, name, message):
    before = files(folder)
    damage({**storage.saved_files(folder), "card": folder / "card.json"}[name])
    assert files(folder) != before
    with pytest.raises(CheckpointError, match=message):
        load_source(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_source(tmp_path / "nowhere")


def test_a_damaged_finished_model_is_not_trained_over(folder):
    truncate(storage.saved_files(folder)[WEIGHTS])
    before = files(folder)
    with pytest.raises(CheckpointError, match="truncated"):
        train_source(toy.source_recipe(epochs=8, lr=0.1), folder)
    assert files(folder) == before


def test_kinds_are_not_mixed_up(folder, tmp_path):
    save_adapter(tmp_path / "adapter", LabelShiftAdapter(16, 4))
    with pytest.raises(CheckpointError, match="a saved source model, got adapter"):
        load_source(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="a saved adapter, got source model"):
        load_adapter(folder)
    with pytest.raises(CheckpointError, match="a saved source model"):
        train_source(toy.source_recipe(), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="a saved adapter"):
        train_adapter(load_source(folder), toy.adapter_recipe(), folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "toy_nte"}, "does not fit its own card.*toy_net"),
        ({"settings": {"classes": 7}}, "does not fit its own card.*size mismatch"),
        ({"settings": {"depth": 7}}, "does not fit its own card.*no setting 'depth'"),
        ({"class_counts": [1, 2]}, "does not fit its own card.*one for each of 4 classes"),
        ({"strategy": ...}, "strategy, must be given, got nothing"),
        ({"seed": "0"}, "seed, must be a valid integer, got '0'"),
        ({"class_counts": [1, 2, 3, -4]}, r"class_counts\.3, must be greater.*got -4"),
    ],
)
def test_a_card_that_does_not_fit_its_weights_is_refused(folder, fields, message):
    change(folder, **fields)  # valid checksums, wrong content
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        load_source(folder)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("size", [10**6, 10**9, 10**18])
@pytest.mark.parametrize("setting", ["classes", "width", "blocks", "channels"])
def test_sizes_that_the_weights_do_not_have_are_never_built(setting, size, tmp_path):
    settings = {"classes": 3, "width": 4, "blocks": 1}
    net = models.create("resnet18_cifar", **settings)
    card = SourceCard(
        "resnet18_cifar", settings, [*"abc"], [9, 4, 1], "toy", {}, "cross_entropy", {}, 0
    )
    save_source(tmp_path / "m", net, card)
    assert load_source(tmp_path / "m").card == card
    change(tmp_path / "m", settings={**settings, setting: size})
    with pytest.raises(CheckpointError, match=f"{setting} of resnet18_cifar, must be at most 74"):
        load_source(tmp_path / "m")


def test_the_card_is_readable_json_with_the_prior(source_folder):
    card = json.loads((source_folder / "card.json").read_text())
    assert card["kind"] == "source model"
    assert card["class_counts"] == toy.COUNTS
    assert card["source_prior"] == pytest.approx([c / 212 for c in toy.COUNTS])
    assert str(source_folder.parent) not in json.dumps(card)  # nothing of this machine


@pytest.mark.parametrize("failing", ["_write_bytes", "make_card", "sync"])
@pytest.mark.parametrize("before", ["nothing", "an older model"])
def test_a_failed_save_leaves_what_was_there(folder, tmp_path, monkeypatch, failing, before):
    source = load_source(folder)
    target = tmp_path / "target"
    if before == "an older model":
        shutil.copytree(folder, target)
    content = files(tmp_path)
    real = getattr(_folders, failing)

    def fail(path, *rest):
        real(path, *rest)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_folders, failing, fail)
    with torch.no_grad():
        source.model.fc.bias.add_(1)
    with pytest.raises(StorageError, match="No space left on device"):
        save_source(target, source.model, source.card)
    assert files(tmp_path) == content


def test_a_loaded_model_knows_its_folder(folder, tmp_path, monkeypatch):
    assert load_source(folder).folder == folder
    monkeypatch.chdir(tmp_path)
    assert load_source(folder.relative_to(tmp_path)).folder == folder
    aside = folder.rename(folder.with_name(f".{folder.name}.old"))  # a writer was killed
    assert load_source(folder).folder == aside


def test_a_model_is_read_whatever_lies_in_its_calibration(folder):
    (folder / "calibration").mkdir()
    assert load_source(folder).folder == folder
    source = load_source(folder)
    save_source(folder, source.model, source.card)
    assert (folder / "calibration").is_dir()


def test_saving_again_replaces_the_older_model(folder):
    source = load_source(folder)
    with torch.no_grad():
        source.model.fc.bias.add_(1)
    save_source(folder, source.model, source.card)
    again = load_source(folder)
    assert again.weights != source.weights
    assert torch.equal(again.model.fc.bias, source.model.fc.bias)


def test_a_folder_that_cannot_be_written_is_a_storage_error(folder, tmp_path):
    source = load_source(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        save_source(tmp_path / "file" / "m", source.model, source.card)
    assert (tmp_path / "file").read_text() == ""


def test_a_failed_state_save_leaves_the_state_of_the_epoch_before(tmp_path, monkeypatch):
    real, calls = _folders.make_card, []

    def fail_the_second_time(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(_folders, "make_card", fail_the_second_time)
    out = tmp_path / "m"
    with pytest.raises(StorageError, match="No space left"):
        train_source(toy.source_recipe(), out)
    assert [p.name for p in out.iterdir()] == [".training"]
    assert storage.read_card(out / ".training", "training state")["epoch"] == 1
    monkeypatch.undo()
    resumed = train_source(toy.source_recipe(), out)
    assert resumed.weights == train_source(toy.source_recipe(), tmp_path / "calm").weights


def interrupted(out, **changes):
    """A training that ends after its first epoch."""

    def stop(done, total, facts):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train_source(toy.source_recipe(**changes), out, progress=stop)


def test_a_tampered_state_of_a_training_is_refused(tmp_path):
    for key, message in (("momentum.0", "momentum of weight 0"), ("module.fc.bias", "size mism")):
        out = tmp_path / key
        interrupted(out)
        path = storage.saved_files(out / ".training")["state"]
        state = storage.read_tensors(path)
        assert key in state
        storage.write_tensors(path, {**state, key: torch.zeros(1)})
        refit(out / ".training", card_in(out / ".training"))
        with pytest.raises(CheckpointError, match=message):
            train_source(toy.source_recipe(), out)


ADAMW = {"optimizer": "adamw", "nesterov": False, "lr": 0.01}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mean.0", torch.zeros(1), r"mean of weight 0, must be torch.float32 \(16, 3, 3, 3\), got"),
        ("square.1", torch.zeros(16).double(), r"square of weight 1, .* got torch.float64 \(16,\)"),
        ("steps.2", torch.tensor(3), r"steps of weight 2, must be torch.float32 \(\), got torch.i"),
        ("steps.2", None, r"steps of weight 2, must be torch.float32 \(\), got nothing"),
    ],
)
def test_what_adamw_remembers_is_checked(tmp_path, key, value, message):
    interrupted(tmp_path, **ADAMW)
    path = storage.saved_files(tmp_path / ".training")["state"]
    state = storage.read_tensors(path)
    changed = {name: tensor for name, tensor in state.items() if name != key}
    assert len(changed) == len(state) - 1
    storage.write_tensors(path, changed if value is None else {**changed, key: value})
    refit(tmp_path / ".training", card_in(tmp_path / ".training"))
    with pytest.raises(CheckpointError, match=message):
        train_source(toy.source_recipe(**ADAMW), tmp_path)


def test_adamw_goes_on_where_it_was_interrupted(tmp_path):
    changes = {**ADAMW, "epochs": 2, "strategy": "classifier_retraining"}
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    undisturbed = train_source(toy.source_recipe(**changes), calm)
    for _ in range(3):  # in the first phase, between the phases, in the second one
        interrupted(stopped, **changes)
    assert train_source(toy.source_recipe(**changes), stopped).weights == undisturbed.weights


def test_only_the_state_of_the_training_is_removed_at_its_end(tmp_path):
    mine = tmp_path / "m" / "v1.training"
    mine.mkdir(parents=True)
    (mine / "log").write_text("mine")
    train_source(toy.source_recipe(epochs=1), tmp_path / "m")
    assert (mine / "log").read_text() == "mine"
