import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from twoshift.errors import CheckpointError, StorageError
from twoshift.train import loop
from twoshift.train.recipes import Optimiser

# -- learning rate ----------------------------------------------------------------------------


def rate(schedule, progress, lr=0.2):
    return loop.learning_rate(Optimiser(lr=lr, schedule=schedule), progress)


@pytest.mark.parametrize("progress", [0, 0.1, 0.2, 0.5, 0.75, 0.999])
def test_schedules_against_their_formulas(progress):
    assert rate("constant", progress) == 0.2
    assert rate("cosine", progress) == pytest.approx(0.1 * (1 + math.cos(math.pi * progress)))
    if progress <= 0.2:
        expected = 0.2 * (0.04 + (1 - 0.04) * progress / 0.2)
    else:
        expected = 0.1 * (1 + math.cos(math.pi * (progress - 0.2) / 0.8))
    assert rate("one_cycle", progress) == pytest.approx(expected)


def test_landmarks_of_the_schedules():
    assert [rate("cosine", p) for p in (0, 0.5, 1)] == pytest.approx([0.2, 0.1, 0])
    assert [rate("one_cycle", p) for p in (0, 0.2, 0.6, 1)] == pytest.approx([0.008, 0.2, 0.1, 0])


@given(st.sampled_from(["cosine", "one_cycle", "constant"]), st.floats(0, 1))
def test_a_rate_is_never_negative_nor_above_the_setting(schedule, progress):
    assert 0 <= rate(schedule, progress) <= 0.2 + 1e-12


def test_steps_equal_torchs_scheduler_epoch_by_epoch():
    recipe = Optimiser(lr=0.1, schedule="steps", milestones=[60, 80], epochs=90)
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimiser, [60, 80])
    for epoch in range(90):
        expected = optimiser.param_groups[0]["lr"]
        assert loop.epoch_rates(recipe, epoch, 90, 7) == pytest.approx([expected] * 7)
        optimiser.step()
        scheduler.step()
    assert expected == pytest.approx(1e-3)


def test_a_group_has_its_own_share_of_the_rate():
    slow, fast = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    recipe = Optimiser(lr=0.5, momentum=0, weight_decay=0)
    groups = [{"params": [slow], "scale": 0.1}, {"params": [fast]}]
    optimiser = loop.make_optimiser(recipe, groups)
    loop.run_epoch(
        Accelerator(), torch.nn.Identity(), optimiser, lambda _, x: (slow + fast) * x, [2], [0.5]
    )
    assert (slow.item(), fast.item()) == pytest.approx((-0.1, -1))


def test_a_class_without_images_has_a_finite_log_prior():
    device = torch.device("cpu")
    shares = loop.log_prior([3, 0, 1], device).exp()
    torch.testing.assert_close(shares, torch.tensor([3 / 4, 1 / 8, 1 / 4]))
    torch.testing.assert_close(loop.log_prior([3, 1], device).exp(), torch.tensor([0.75, 0.25]))


def test_cosine_equals_torchs_scheduler_step_by_step():
    recipe = Optimiser(lr=0.1, schedule="cosine")
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=12)
    expected = []
    for _ in range(12):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    ours = [r for epoch in range(3) for r in loop.epoch_rates(recipe, epoch, 3, 4)]
    assert ours == pytest.approx(expected)


def test_the_optimiser_is_the_recipes():
    recipe = Optimiser(lr=0.3, momentum=0.8, weight_decay=0.01, nesterov=True)
    (group,) = loop.make_optimiser(recipe, [torch.nn.Parameter(torch.zeros(1))]).param_groups
    settings = [group[k] for k in ("lr", "momentum", "weight_decay", "nesterov")]
    assert settings == [0.3, 0.8, 0.01, True]


