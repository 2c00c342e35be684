"""Streamed statistics against sums over single images, kept in double precision."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.calibration.trained import batches as pairs_of
from tests.calibration.trained import noisy, trained
from tests.toys import CLASSES, make_batches, make_moments, make_net
from twoshift.accuracy import VIEWS
from twoshift.accuracy.views import LEAST
from twoshift.adapters import attach, logit_adapter
from twoshift.data.stream import to_float
from twoshift.errors import MismatchError, ModelError, SettingError
from twoshift.methods import Source, create
from twoshift.methods.matched import class_moments

MATCHED, PLAIN, SOURCE = range(3)
SIZES = (8, 5, 2, 8, 3, 9, 8, 4, 7, 6)


def norms(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def streamed_by_hand(net, moments, view, share, half_life, start, pseudo_count):
    """Predicts batch after batch, from a list of everything that it saw.

    Images of one batch count alike. Together they count as much as if they had come one by one.
    """
    seen, votes = {name: [] for name in norms(net)}, []

    def weights(sizes):
        """The weight of one image of each batch, by how many images came after it."""
        found = []
        for i, size in enumerate(sizes):
            later = sum(sizes[i + 1 :])
            ages = [0.5 ** ((later + age) / half_life) for age in range(size)]
            found.append(sum(ages) / size)
        return found

    def predict(x):
        slow = copy.deepcopy(net).double().eval()
        sizes = [len(v) for v in votes] + [len(x)]
        of_image = weights(sizes)
        labels = torch.full((CLASSES,), pseudo_count / CLASSES).double()
        for weight, batch in zip(of_image, votes, strict=False):
            for c in batch:
                labels[c] += weight
        q = labels / labels.sum()
        total = sum(w * n for w, n in zip(of_image, sizes, strict=True))
        mix = share * total / (total + start)
        for name, layer in norms(slow).items():

            def normalise(layer, args, name=name):
                values = args[0].flatten(2) if args[0].dim() > 2 else args[0][:, :, None]
                seen[name].append([(v.mean(1), v.square().mean(1)) for v in values])
                first = square = 0
                for weight, batch in zip(of_image, seen[name], strict=True):
                    for mean, mean_square in batch:
                        first = first + weight / total * mean
                        square = square + weight / total * mean_square
                mean, var = first, square - first**2
                then, spread = layer.running_mean.clone(), layer.running_var.clone()
                if view == "matched":
                    means, variances = (torch.tensor(m).double() for m in moments[name])
                    now = sum(q[c] * means[c] for c in range(CLASSES))
                    wide = sum(q[c] * (variances[c] + means[c] ** 2) for c in range(CLASSES))
                    ratio = ((var + layer.eps) / (wide - now**2 + layer.eps)).sqrt()
                    mean, var = mean + ratio * (then - now), ratio**2 * spread
                layer.running_mean = (1 - mix) * then + mix * mean
                layer.running_var = (1 - mix) * spread + mix * var

            layer.register_forward_pre_hook(normalise)
        with torch.no_grad():
            logits = slow(x.double())
        votes.append(logits.argmax(1).tolist())
        return logits

    return predict


@pytest.mark.parametrize("name", ["resnet_bn", "mlp"])
@pytest.mark.parametrize("view", ["matched", "plain"])
@pytest.mark.parametrize("sizes", [(1,) * 10, SIZES], ids=["one by one", "batches"])
def test_statistics_and_labels_are_those_of_the_last_images(name, view, sizes):
    net = make_net(name)
    moments = make_moments(net)
    shares = {"share": 0.7, "plain_share": 0.7}
    common = {"half_life": 20.0, "start": 4.0, "pseudo_count": 2.0}
    live = create(
        "streamed", copy.deepcopy(net).double(), moments=moments, view=view, **shares, **common
    )
    by_hand = streamed_by_hand(net, moments, view, 0.7, **common)
    for x in make_batches(name, sizes):
        torch.testing.assert_close(live(x.double()), by_hand(x), rtol=1e-5, atol=1e-5)


def test_single_precision_is_near():
    net, view = make_net("resnet_bn"), "matched"
    moments = make_moments(net)
    live = create("streamed", net, moments=moments)
    by_hand = streamed_by_hand(net, moments, view, 0.6, 421.0, 32.0, 10.0)
    for x in make_batches("resnet_bn", SIZES):
        torch.testing.assert_close(live(x).double(), by_hand(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{"view": "source"}, {"share": 0.0}])
def test_without_a_share_it_is_the_source_model(settings):
    net = make_net("resnet_bn")
    live, source = create("streamed", net, moments=make_moments(net), **settings), Source(net)
    for x in make_batches("resnet_bn"):
        torch.testing.assert_close(live(x), source(x), rtol=1e-4, atol=1e-5)


def test_the_first_image_is_predicted_almost_by_the_source_model():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (1,))
    moments, expected = make_moments(net), Source(net)(x)
    far = [
        float((create("streamed", net, moments=moments, start=start)(x) - expected).abs().max())
        for start in (0.0, 32.0, 1e6)
    ]
    assert far[0] > 4 * far[1]
    assert far[2] < 1e-4


def test_labels_are_counted_without_the_distribution_that_the_logits_contain():
    net, shares = make_net("resnet_bn"), [0.6, 0.2, 0.1, 0.07, 0.03]
    moments, fair = make_moments(net), copy.deepcopy(net)
    with torch.no_grad():
        fair.fc.bias -= torch.tensor(shares).log()
    adapted = attach(net, logit_adapter(net, assumes=shares))
    live, plain = (create("streamed", m, moments=moments) for m in (adapted, fair))
    for x in make_batches("resnet_bn", SIZES):
        live(x)
        plain(x)
        torch.testing.assert_close(live.prior, plain.prior)
    assert float((live.prior - 1 / CLASSES).abs().max()) > 0.1


def shifted_digits(count):
    """Darker digits, mostly of three classes."""
    digits, rng = noisy("test", seed=2), np.random.default_rng(0)
    likely = np.where(digits.labels < 3, 1.0, 0.2)
    rows = rng.choice(len(digits), count, p=likely / likely.sum())
    return 0.6 * to_float(digits.images[rows]), torch.from_numpy(digits.labels[rows])


def predictions(view, x, size):
    of = trained("balanced_softmax")
    moments = class_moments(of.net, pairs_of(of.train))
    live = create("streamed", of.net, moments=moments, view=view)
    return torch.cat([live(part) for part in x.split(size)])


@pytest.mark.parametrize("view", ["matched", "plain"])
def test_batches_of_any_size_give_nearly_the_same_predictions(view):
    x, y = shifted_digits(256)
    # the first images see little of the stream, or all of their batch
    probs = {size: predictions(view, x, size)[64:].softmax(1) for size in (1, 4, 16, 64)}
    right = {size: float((p.argmax(1) == y[64:]).float().mean()) for size, p in probs.items()}
    for size in (4, 16, 64):
        assert float((probs[size] - probs[1]).abs().mean()) < 0.02
        assert abs(right[size] - right[1]) < 0.02  # three images of 192


@pytest.mark.slow
@pytest.mark.parametrize("view", ["matched", "plain"])
def test_accuracy_is_within_a_point_whatever_the_size_of_batches(view):
    """Of 2000 images: of 500, the start and a handful of close calls are more than a point."""
    x, y = shifted_digits(2000)
    right = [
        float((predictions(view, x, size).argmax(1) == y).float().mean()) for size in (1, 4, 16, 64)
    ]
    assert max(right) - min(right) <= 0.01


def judge(*offsets):
    """A judge that reads nothing but which view it is."""
    return torch.tensor([0.0, 0.0, 0.0, *offsets])


def viewed(live, batches):
    """The view that each batch left in use, and how many passes it took."""
    passes, found = [], []
    hook = live.model.fc.register_forward_hook(lambda *_: passes.append(1))
    for x in batches:
        before = len(passes)
        live(x)
        found.append((live.view_in_use, len(passes) - before))
    hook.remove()
    return found


def looks(live, sizes):
    """By view, the numbers of the images that it was taken of, in batches of these sizes."""
    found, start, take = {view: [] for view in range(3)}, [0], live._look

    def look(x, view, weight):
        found[view] += range(start[0], start[0] + len(x))
        return take(x, view, weight)

    def count(images, counted=live._count):
        start[0] += images
        counted(images)

    live._look, live._count = look, count
    for x in make_batches("mlp", sizes):
        live(x)
    return found


def with_judge(offsets=(0.0, 0.0, 0.0), **settings):
    net = make_net("mlp")
    return create(
        "streamed",
        net,
        moments=make_moments(net),
        view_judge=judge(*offsets),
        judged=True,
        **settings,
    )


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", [1, 16, 64, 256])
def test_other_views_are_taken_of_the_same_images_whatever_the_batches(size, every):
    """Of the first 128; then of 64 after every pause, the two others by turns."""
    live, images = with_judge(every=every), 1024
    found = looks(live, (size,) * (images // size))
    expected = {MATCHED: list(range(images)), PLAIN: list(range(128)), SOURCE: list(range(128))}
    pause, turn = 64 * (every - 1), PLAIN
    start = 128 + pause
    while start < images:
        expected[turn] += range(start, min(start + 64, images))
        start, turn = start + 64 + pause, PLAIN + SOURCE - turn
    assert found == expected
    others, same = live.signals[:, :, 0].tolist()
    assert others == same  # the same images, by the other view and by the one in use
    assert others[MATCHED] == 0
    assert min(others[PLAIN], others[SOURCE]) > 64


def test_the_count_of_images_goes_round_and_stays_exact():
    live = with_judge(every=2)
    (x,) = make_batches("mlp", (1,))
    rounds, n = 2 * 64 * 2, 0
    for size in [64] * 100 + [1] * 100 + [63, 65, 7, 50] * 20:
        live._count(size) if size <= 64 else (live._count(64), live._count(size - 64))
        n += size
        seen = n if n < 128 else 128 + (n - 128) % rounds
        assert float(live.seen) == seen
    live.seen.fill_(128 + rounds - 1)
    live(x)
    assert float(live.seen) == 128


def test_a_round_later_the_same_views_are_due():
    """Two looks at other views make a round, so that going round changes nothing."""
    for every in (1, 2, 10):
        live, rounds = with_judge(every=every), 2 * 64 * every
        for seen in (128, 128 + 64 * every - 1, 128 + rounds - 64, 128 + rounds - 1):
            due = []
            for count in (seen, seen + rounds):
                live.seen.fill_(count)
                due.append(live._due(MATCHED))
            assert due[0] == due[1]


def test_every_view_has_a_turn():
    live, due = with_judge(every=10), []
    for _ in range(100):
        due += live._due(MATCHED)
        live._count(64)
    assert due[:4] == [PLAIN, SOURCE] * 2
    assert due[4:] == ([PLAIN, SOURCE] * 5)[: len(due) - 4]
    assert len(due) == 4 + 9


@pytest.mark.parametrize("chosen", [-1.0, 3.0, 0.5, 1e9])
def test_a_view_that_is_none_is_refused(chosen):
    live = with_judge()
    before = live.state()
    name = next(name for name in before if name.endswith("chosen"))
    with pytest.raises(MismatchError):
        live.load_state({**before, name: torch.full_like(before[name], chosen)})
    assert all(torch.equal(tensor, before[n]) for n, tensor in live.state().items())


def test_a_large_batch_is_taken_in_by_parts():
    """Predictions, labels, statistics and the judge: all as with batches of 64."""
    x, _ = shifted_digits(512)
    of = trained("balanced_softmax")
    moments, lives = class_moments(of.net, pairs_of(of.train)), []
    for size in (64, 256, 150):
        live = create(
            "streamed",
            of.net,
            moments=moments,
            view_judge=judge(0.0, 0.5, 0.0),
            judged=True,
            every=2,
        )
        lives.append((torch.cat([live(part) for part in x.split(size)]), live))
    (small, one), (large, two), (odd, _) = lives
    assert one.view_in_use == PLAIN
    assert torch.equal(small, large)
    assert all(torch.equal(one.state()[n], t) for n, t in two.state().items())
    assert not torch.equal(small, odd)  # parts of 64, 64 and 22


def test_many_classes_do_not_drown_the_votes():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 1000))
    with torch.no_grad():
        net[3].bias[7] = 100.0
    moments = {"2": torch.stack([torch.zeros(1000, 8), torch.ones(1000, 8)])}
    live = create("streamed", net, moments=moments)
    assert float(live.prior.sum()) == pytest.approx(1)
    live(torch.rand(64, 3, 2, 2))
    assert live.prior[7] > 0.8


def test_every_stream_tells_its_own_view():
    live = with_judge((0.0, 0.5, 0.0), every=1)
    other = live.stream("a")
    for x in make_batches("mlp", (64,) * 4):
        other(x)
    assert (live.view_in_use, other.view_in_use) == (MATCHED, PLAIN)
    for x in make_batches("mlp", (64,) * 4):
        live(x)
    other.reset()
    assert (live.view_in_use, other.view_in_use) == (PLAIN, MATCHED)


def test_without_a_judge_there_is_one_pass_and_the_view_stays():
    net = make_net("resnet_bn")
    for number, view in enumerate(VIEWS):
        live = create("streamed", net, moments=make_moments(net), view=view)
        found = viewed(live, make_batches("resnet_bn", (8,) * 3))
        assert found == [(number, 1)] * 3


def test_a_clearly_better_view_is_taken_and_left_again():
    net = make_net("resnet_bn")
    moments, size = make_moments(net), 64
    needed = int(LEAST // size) + 1  # batches until a view is known
    live = create(
        "streamed", net, moments=moments, view_judge=judge(0.0, 0.5, 0.0), judged=True, every=1
    )
    views = [v for v, _ in viewed(live, make_batches("resnet_bn", (size,) * 8))]
    assert views[: needed - 1] == [MATCHED] * (needed - 1)
    assert views[-1] == PLAIN
    live._judge.weights = judge(0.5, 0.0, 0.0).double()
    views = [v for v, _ in viewed(live, make_batches("resnet_bn", (size,) * 8, seed=2))]
    assert views[-1] == MATCHED
    live.reset()
    assert live.view_in_use == MATCHED
    assert float(live.signals.abs().sum()) == 0


def test_images_that_change_the_view_are_predicted_by_the_new_one():
    net, (x,) = make_net("resnet_bn"), make_batches("resnet_bn", (128,))
    moments = make_moments(net)
    live = create("streamed", net, moments=moments, view_judge=judge(0.0, 0.0, 0.5), judged=True)
    logits, source = live(x), Source(net)(x)
    # of the first 64, too little is known to change
    torch.testing.assert_close(logits[64:], source[64:], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[:64], source[:64], rtol=1e-2, atol=1e-2)
    assert live.view_in_use == SOURCE


def test_no_view_is_taken_that_did_not_predict_these_images():
    """The judge would have the source's statistics, but has just looked at the plain ones."""
    live = with_judge((0.0, 0.0, 0.5), every=1)
    live.signals[:, SOURCE] = 200.0
    live.seen.fill_(128)
    assert live._due(MATCHED) == [PLAIN]
    first, second = make_batches("mlp", (64, 64))
    live(first)
    assert live.view_in_use == MATCHED
    assert live._due(MATCHED) == [SOURCE]
    live(second)
    assert live.view_in_use == SOURCE


