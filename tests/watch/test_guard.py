"""A guard falls back, and comes back."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import twoshift
from twoshift.errors import BatchError, CheckpointError, MismatchError, SettingError
from twoshift.methods import Source
from twoshift.watch import Guard, guard
from twoshift.watch.guard import LAST_GOOD, LIVE, RECOMMENDED, UNADAPTED

guard_of = partial(Guard, block=32)
DARK = torch.zeros(32, 1, 28, 28)


@pytest.fixture
def images(stream):
    return [x for x, _ in stream]


@pytest.fixture
def live(digits, facts):
    return twoshift.recommended(digits.net, facts)


def spoiling(digits):
    """A method that collapses on anything that it learns from."""
    return twoshift.Tent(digits.net, lr=0.5)


def fell(guarded):
    return [switch.to for switch in guarded.switches]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_on_a_healthy_stream_nothing_is_different(digits, facts, live, images):
    plain = twoshift.recommended(digits.net, facts)
    guarded = guard_of(live, facts, every=64)
    for x in images:
        assert torch.equal(guarded(x), plain(x))
    assert guarded.mode == LIVE
    assert guarded.describe().startswith("guarded: Streamed statistics")
    assert len(guarded._good) == 4  # as many as are kept
    assert [g.images for g in guarded._good] == sorted(g.images for g in guarded._good)


def test_dark_images_lead_back_to_the_state_before_them(facts, live, images):
    guarded = guard_of(live, facts, every=32)
    for x in images[:6]:
        guarded(x)
    states = {good.images: good.state for good in guarded._good}
    for _ in range(6):
        guarded(DARK)
    assert fell(guarded) == [LAST_GOOD]
    assert "fallen back to last_good: images look like none" in guarded.describe()
    good = guarded._last_good
    assert good.images <= 6 * 32
    assert equal(live.state(), states[good.images])  # and nothing was learnt since
    before = live.state()
    guarded(DARK)
    assert equal(live.state(), before)
    answers = [guarded(x) for x in images[6:12]]
    assert fell(guarded) == [LAST_GOOD, LIVE]
    assert all(torch.isfinite(a).all() for a in answers)


@pytest.mark.parametrize("policy", [UNADAPTED, RECOMMENDED, LAST_GOOD])
def test_the_policy_says_what_predicts(policy, digits, facts, live, images):
    guarded = guard_of(live, facts, every=64, policy=policy)
    for x in images[:4]:
        guarded(x)
    for _ in range(4):
        guarded(DARK)
    assert guarded.mode == policy
    answer = guarded(images[5])
    if policy == UNADAPTED:
        assert torch.equal(answer, Source(digits.net)(images[5]))
    if policy == RECOMMENDED:
        safer = guarded._method(RECOMMENDED)
        assert safer.settings()["share"] < twoshift.recommended(digits.net, facts).method.share
    before = live.state()
    guarded(DARK)
    assert equal(live.state(), before)


def test_a_method_that_collapses_rests_and_is_tried_again(digits, facts, images, monkeypatch):
    monkeypatch.setattr(guard, "REST", 64)
    monkeypatch.setattr(guard, "TRIAL", 96)
    live = spoiling(digits)
    first = live.state()
    guarded = guard_of(live, facts)
    rests = []
    for x in images * 3:
        guarded(x)
        rests.append(guarded._rest)
    assert fell(guarded)[0] == UNADAPTED
    assert max(rests) >= 4 * 64  # it was tried, in vain
    answer = guarded(images[0])
    assert torch.equal(answer, Source(digits.net)(images[0]))
    if guarded._trial is None:
        assert equal(live.state(), first)


def test_it_comes_back_when_the_method_has_recovered(digits, facts, images, monkeypatch):
    monkeypatch.setattr(guard, "REST", 64)
    live = Source(digits.net)
    guarded = guard_of(live, facts)
    unsure = torch.zeros(32, 10)
    answers = live.forward
    monkeypatch.setattr(live, "forward", lambda x: unsure + 1e-3 * answers(x))
    for x in images[:16]:
        guarded(x)
    assert guarded.mode == UNADAPTED
    monkeypatch.setattr(live, "forward", answers)
    for x in images * 2:
        guarded(x)
    assert fell(guarded)[-1] == LIVE
    assert guarded.watch.active == []


def test_wrong_images_explain_wrong_predictions(digits, facts, images):
    guarded = guard_of(spoiling(digits), facts)
    guarded(images[0])
    for _ in range(12):
        guarded(DARK)
    assert guarded.mode == LAST_GOOD
    assert {a.kind for a in guarded.watch.active} <= {"inputs", "repeats", "statistics"}


def test_refused_batches_are_still_refused_and_lead_to_a_fall(facts, live, images):
    guarded = guard_of(live, facts, every=32)
    guarded(images[0])
    for _ in range(4):
        with pytest.raises(BatchError, match="Divide by 255"):
            guarded(images[0] * 255)
    assert guarded.mode == LAST_GOOD
    for x in images[1:6]:
        guarded(x)
    assert guarded.mode == LIVE


def test_saved_in_the_middle_it_goes_on_bit_for_bit(digits, facts, live, images, tmp_path):
    first = guard_of(live, facts, every=64, policy=RECOMMENDED)
    order = [*images[:5], *[DARK] * 3, *images[5:14]]
    for x in order[:7]:
        first(x)
    assert first.mode == RECOMMENDED
    first.save(tmp_path)
    second = guard_of(twoshift.recommended(digits.net, facts), facts, every=64, policy=RECOMMENDED)
    second.load(tmp_path)
    for x in order[7:]:
        assert torch.equal(first(x), second(x))
    assert (first.mode, first.watch.alarms) == (second.mode, second.watch.alarms)
    assert first.mode == LIVE


def test_reset_returns_to_the_beginning(facts, live, images):
    guarded = guard_of(live, facts, every=32)
    answers = [guarded(x) for x in images[:3]]
    for _ in range(4):
        guarded(DARK)
    guarded.reset()
    assert (guarded.mode, fell(guarded), guarded.watch.images) == (LIVE, [], 0)
    assert all(torch.equal(a, guarded(x)) for a, x in zip(answers, images[:3], strict=True))


def test_a_stream_of_several_can_be_guarded(facts, live, images):
    guarded = guard_of(live.stream("gate"), facts, every=32)
    for x in [*images[:3], DARK, DARK, DARK]:
        guarded(x)
    assert guarded.mode == LAST_GOOD
    assert torch.isfinite(live(images[3])).all()


def test_threads_may_share_a_guard(facts, live, images):
    guarded = guard_of(live, facts)
    threads = [threading.Thread(target=guarded, args=(x,)) for x in images[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guarded.watch.images == 6 * 32


def test_mistakes_are_errors(digits, facts, live, images, tmp_path):
    with pytest.raises(SettingError, match="policy of guard"):
        guard_of(live, facts, policy="hope")
    with pytest.raises(SettingError, match="keep of guard"):
        guard_of(live, facts, keep=0)
    with pytest.raises(SettingError, match="keep of guard, must be at most 32"):
        guard_of(live, facts, keep=1000)
    guarded = guard_of(live, facts)
    guarded(images[0])
    guarded.save(tmp_path / "guard")
    other = guard_of(twoshift.Tent(digits.net), facts)
    with pytest.raises(MismatchError, match="another model or method"):
        other.load(tmp_path / "guard")
    with pytest.raises(CheckpointError, match=r"card\.json is missing"):
        guarded.load(tmp_path)
    card = tmp_path / "guard" / "card.json"
    card.write_text(card.read_text().replace('"mode": "live"', '"mode": "dead"'))
    with pytest.raises(CheckpointError):
        guarded.load(tmp_path / "guard")
