import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.estimators.gaussians import SOURCE, TARGET, batches, draw, error
from twoshift.errors import MismatchError, PriorError, SettingError
from twoshift.estimators import EM, Paced
from twoshift.estimators._pace import compress, expand

UNIFORM = np.full(4, 0.25)
EVIDENCE = 4.0  # nats by which a change must beat none
EVIDENCE = 4.0  # the default
BIASED = np.array([0.4, 0.3, 0.2, 0.1])


def stream(*parts, seed=0):
    """Posteriors that assume equally frequent classes; parts are (label distribution, images)."""
    drawn = [draw(np.asarray(p), n, [seed, i], UNIFORM) for i, (p, n) in enumerate(parts)]
    return np.concatenate([d[0] for d in drawn]), np.concatenate([d[1] for d in drawn])


BURSTS = [(np.eye(4)[c] * 0.9 + 0.025, 96) for c in (0, 2, 1, 3, 0, 1)]


def slow_em(rows, start, assumed, pseudo, steps):
    """One image and one class after the other."""
    q = list(start)
    for _ in range(steps):
        counts = list(pseudo)
        for row in rows:
            share = [row[c] / assumed[c] * q[c] for c in range(len(q))]
            for c in range(len(q)):
                counts[c] += share[c] / sum(share)
        q = [c / sum(counts) for c in counts]
    return np.array(q)


def slow_paced(parts, long=2048.0, own=64.0, kappa=64.0, pseudo_count=10.0, steps=3):
    """After each batch: the mix, and what adjusts the batch by either estimate."""
    classes = parts[0].shape[1]
    pseudo = pseudo_count / classes
    level = np.full(classes, 1 / classes)
    full = dict.fromkeys((64, 256), level)
    change = dict.fromkeys((64, 256), level)  # over the mean prediction
    sums, means, seen = np.zeros(classes), np.zeros(classes), np.zeros((0, classes))
    scores = {"full": np.zeros(3), "change": np.zeros(3)}
    for batch in parts:
        keep = 0.5 ** (len(batch) / long)
        means = keep * means + batch.sum(0)
        mean = (means + kappa / classes) / (means.sum() + kappa)
        foretold = (sums + pseudo) / (sums + pseudo).sum()
        changed = {w: u * mean / (u * mean).sum() for w, u in change.items()}
        fade = 0.8 ** (len(batch) / 64)
        before = [*full.values(), foretold]
        told = [sum(math.log(r @ q) for r in batch) for q in before]
        scores["full"] = fade * scores["full"] + told
        told = [sum(math.log((r / mean) @ q) for r in batch) for q in [*changed.values(), mean]]
        scores["change"] = fade * scores["change"] + told
        sums = keep * sums + sum(r * foretold / (r @ foretold) for r in batch)
        seen = np.concatenate([seen, batch])
        for w in (64, 256):
            start = 0.99 * full[w] + 0.01 * level
            full[w] = slow_em(seen[-w:], start, level, [pseudo] * classes, steps)
            start = 0.99 * changed[w] + 0.01 * mean
            changed[w] = slow_em(seen[-w:], start, mean, classes * pseudo * mean, steps)
            change[w] = changed[w] / mean / (changed[w] / mean).sum()
        weights = {k: np.exp(s - s.max()) / np.exp(s - s.max()).sum() for k, s in scores.items()}
        mix = weights["full"] @ np.stack([*full.values(), (sums + pseudo) / (sums + pseudo).sum()])
        other = weights["change"] @ np.stack([*changed.values(), mean])
        present = slow_em(batch, mix, level, own * mix, steps)
        relative = level
        if max(scores["change"][:2]) - scores["change"][2] > EVIDENCE:
            relative = slow_em(batch, other, mean, own * other, steps) / mean
        yield mix, present, relative / relative.sum()


@pytest.mark.parametrize("sizes", [[64] * 5, [1, 7, 200, 3, 30], [300, 20]])
def test_every_estimate_is_that_of_a_slow_reference(sizes):
    probs, _ = stream(*BURSTS)
    parts = np.split(probs[: sum(sizes)].astype(np.float32).astype(float), np.cumsum(sizes)[:-1])
    chosen = {"long": 100.0, "own": 32.0, "kappa": 20.0, "pseudo_count": 2.0, "steps": 2}
    full, relative = (Paced(4, relative=r, **chosen) for r in (False, True))
    for batch, (mix, present, change) in zip(parts, slow_paced(parts, **chosen), strict=True):
        for e in (full, relative):
            e.update(torch.tensor(batch))
            np.testing.assert_allclose(e.prior, mix, atol=2e-5)
        np.testing.assert_allclose(full.present, present, atol=2e-5)
        np.testing.assert_allclose(relative.present, change, atol=2e-5)