def test_adamw_against_its_formulas():
    lr, beta, decay = 0.1, 0.8, 0.5
    recipe = Optimiser(optimizer="adamw", lr=lr, momentum=beta, weight_decay=decay, nesterov=False)
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimiser = loop.make_optimiser(recipe, [weight])
    slopes = [3.0, -1.0, 0.5]
    loop.run_epoch(
        Accelerator(), torch.nn.Identity(), optimiser, lambda _, x: weight * x, slopes, [lr] * 3
    )
    w, mean, square = 2.0, 0.0, 0.0
    for t, slope in enumerate(slopes, start=1):
        mean, square = beta * mean + (1 - beta) * slope, 0.999 * square + 0.001 * slope**2
        w -= lr * decay * w
        w -= lr * (mean / (1 - beta**t)) / (math.sqrt(square / (1 - 0.999**t)) + 1e-8)
    assert weight.item() == pytest.approx(w, rel=1e-6)


# -- batches ----------------------------------------------------------------------------------


def batches(labels, size, seed=0, balanced=False):
    return list(loop.shuffled_batches(labels, size, np.random.default_rng(seed), balanced))


@given(st.integers(2, 60), st.integers(2, 20), st.integers(0, 5))
def test_an_epoch_is_a_permutation_and_never_a_batch_of_one(count, size, seed):
    epoch = batches(np.zeros(count, np.int64), size, seed)
    indices = np.concatenate(epoch).tolist()
    lonely = count % size == 1
    assert len(set(indices)) == len(indices) == count - lonely
    assert set(indices) <= set(range(count))
    assert all(len(batch) == size for batch in epoch[:-1])
    assert all(len(batch) > 1 for batch in epoch)


def test_order_is_shuffled_and_decided_by_the_generator():
    labels = np.zeros(50, np.int64)
    first, again, other = (np.concatenate(batches(labels, 10, seed)) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert first.tolist() != sorted(first)


def test_balanced_batches_draw_every_class_equally_often():
    labels = np.repeat([0, 1, 3], [5000, 900, 100])  # class 2 has no image
    epoch = batches(labels, 64, balanced=True)
    counts = np.bincount(labels[np.concatenate(epoch)], minlength=4)
    # three binomials of 6000 draws: five standard deviations are 183
    assert abs(counts[[0, 1, 3]] - 2000).max() < 183
    assert counts[2] == 0
    assert counts.sum() == 6000
    plain = np.bincount(labels[np.concatenate(batches(labels, 64))], minlength=4)
    assert plain.tolist() == [5000, 900, 0, 100]


def test_balanced_sampling_uses_all_images_of_a_class():
    labels = np.repeat([0, 1], [400, 20])
    drawn = np.concatenate([np.concatenate(batches(labels, 32, s, True)) for s in range(5)])
    rare = np.bincount(drawn, minlength=420)[400:]
    assert rare.min() > 20  # 52 expected each
    assert len(set(drawn.tolist())) > 350


# -- folders and jobs -------------------------------------------------------------------------


def test_other_settings_are_named_whatever_their_depth(tmp_path):
    job = {"recipe": {"lr": 0.1, "settings": {"width": 4}, "lambdas": (1, 0)}, "seed": 0}
    as_read = {"recipe": {"lr": 0.1, "settings": {"width": 4}, "lambdas": [1, 0]}, "seed": 0}
    loop.check_same_job(tmp_path, job, as_read)
    changed = {"recipe": {"lr": 0.2, "settings": {"width": 8}, "lambdas": [1, 0]}, "seed": 0}
    with pytest.raises(CheckpointError, match=r"\(recipe\.lr, recipe\.settings\.width\)"):
        loop.check_same_job(tmp_path, job, changed)


def test_an_interrupted_training_may_go_on_with_its_leftovers(tmp_path):
    for name in (".training", "..training.x1y2", "..training.old"):
        (tmp_path / name).mkdir()
    loop.check_folder(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # the check leaves no trace


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        loop.check_folder(tmp_path / "file" / below)