def test_a_judge_may_be_a_list():
    net = make_net("mlp")
    live = create("streamed", net, moments=make_moments(net), view_judge=[0.0] * 6, judged=True)
    assert torch.equal(live.settings()["view_judge"], torch.zeros(6).double())


def test_what_it_cannot_do_is_refused():
    net = make_net("resnet_bn")
    moments = make_moments(net)
    with pytest.raises(ModelError, match="IABN"):
        create("streamed", make_net("resnet_iabn"), moments=moments)
    with pytest.raises(SettingError, match="twoshift calibrate"):
        create("streamed", net)
    for wrong in (
        {"view": "best"},
        {"share": 1.1},
        {"plain_share": -0.1},
        {"half_life": 0},
        {"temperature": 0},
        {"start": -1},
        {"pseudo_count": 0},
        {"every": 0},
        {"view_judge": torch.zeros(5)},
        {"judged": True},
        {"view_judge": torch.full((6,), torch.nan)},
    ):
        with pytest.raises(SettingError):
            create("streamed", net, moments=moments, **wrong)


class Reused(nn.Module):
    """Uses one normalisation twice, on other values, and another one never."""

    def __init__(self):
        super().__init__()
        self.norm, self.idle = nn.BatchNorm1d(4), nn.BatchNorm1d(3)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.norm(x).relu() + self.norm(2 * x + 1))