def test_changes_that_are_clear_are_those_of_a_slow_reference():
    probs = stream((UNIFORM, 256), (np.eye(4)[2], 192))[0].astype(np.float32).astype(float)
    paced, parts, changes = Paced(4, relative=True), np.split(probs, 7), []
    for batch, (_, _, change) in zip(parts, slow_paced(parts), strict=True):
        paced.update(torch.tensor(batch))
        np.testing.assert_allclose(paced.present, change, atol=2e-5)
        changes.append(bool(np.ptp(change) > 1e-3))
    assert changes[:4] == [False] * 4
    assert changes[-1]


def adjusted(estimator, probs, labels, size=64):
    """Share of correct predictions, each adjusted by what is known with its batch."""
    right = 0
    for rows, y in zip(batches(probs, size), batches(labels, size), strict=True):
        estimator.update(torch.tensor(rows))
        now = estimator.present if estimator.counts_batch else estimator.prior
        right += int(((rows * now.numpy()).argmax(1) == y).sum())
    return right / len(labels)


def test_it_beats_a_long_window_on_bursts_and_loses_nothing_on_steady_labels():
    bursts, steady = stream(*BURSTS), stream((TARGET, 1500), seed=1)
    assert adjusted(Paced(4), *bursts) > adjusted(EM(4), *bursts) + 0.05
    assert adjusted(Paced(4), *steady) > adjusted(EM(4), *steady) - 0.01
    assert adjusted(Paced(4), *bursts, size=1) > adjusted(Paced(4), *bursts) - 0.03


def test_the_prior_of_a_simulated_stream_is_found():
    paced = Paced(4, SOURCE)
    for batch in batches(draw(TARGET, 4096, 1)[0]):
        paced.update(torch.tensor(batch))
    assert error(paced) < 0.15


def test_batches_of_one_and_of_64_give_nearly_the_same_mix():
    probs, _ = stream((TARGET, 256), (SOURCE, 256))
    ends = {}
    for size in (1, 64):
        paced, ends[size] = Paced(4), []
        for i, batch in enumerate(batches(probs, size), 1):
            paced.update(torch.tensor(batch))
            if i * size % 64 == 0:
                ends[size].append(paced.prior)
    distances = (torch.stack(ends[1]) - torch.stack(ends[64])).abs().sum(1) / 2
    # within the first 64 images, and those after a change, single images learn sooner
    assert distances[[1, 2, 3, 5, 6, 7]].max() < 0.05
    assert distances[[1, 2, 3, 5, 6, 7]].mean() < 0.03


def test_a_constant_favour_cancels_in_the_relative_estimate():
    """A corruption that makes some classes look likelier, under steady labels."""
    rows = stream((UNIFORM, 3072))[0] * (BIASED * 4) ** 2
    rows /= rows.sum(1, keepdims=True)
    full, relative = Paced(4, relative=False), Paced(4, relative=True)
    found = {full: [], relative: []}
    for batch in batches(rows):
        for e, presents in found.items():
            e.update(torch.tensor(batch))
            presents.append(e.present.numpy())
    away = {e: np.abs(np.mean(presents[16:], 0) - UNIFORM).sum() for e, presents in found.items()}
    assert away[full] > 0.4
    assert away[relative] < 0.1
    torch.testing.assert_close(full.prior, relative.prior)  # what people look at


def presents(estimator, rows, size=64):
    found = []
    for batch in batches(rows, size):
        estimator.update(torch.tensor(batch))
        found.append(estimator.present)
    return torch.stack(found)


