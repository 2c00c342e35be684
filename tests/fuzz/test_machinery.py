"""The machinery of the fuzz suite does what it says; `make fuzz` runs it for long."""

import random
import shutil

from tests.fuzz.tamper import examples, load_tampered, tampered
from tests.saved import card_in
from twoshift.errors import CheckpointError
from twoshift.storage import read_card


def test_examples_load_as_they_are(tmp_path):
    for folder, load in examples(tmp_path).values():
        assert load(folder) is not None


def test_tampered_folders_get_past_the_checksums(tmp_path):
    """Else every one of them would be refused for the wrong reason."""
    folder, _ = examples(tmp_path / "whole")["adapter-label_shift"]
    kind, reasons = card_in(folder)["kind"], []
    for i in range(100):
        copied = shutil.copytree(folder, tmp_path / str(i))
        how = tampered(copied, random.Random(i))
        try:
            read_card(copied, kind)
        except CheckpointError as e:
            reasons.append(f"{how}: {e}")
    assert len(reasons) < 60
    assert sum("edited" in reason for reason in reasons) < 5


def test_tampered_folders_are_refused_or_load():
    happened = load_tampered(60, seed=0)
    assert happened.total() == 60
    assert happened["CheckpointError"] > 10
    assert happened["loaded"] > 0
