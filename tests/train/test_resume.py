"""Trainings that are killed, again and again, end with the weights of an undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Torch is imported once; every life is a fork that trains, and is killed or finishes.
DRIVER = '''
import json, os, random, signal, sys, time, traceback
from pathlib import Path

import torch

torch.set_num_threads(1)
from tests.train import toy
from twoshift.adapters import load_adapter
from twoshift.storage import _folders, fingerprint
from twoshift.train.adapter import train_adapter
from twoshift.train.checkpoint import load_source
from twoshift.train.source import train_source

root, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
log = root / "log"
toy.register()


def train(kind, out, progress):
    if kind == "source":
        recipe = toy.source_recipe(epochs=4, retrain_epochs=3, strategy="classifier_retraining")
        train_source(recipe, out, progress=progress)
    else:
        recipe = toy.adapter_recipe(epochs=7, augment="crop", views=3, points=0)
        train_adapter(load_source(root / "base"), recipe, out, progress=progress)


def weights(kind, out):
    model = load_source(out).model if kind == "source" else load_adapter(out)
    return fingerprint(model.state_dict())


def die_at(event, count):
    """Kill this process at the count-th call of something."""
    left = [count]

    def before(real):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    if event == "step":
        torch.optim.SGD.step = before(torch.optim.SGD.step)
    elif event == "write":
        _folders.make_card = before(_folders.make_card)
    elif event == "rename":
        Path.replace = before(Path.replace)
    return before(lambda: None) if event == "epoch" else lambda: None


def life(kind, out, event=None, count=0, seconds=None):
    """The signal that ended it, its exit code, and the epochs that it finished."""
    log.write_text("")
    child = os.fork()
    if child == 0:
        end_of_epoch = die_at(event, count)

        def progress(done, total, facts):
            with log.open("a") as f:
                f.write(f"{done}\\n")
            end_of_epoch()

        try:
            train(kind, out, progress)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    return os.WTERMSIG(status), code, [int(line) for line in log.read_text().split()]


def story(kind, plans):
    calm, killed, random_ = (root / f"{kind}-{name}" for name in ("calm", "killed", "random"))
    start = time.monotonic()
    undisturbed = life(kind, calm)
    seconds = time.monotonic() - start
    planned = [life(kind, killed, *plan) for plan in [*plans, ()]]
    rng = random.Random(0)
    moments = [*(rng.uniform(0.1, 0.4) * seconds for _ in range(3)), None]
    at_random = [life(kind, random_, seconds=moment) for moment in moments]
    return {
        "weights": [weights(kind, out) for out in (calm, killed, random_)],
        "left": sorted(p.name for p in killed.iterdir()),
        "undisturbed": undisturbed,
        "planned": planned,
        "at_random": at_random,
    }


train_source(toy.source_recipe(epochs=2), root / "base")  # imports the rest of torch, too
stories = {kind: story(kind, kind_plans) for kind, kind_plans in plans.items()}
(root / "stories.json").write_text(json.dumps(stories))
'''


def plans(steps):
    """When to kill, in a training of 7 epochs, and the epochs finished in that life."""
    return [
        (("step", steps + steps // 2), [1]),  # in the middle of the second epoch
        (("epoch", 1), [2]),  # between two epochs
        (("write", 1), []),  # while the state of the third epoch is written
        (("step", 2 * steps + 3), [3, 4]),  # in the fifth
        (("rename", 2), []),  # its state: the new file in place, the card still that of the fourth
        (("epoch", 1), [5]),
    ]


PLANS = {"source": plans(steps=14), "adapter": plans(steps=7)}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    kills = {kind: [kill for kill, _ in of_kind] for kind, of_kind in PLANS.items()}
    subprocess.run(
        [sys.executable, driver, folder, json.dumps(kills)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    return json.loads((folder / "stories.json").read_text())


@pytest.mark.parametrize("kind", PLANS)
def test_a_killed_training_ends_with_the_same_weights(stories, kind):
    story = stories[kind]
    calm, killed, _ = story["weights"]
    assert killed == calm
    assert story["undisturbed"] == [0, 0, [1, 2, 3, 4, 5, 6, 7]]
    assert "card.json" in story["left"]
    assert len(story["left"]) == 2  # the weights and the card: no state, no half-written file


@pytest.mark.parametrize("kind", PLANS)
def test_every_life_goes_on_after_the_last_whole_state(stories, kind):
    expected = [[9, 0, epochs] for _, epochs in PLANS[kind]]
    assert stories[kind]["planned"] == [*expected, [0, 0, [6, 7]]]


@pytest.mark.parametrize("kind", PLANS)
def test_killed_at_random_moments(stories, kind):
    calm, _, killed = stories[kind]["weights"]
    assert killed == calm
    *lives, last = stories[kind]["at_random"]
    assert all(code == 0 for _, code, _ in lives), lives
    assert last[:2] == [0, 0]
    # the last epoch may be run twice: its result is saved after it was reported
    finished = [epoch for _, _, epochs in [*lives, last] for epoch in epochs if epoch < 7]
    assert finished == sorted(set(finished))