def test_a_layer_that_is_used_twice_follows_both_and_an_idle_one_stays():
    net, g = Reused().eval(), torch.Generator().manual_seed(0)
    moments = {
        name: torch.ones(2, CLASSES, layer.num_features) for name, layer in norms(net).items()
    }
    live = create("streamed", net, moments=moments, half_life=8.0)
    weights, values = [], []
    for size in (5, 1, 3):
        x = torch.randn(size, 4, generator=g)
        live(x)
        keep = 0.5 ** (size / 8)
        weights = [w * keep for w in weights] + [(1 - keep) / (1 - 0.5 ** (1 / 8)) / size] * size
        values += list(torch.stack([x, 2 * x + 1], 1))
        weight = (torch.tensor(weights) / sum(weights))[:, None]
        both = torch.stack(values)
        mean = (weight * both.mean(1)).sum(0)
        var = (weight * both.square().mean(1)).sum(0) - mean**2
        expected = torch.cat([torch.stack([mean, var]), torch.zeros(2, 3)], 1)
        torch.testing.assert_close(live.followed[MATCHED], expected, rtol=1e-4, atol=1e-5)


def test_a_copy_goes_on_by_itself():
    net, first, then = make_net("resnet_bn"), *make_batches("resnet_bn", (4, 4))
    live = create("streamed", net, moments=make_moments(net))
    live(first)
    copied, state = copy.deepcopy(live), live.state()
    expected = copied(then)
    assert all(torch.equal(tensor, state[name]) for name, tensor in live.state().items())
    assert torch.equal(live(then), expected)


def test_it_may_be_moved_to_another_precision():
    net, batches = make_net("resnet_bn"), make_batches("resnet_bn", (4, 4))
    live, moved = (create("streamed", net, moments=make_moments(net)) for _ in range(2))
    for x in batches:
        torch.testing.assert_close(
            moved.double()(x.double()).float(), live(x), rtol=1e-3, atol=1e-4
        )
