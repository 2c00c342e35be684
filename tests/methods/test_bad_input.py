"""Batches that no method takes: each refused with a helpful message, and without a trace."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.toys import SHAPES, make_batches, make_method, make_net, same
from twoshift.errors import BatchError, ModelError, PriorError, TwoshiftError
from twoshift.estimators import EM, EMA
from twoshift.methods import Source, Tent
from twoshift.testing._compare import require_same_logits

BAD = {
    "not a tensor": (lambda x: np.asarray(x), r"must be a torch\.Tensor, got ndarray"),
    "a list": (lambda x: x.tolist(), r"must be a torch\.Tensor, got list"),
    "None": (lambda x: None, r"must be a torch\.Tensor, got NoneType"),
    "a single image": (lambda x: x[0], r"must be \(B, 3, H, W\), got \(3, 16, 16\)"),
    "a row": (lambda x: x[0, 0, 0], r"must be \(B, 3, H, W\), not empty, got \(16,\)"),
    "a video": (lambda x: x[None], r"must be \(B, 3, H, W\), got \(1, 8, 3, 16, 16\)"),
    "grey": (lambda x: x[:, :1], r"must be \(B, 3, H, W\), got \(8, 1, 16, 16\)"),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), r"\(8, 16, 16, 3\).*must be \(B, 3, H, W\)"),
    "uint8": (lambda x: (x * 255).byte(), r"torch\.uint8\. Convert: images\.float\(\) / 255"),
    "float64": (lambda x: x.double(), r"torch\.float64\. Convert: x\.to\(torch\.float32\)"),
    "half": (lambda x: x.half(), r"must be torch\.float32, got torch\.float16"),
    "NaN": (lambda x: _with(x, float("nan")), r"must be finite, got NaN or infinite pixels"),
    "inf": (lambda x: _with(x, float("inf")), r"must be finite, got NaN or infinite pixels"),
    "-inf": (lambda x: _with(x, float("-inf")), r"must be finite"),
    "empty": (lambda x: x[:0], r"not empty, got \(0, 3, 16, 16\)"),
    "no pixels": (lambda x: x[..., :0], r"not empty, got \(8, 3, 16, 0\)"),
    "bool": (lambda x: x > 0.5, r"must be torch\.float32, got torch\.bool"),
    "complex": (lambda x: x.to(torch.complex64), r"must be torch\.float32, got torch\.complex64"),
    "meta": (lambda x: x.to("meta"), r"an ordinary torch\.Tensor, got a meta tensor"),
    "sparse": (lambda x: x.to_sparse(), r"ordinary torch\.Tensor, got .*sparse_coo.*x\.to_dense"),
    "mkldnn": (lambda x: x.to_mkldnn(), r"an ordinary torch\.Tensor, got .*mkldnn"),
    "nested": (lambda x: _nested(x, torch.strided), "got a nested tensor"),
    "jagged": (lambda x: _nested(x, torch.jagged), "got NestedTensor"),
    "masked": (lambda x: _masked(x), "got MaskedTensor"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "got FakeTensor"),
    "uninitialised": (lambda x: nn.UninitializedParameter(), "got UninitializedParameter"),
    "no buffer yet": (lambda x: nn.UninitializedBuffer(), "got UninitializedBuffer"),
    "quantised": (lambda x: _quantised(x), "quantised|quint8|QInt"),
    "a subclass": (lambda x: x.as_subclass(Own), r"got Own\. Pass a plain one.*as_subclass"),
    "freed": (lambda x: _freed(x), "got a tensor whose memory was freed"),
    "no dimensions": (lambda x: x.sum(), r"not empty, got \(\)"),
    "strings": (lambda x: np.array(["a"]), "got ndarray"),
}


class Own(torch.Tensor):
    """A tensor of another library."""


def _nested(x, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor(list(x), layout=layout)


def _masked(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(x, x > 0.5)


def _quantised(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def _freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def _with(x, value):
    x = x.clone()
    x[1, 2, 3, 4] = value  # one bad pixel is enough
    return x


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_the_message_helps_and_nothing_moves(name, adapted):
    make, message = BAD[name]
    first, second = make_batches("resnet_iabn", sizes=(8, 8))
    live, other = (make_method("iabn", make_net("resnet_iabn"), adapted) for _ in range(2))
    live(first)
    other(first)
    with pytest.raises(BatchError, match=message):
        live(make(first))
    assert same(live.state(), other.state())
    assert torch.equal(live(second), other(second))
    assert same(live.state(), other.state())


ODD = ("meta", "sparse", "mkldnn", "nested", "jagged", "masked", "fake", "uninitialised", "freed")


@pytest.mark.parametrize("name", [*ODD, "quantised", "a subclass", "a list", "not a tensor"])
@pytest.mark.parametrize("estimator", [EMA, EM])
def test_an_estimator_refuses_odd_probabilities(name, estimator):
    live = estimator(5)
    live.update(torch.eye(5))
    before = live.state()
    with pytest.raises(BatchError, match="predicted probabilities, must be an ordinary"):
        live.update(BAD[name][0](torch.eye(5)))
    assert same(live.state(), before)


def test_a_batch_of_a_transformation_is_refused():
    """Inside vmap a tensor looks ordinary, but its values cannot be read."""
    live = Source(make_net("resnet_bn"))
    with pytest.raises(BatchError, match="cannot be read"):
        torch.func.vmap(live)(torch.rand(2, 4, 3, 16, 16))


def test_errors_of_the_library_stay_what_they_are():
    class Refuses(Tent):
        def adapt(self, x):
            raise PriorError("a label distribution", must_be="another one")

    with pytest.raises(PriorError):
        Refuses(make_net("mlp"))(make_batches("mlp")[0])


@pytest.mark.parametrize(
    ("net", "message"), [("vit", "must be multiples of 4"), ("mlp", r"a batch of shape \(4, 3, 9")]
)
@pytest.mark.parametrize("method", ["source", "tent"])
def test_a_wrong_image_size_is_refused_first_and_midstream(net, message, method):
    live = make_method(method, make_net(net), True)
    channels, size, _ = SHAPES.get(net, (3, 16, 16))
    wrong = torch.rand(4, channels, size + 1, size + 1)
    before = live.state()
    for x in make_batches(net):
        with pytest.raises(BatchError, match=message):
            live(wrong)
        assert same(live.state(), before)
        live(x)
        before = live.state()


def test_a_model_that_asserts_its_input_size_is_refused_too():
    class Asserts(nn.Sequential):
        def forward(self, x):
            assert x.shape[-1] == 16, "image size"
            return super().forward(x)

    net = Asserts(nn.Flatten(), nn.Linear(3 * 16 * 16, 4), nn.BatchNorm1d(4))
    with pytest.raises(BatchError, match="image size"):
        Tent(net)(torch.rand(2, 3, 8, 8))


def test_a_failure_halfway_takes_back_what_moved_already():
    """Statistics have moved when a later layer refuses a batch of another size."""
    net = make_net("resnet_iabn")
    net.fc = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 5))  # training: needs two samples
    live = make_method("iabn", net, False)
    first, single, _ = make_batches("resnet_iabn", sizes=(8, 1, 8))
    live(first)
    before = live.state()
    with pytest.raises(BatchError, match="more than 1 value per channel"):
        live(single)
    assert same(live.state(), before)


def test_an_interrupted_batch_is_taken_back():
    class Interrupted(Tent):
        def minimise(self, loss):
            super().minimise(loss)
            raise KeyboardInterrupt

    live = Interrupted(make_net("resnet_bn"))
    before = live.state()
    with pytest.raises(KeyboardInterrupt):
        live(make_batches("resnet_bn")[0])
    assert same(live.state(), before)


@pytest.mark.parametrize("scale", [1e10, 1e25, 3e38])
def test_huge_values_never_spoil_later_predictions(case, scale):
    live, (first, *_, second) = case.build(), case.batches
    live(first)
    before = live.state()
    try:
        assert live(torch.ones_like(first).lerp(first, 0.5) * scale).isfinite().all()
    except BatchError as e:
        assert "finite" in str(e)  # noqa: PT017
        assert same(live.state(), before)
    assert live(second).isfinite().all()


def test_overflow_is_refused_with_the_likely_reason():
    live = Source(make_net("resnet_bn"))
    with pytest.raises(BatchError, match=r"prediction, must be finite.*usually \[0, 1\]"):
        live(torch.full((2, 3, 16, 16), 3e38))


def test_refusals_between_good_batches_change_no_prediction(case):
    live, logits = case.build(), []
    for x in case.batches:
        for bad in (x.double(), x * float("inf"), x[:, :1], x[0, 0, 0], None):
            with pytest.raises(TwoshiftError):
                live(bad)
        logits.append(live(x))
    require_same_logits(logits, case.reference.logits, "refusals must change nothing")


class InPlace(nn.Module):
    """Normalises the very images it is given."""

    def __init__(self):
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.bn(x.sub_(0.5)))


def test_a_model_that_changes_its_input_is_refused():
    live = Tent(InPlace())
    before = live.state()
    for x in (torch.rand(5, 4), torch.rand(5, 4, requires_grad=True) * 1):
        with pytest.raises(ModelError, match="InPlace changes its input in place"):
            live(x)
    assert same(live.state(), before)
    with torch.inference_mode(), pytest.raises(ModelError, match="in place"):
        live(torch.rand(5, 4))


@pytest.mark.parametrize("side", [2, 4])
def test_a_first_layer_that_sees_pixels_as_channels(side):
    layer = nn.Conv2d(3 * side**2, 4, 1)
    net = nn.Sequential(nn.PixelUnshuffle(side), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(Source(net)(x), net(x))
    with pytest.raises(BatchError, match=r"must be \(B, \d+, H, W\)"):
        Source(net)(x[:, :2])


class HeadFirst(nn.Module):
    """Registers a convolution that is used last before the one that sees the images."""

    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(8, 5, 1)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.last(self.first(x)).mean((2, 3))


def test_the_order_in_which_layers_are_registered_does_not_matter():
    live = Tent(HeadFirst())
    assert live(torch.rand(4, 3, 8, 8)).shape == (4, 5)
    with pytest.raises(BatchError):
        live(torch.rand(4, 8, 8, 8))  # the network itself refuses it
    with pytest.raises(BatchError):
        live(torch.rand(4, 1, 8, 8))
