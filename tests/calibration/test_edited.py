"""Facts that somebody edited, with checksums that fit: refused where they cannot be true."""

from dataclasses import replace

import pytest
import torch

import twoshift
from tests.fuzz.batches import calibration
from tests.toys import CLASSES, make_net
from twoshift.errors import CheckpointError, SettingError, TwoshiftError

EDITS = {
    "no bias": lambda c: replace(c, running=without(c.running, "bias")),
    "no temperature": lambda c: replace(c, running=without(c.running, "temperature")),
    "temperature is text": lambda c: replace(c, running={**c.running, "temperature": "x"}),
    "no label distribution": lambda c: replace(c, facts=without(c.facts, "assumes")),
    "a matrix": lambda c: replace(c, facts={**c.facts, "assumes": torch.eye(CLASSES)}),
    "complex": lambda c: replace(c, facts={**c.facts, "assumes": torch.ones(CLASSES) * 1j}),
    "prepared for nothing": lambda c: with_classifier(c, prepared=0),
    "prepared in an unknown way": lambda c: with_classifier(c, prepared={"x": 1}),
}


def without(facts, name):
    return {n: value for n, value in facts.items() if n != name}


def with_classifier(facts, **changes):
    return replace(facts, classifier=replace(facts.classifier, **changes))


@pytest.mark.parametrize("name", EDITS)
def test_edited_facts_are_refused(name):
    with pytest.raises(TwoshiftError):
        twoshift.recommended(make_net("mlp"), EDITS[name](calibration("mlp")))


def test_the_message_says_what_is_missing():
    with pytest.raises(CheckpointError, match=r"bias is missing\. Calibrate the model again"):
        twoshift.recommended(make_net("mlp"), EDITS["no bias"](calibration("mlp")))


def test_an_unknown_setting_is_not_blamed_on_the_facts():
    with pytest.raises(SettingError, match="has no setting 'momentun'"):
        twoshift.recommended(make_net("mlp"), calibration("mlp"), momentun=0.1)
