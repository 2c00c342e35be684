"""Facts about the images: their size and range, and what is refused for them."""

import json

import pytest
import torch

from tests.toys import make_batches, make_method, make_net, same
from twoshift.errors import BatchError, SettingError
from twoshift.methods import Inputs, Method, Tent

UNIT = Inputs(channels=3, size=(16, 16), low=0.0, high=1.0)


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_pixels_far_outside_of_the_range_are_refused(adapted):
    live = make_method("iabn", make_net("resnet_iabn"), adapted).expect(UNIT)
    x = make_batches("resnet_iabn")[0]
    live(x)
    before = live.state()
    x = x / x.max()
    message = (
        r"^a batch has pixels from .* to 255 where the calibration saw 0 to 1\. Divide by 255\.$"
    )
    with pytest.raises(BatchError, match=message):
        live(x * 255)
    with pytest.raises(BatchError, match=r"Prepare the images as for the calibration\.$"):
        live(x * 1000)
    with pytest.raises(BatchError, match=r"from -1\.5? to .* saw 0 to 1"):
        live(x - 1.5)
    with pytest.raises(BatchError, match=r"from -2 "):
        live.stream("a")(x * 0 - 2)
    assert same(live.state(), before)
    live(x * 3 - 1)  # normalised otherwise, or noisy: not far outside


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 3, 16, 20), r"\(B, 3, 16, 16\), got \(2, 3, 16, 20\)"), ((2, 3, 8, 8), "16")],
)
def test_another_size_is_refused(shape, message):
    live = Tent(make_net("resnet_bn")).expect(UNIT)
    with pytest.raises(BatchError, match=message):
        live(torch.rand(shape))


def test_what_is_not_known_is_not_checked():
    x = torch.rand(2, 3, 8, 12) * 255
    Tent(make_net("resnet_bn"))(x)
    Tent(make_net("resnet_bn")).expect(Inputs())(x)
    Tent(make_net("resnet_bn")).expect(Inputs(channels=3))(x)
    with pytest.raises(BatchError, match=r"\(B, C, 16, 16\)"):
        Tent(make_net("resnet_bn")).expect(Inputs(size=(16, 16)))(x)
    with pytest.raises(BatchError, match="saw 0 to 1"):
        Tent(make_net("resnet_bn")).expect(Inputs(low=0, high=1))(x)


@pytest.mark.parametrize(
    "facts",
    [
        {"size": 16},
        {"size": (16,)},
        {"size": (16, 0)},
        {"size": (16, 1.5)},
        {"size": (True, 16)},
        {"channels": 0},
        {"channels": "3"},
        {"low": 0.0},
        {"high": 1.0},
        {"low": 1.0, "high": 1.0},
        {"low": 0.0, "high": float("inf")},
        {"low": "0", "high": "1"},
    ],
)
def test_impossible_facts_are_refused(facts):
    with pytest.raises(SettingError, match=r"of the (images|pixels)"):
        Inputs(**facts)


@pytest.mark.parametrize("inputs", [UNIT, Inputs(size=(16, 16)), None])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_the_facts_are_saved(inputs, adapted, tmp_path):
    live = make_method("tent", make_net("resnet_bn"), adapted)
    if inputs is not None:
        live.expect(inputs)
    assert live.inputs == inputs
    live.save(tmp_path / "s")
    card = json.loads((tmp_path / "s" / "card.json").read_text())
    assert card["inputs"] == (inputs and inputs.card())
    restored = Method.load(tmp_path / "s", make_net("resnet_bn"))
    assert restored.inputs == inputs


REMEMBER = [("note", "resnet_iabn"), ("rotta", "resnet_bn"), ("onda", "resnet_bn")]


@pytest.mark.parametrize(("name", "net"), REMEMBER)
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_a_first_image_of_another_size_blocks_nothing_where_the_size_is_known(name, net, adapted):
    live, other = (make_method(name, make_net(net), adapted).expect(UNIT) for _ in range(2))
    with pytest.raises(BatchError, match="must be"):
        live(torch.rand(1, 3, 24, 24))
    for x in make_batches(net):
        assert torch.equal(live(x), other(x))


@pytest.mark.parametrize(("name", "net"), REMEMBER)
@pytest.mark.parametrize("cure", ["expect", "reset"])
def test_where_nobody_said_the_size_the_error_tells_the_cure(name, net, cure):
    live = make_method(name, make_net(net), True)
    live.stream("a")(torch.rand(1, 3, 24, 24))
    live(torch.rand(1, 3, 24, 24))
    before = live.state()
    batches = make_batches(net)
    message = r"shape \(B, 3, 24, 24\), like the images .* got \(8, 3, 16, 16\)\. .*expect.*reset"
    with pytest.raises(BatchError, match=message):
        live(batches[0])
    assert same(live.state(), before)
    if cure == "expect":
        live.expect(Inputs(size=(16, 16)))
    else:
        live.reset()
        live.stream("a").reset()
    for x in batches:
        assert live(x).isfinite().all()
        assert live.stream("a")(x).isfinite().all()


def test_a_saved_memory_of_another_size_is_refused():
    live = make_method("onda", make_net("resnet_bn"), False)
    live(torch.rand(1, 3, 24, 24))
    state = live.state()
    with pytest.raises(Exception, match=r"memory\.waiting"):
        make_method("onda", make_net("resnet_bn"), False).expect(UNIT).load_state(state)