@pytest.mark.parametrize("assumes", [None, [0.4, 0.3, 0.2, 0.1]])
@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize(("labels", "start"), [(UNIFORM, 0), (TARGET, 1024)])
def test_steady_labels_leave_predictions_as_they_are(labels, start, size, assumes):
    """An adapter takes out what the logits contain; the same put back is no adjustment.

    The mean prediction begins with uniform labels: until it knows others, they are a change.
    """
    rows = stream((labels, start + 512), seed=3)[0]
    found = presents(Paced(4, assumes=assumes, relative=True), rows, size)[start // size :]
    untouched = torch.tensor(UNIFORM if assumes is None else assumes).float()
    assert torch.equal(found, untouched.expand_as(found))


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_clear_change_of_labels_adjusts(size):
    rows, labels = stream((UNIFORM, 512), (np.eye(4)[2], 256))
    before, after = presents(Paced(4, relative=True), rows, size).split([512 // size, 256 // size])
    assert torch.equal(before, torch.full_like(before, 0.25))
    assert (after[-1] > 0.25).tolist() == [False, False, True, False]
    assert after[-1][2] > 0.5
    plain = rows.argmax(1) == labels
    assert adjusted(Paced(4, relative=True), rows, labels, size) > plain.mean() + 0.03


@pytest.mark.parametrize("below", [True, False])
def test_a_window_must_beat_no_change_by_the_evidence(below):
    """A state in which a window leads by just less, or just more, than that."""
    paced, rows = Paced(4, relative=True), stream(*BURSTS)[0]
    for batch in batches(rows):
        paced.update(torch.tensor(batch))
    state, flat = paced.state(), torch.full((1, 4), 0.25)  # an image that tells nothing
    faded = 0.8 ** (1 / 64)
    paced.update(flat)
    # what this image adds, up to a constant
    told = paced.state()["scores"][1] - faded * state["scores"][1]
    lead = EVIDENCE - float(told[0] - told[2]) + (-0.01 if below else 0.01)
    state["scores"][1] = torch.tensor([0.0, -50.0, -lead / faded])
    paced.load_state(state)
    paced.update(flat)
    assert torch.equal(paced.present, torch.full((4,), 0.25)) == below


@pytest.mark.parametrize("view", range(3))
def test_only_matched_statistics_are_adjusted_by_the_full_estimate(view):
    rows = stream(*BURSTS[:3])[0]
    by_view = Paced(4)
    by_view.view = view
    found = presents(by_view, rows)
    full, relative = (presents(Paced(4, relative=r), rows) for r in (False, True))
    assert not torch.equal(full, relative)
    assert torch.equal(found, relative if view else full)


@pytest.mark.parametrize("relative", [True, False])
def test_the_choice_of_an_estimate_goes_before_the_view(relative):
    rows, found = stream(*BURSTS[:3])[0], []
    for view in range(3):
        paced = Paced(4, relative=relative)
        paced.view = view
        found.append(presents(paced, rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_many_classes_do_not_drown_the_images(classes):
    """256 images of one class: ten more of all classes are a small part, however many classes."""
    row = np.full((256, classes), 0.1 / (classes - 1))
    row[:, 3] = 0.9
    paced = Paced(classes)
    for batch in batches(row):
        paced.update(torch.tensor(batch))
    assert paced.prior[3] > 0.75
    assert paced.present[3] > 0.75


def test_the_pseudo_count_is_a_total():
    """One certain image, with as many images again of all classes."""
    paced = Paced(4, pseudo_count=1.0, own=0.0, steps=200)
    paced.update(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    expected = torch.tensor([0.625, 0.125, 0.125, 0.125])
    for estimate in paced.state()["estimates"][0]:
        torch.testing.assert_close(estimate, expected)


def test_calibration_and_model_prior_come_before_everything():
    probs, _ = stream((TARGET, 128))
    bent = probs**2 * SOURCE * np.exp([0, 1, 0, -1])
    bent /= bent.sum(1, keepdims=True)
    bias = np.array([0, -0.5, 0, 0.5]) + np.log(SOURCE) / 2
    calibrated = Paced(4, SOURCE, temperature=2, bias=bias)
    plain = Paced(4)
    calibrated.update(torch.tensor(bent))
    plain.update(torch.tensor(probs))
    torch.testing.assert_close(calibrated.present, plain.present, atol=1e-4, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 5, 70]),
    st.lists(st.sampled_from([1, 3, 64, 300]), min_size=1, max_size=4),
    st.sampled_from([0.01, 1.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_it_is_always_a_distribution_that_can_be_saved(classes, sizes, sharp, relative, seed):
    rng = np.random.default_rng(seed)
    paced, twin = (Paced(classes, relative=relative) for _ in range(2))
    for size in sizes:
        probs = rng.dirichlet(np.full(classes, sharp), size=size)
        if rng.random() < 0.3:
            probs = np.eye(classes)[rng.integers(classes, size=size)]
        paced.update(torch.from_numpy(probs))
        for q in (paced.prior, paced.present):
            assert q.isfinite().all()
            assert (q >= 0).all()
            assert abs(float(q.double().sum()) - 1) < 1e-5
    twin.load_state(paced.state())
    assert torch.equal(twin.present, paced.present)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([5, 80]), st.integers(0, 10**6), st.booleans())
def test_another_order_of_classes_reorders_the_estimate(classes, seed, relative):
    rng = np.random.default_rng(seed)
    order = rng.permutation(classes)
    one, two = (Paced(classes, relative=relative) for _ in range(2))
    for _ in range(3):
        probs = rng.dirichlet(np.full(classes, 0.3), size=40)
        one.update(torch.from_numpy(probs))
        two.update(torch.from_numpy(probs[:, order]))
    torch.testing.assert_close(one.prior[torch.from_numpy(order)], two.prior)
    torch.testing.assert_close(one.present[torch.from_numpy(order)], two.present)


def test_within_a_batch_the_order_of_images_does_not_matter():
    probs = torch.tensor(stream(*BURSTS[:1])[0][:64])
    one, two = Paced(4), Paced(4)
    one.update(probs)
    two.update(probs.flip(0))
    torch.testing.assert_close(one.present, two.present)


def test_an_image_given_again_and_again_is_believed_more_and_more():
    row, shares = torch.tensor([[0.55, 0.15, 0.15, 0.15]]), []
    paced = Paced(4)
    for _ in range(40):
        paced.update(row.repeat(8, 1))
        shares.append(float(paced.prior[0]))
    assert all(a < b + 1e-6 for a, b in itertools.pairwise(shares))
    assert shares[-1] > 0.8


@pytest.mark.parametrize("classes", [4, 64, 65, 1000])
def test_what_is_kept_of_a_row(classes):
    rows = np.random.default_rng(0).dirichlet(np.full(classes, 0.1), size=20)
    rows[0] = np.eye(classes)[2]
    kept = compress(rows)
    back = expand(kept, classes)
    np.testing.assert_allclose(back.sum(1), 1, atol=2e-3)
    if classes <= 64:
        np.testing.assert_array_equal(back, np.float32(rows))
        return
    for row, found in zip(rows, back, strict=True):
        largest, others = np.split(np.argsort(-row), [64])
        np.testing.assert_allclose(found[largest], row[largest], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found[others], row[others].mean(), rtol=1e-3, atol=1e-9)
        assert found[largest].min() >= found[others].max()


@pytest.mark.parametrize("classes", [10, 64, 1000])
def test_the_state_is_small_and_its_shapes_never_change(classes):
    paced = Paced(classes)
    shapes = {k: (v.shape, v.dtype) for k, v in paced.state().items()}
    for size in (1, 64, 300):
        paced.update(torch.full((size, classes), 1 / classes))
        assert {k: (v.shape, v.dtype) for k, v in paced.state().items()} == shapes
        # no larger storage behind a slice
        held = sum(v.untyped_storage().nbytes() for v in paced._state.values())
        assert held <= 256_000


def distance(a, b):
    """Total variation of the priors of two states."""
    return float((a["prior"] - b["prior"]).abs().sum()) / 2


def after(probs, **chosen):
    paced = Paced(probs.shape[1], **chosen)
    for batch in batches(probs):
        paced.update(torch.tensor(batch))
    return paced.state()


@pytest.mark.parametrize("cut", [64, 704, 1344, 1600, 1984])
@pytest.mark.parametrize("parts", [[(TARGET, 2048)], [(SOURCE, 1024), (TARGET, 1024)]])
def test_merged_halves_are_nearly_the_whole_stream(parts, cut):
    distances, paced = [], Paced(4, pseudo_count=4.0)
    for seed in range(8):
        probs, _ = stream(*parts, seed=seed)
        earlier, later, whole = (
            after(p, pseudo_count=4.0) for p in (probs[:cut], probs[cut:], probs)
        )
        merged = paced.merge(earlier, later)
        distances.append(distance(merged, whole))
        assert merged["seen"] == whole["seen"]
        for name in ("rows", "prediction_sums"):
            torch.testing.assert_close(merged[name], whole[name], atol=1e-6, rtol=5e-3)
        paced.load_state(merged)  # a state as any other
        assert torch.equal(paced.prior, merged["prior"])
    assert np.mean(distances) <= 0.02


def test_a_cut_where_labels_change_hides_the_change_from_the_scores():
    probs, _ = stream((SOURCE, 1024), (TARGET, 1024))
    earlier, later, whole = after(probs[:1024]), after(probs[1024:]), after(probs)
    merged = Paced(4).merge(earlier, later)
    assert distance(merged, whole) <= 0.05 < distance(earlier, whole)


def test_short_parts_are_merged_exactly():
    probs, _ = stream((SOURCE, 320), (TARGET, 256))
    for cut in (320, 512):
        merged, whole = Paced(4).merge(after(probs[:cut]), after(probs[cut:])), after(probs)
        for name in ("estimates", "scores", "label_sums", "prior"):
            torch.testing.assert_close(merged[name], whole[name], atol=1e-3, rtol=1e-4)


def test_the_order_of_merges_hardly_matters():
    paced, parts = Paced(4), np.split(stream((SOURCE, 300), (TARGET, 300))[0], 3)
    a, b, c = (after(p) for p in parts)
    left, right = paced.merge(paced.merge(a, b), c), paced.merge(a, paced.merge(b, c))
    assert distance(left, right) <= 0.02
    for name in ("rows", "prediction_sums"):
        torch.testing.assert_close(left[name], right[name], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("classes", [4, 70])
def test_merging_with_an_empty_state_changes_nothing(classes):
    paced = Paced(classes)
    empty = paced.state()
    paced.update(torch.full((40, classes), 1 / classes))
    some = paced.state()
    for merged in (paced.merge(some, empty), paced.merge(empty, some)):
        assert all(torch.equal(v, some[k]) for k, v in merged.items())
    assert paced.merge(empty, empty)["seen"] == 0


def test_a_merge_shares_no_memory_and_refuses_what_is_no_state():
    paced = Paced(4)
    state = after(stream((TARGET, 300))[0])
    copy = {k: v.clone() for k, v in state.items()}
    for tensor in paced.merge(state, state).values():
        tensor.zero_()
    assert all(torch.equal(v, copy[k]) for k, v in state.items())
    with pytest.raises(MismatchError, match="state of Paced"):
        paced.merge(state, {"rows": state["rows"]})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seen", lambda v: v - 10_000),
        ("seen", lambda v: v + 2**60),
        ("seen", lambda v: v * 0),
        ("rows", lambda v: -v),
        ("rows", lambda v: v * 2),
        ("classes", lambda v: v + 100),
        ("classes", lambda v: v - 1),
        ("classes", lambda v: v * 0),
        ("estimates", lambda v: -v),
        ("estimates", lambda v: v * 2),
        ("label_sums", lambda v: -v),
        ("label_sums", lambda v: v * 1e6),
        ("prediction_sums", lambda v: v - 10),
        ("prediction_sums", lambda v: v * math.nan),
        ("scores", lambda v: v + 1),
        ("prior", lambda v: v * 2),
        ("present", lambda v: v - 1),
        ("present", lambda v: v * 0),
    ],
)
def test_hostile_states_are_refused(name, change):
    paced = Paced(70)
    paced.update(torch.tensor(np.random.default_rng(0).dirichlet(np.ones(70), 100)))
    before = paced.state()
    state = {**before, name: change(before[name]).to(before[name])}
    with pytest.raises(MismatchError, match="state of Paced"):
        paced.load_state(state)
    assert all(torch.equal(v, before[k]) for k, v in paced.state().items())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", 0),
        ("bias", [0.0] * 3),
        ("pseudo_count", 0),
        ("own", -1),
        ("own", math.inf),
        ("long", 0),
        ("long", math.inf),
        ("kappa", 0),
        ("steps", 0),
        ("steps", 1.5),
        ("relative", "yes"),
        ("model_prior", [0, 0.5, 0.25, 0.25]),
    ],
)
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        Paced(4, **{setting: value})


def test_a_model_prior_that_is_none_is_refused():
    with pytest.raises(PriorError):
        Paced(4, [0.5, 0.5])


@pytest.mark.parametrize("view", [0, 1])
@pytest.mark.parametrize("parts", [[(TARGET, 300)], [(SOURCE, 512), (TARGET, 128)], BURSTS])
def test_ahead_is_what_adjusts_a_batch_whose_own_labels_count_for_nothing(view, parts):
    rows, _ = stream(*parts)
    estimator = Paced(4, own=1e12, assumes=BIASED)
    usual = Paced(4, assumes=BIASED)
    for each in (estimator, usual):
        each.view = view
        for batch in torch.from_numpy(rows).float().split(64):
            each.update(batch)
    torch.testing.assert_close(estimator.ahead, estimator.present, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(usual.ahead, estimator.ahead)  # the same stream
    if view == 0:
        torch.testing.assert_close(usual.ahead, usual.prior)


def test_ahead_of_a_new_stream_adjusts_nothing():
    estimator = Paced(4, assumes=BIASED)
    torch.testing.assert_close(estimator.ahead, torch.full((4,), 0.25))
    estimator.view = 1
    torch.testing.assert_close(estimator.ahead, torch.from_numpy(BIASED).float())
    assert EM(4).ahead is not EM(4).present
