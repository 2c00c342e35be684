"""Every method has a card, complete, with every setting, true costs and code that runs."""

import re
from pathlib import Path

import pytest
import torch

from tests.methods.cases import INCOMPATIBLE
from tests.toys import NETS, make_adapter, make_batches, make_method, make_net
from twoshift.methods import methods
from twoshift.models.head import find_head
from twoshift.registry import signature_settings

CARDS = Path(__file__).resolve().parents[1] / "docs" / "methods"
SECTIONS = ["Use", "Settings", "Cost", "Needs", "When it fails", "Reference", "Departures"]
NAMES = [*methods, "label_aware"]
COST = re.compile(r"Forwards per batch: ([^.]+)\. Backwards per batch: ([^.]+)\.")


def card(name):
    path = CARDS / f"{name}.md"
    assert path.is_file(), f"docs/methods/{name}.md is missing"
    return path.read_text()


def section(name, title):
    (_, *parts) = re.split(r"^## (.+)$", card(name), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))[title].strip()


def net_for(name):
    return next(net for net in NETS if (name, net) not in INCOMPATIBLE)


@pytest.mark.parametrize("name", NAMES)
def test_all_sections_in_order_and_none_empty(name):
    titles = re.findall(r"^## (.+)$", card(name), flags=re.MULTILINE)
    assert titles == SECTIONS
    assert card(name).startswith(f"# {name}\n")
    assert all(section(name, title) for title in SECTIONS)


@pytest.mark.parametrize("name", list(methods))
def test_every_setting_and_its_default_is_named(name):
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(name, "Settings"), re.MULTILINE))
    defaults = signature_settings(methods[name])
    shown = {k: str(v) if not isinstance(v, str) else f'"{v}"' for k, v in defaults.items()}
    assert rows == shown


@pytest.mark.parametrize("name", list(methods))
def test_the_cost_is_what_is_measured(name, monkeypatch):
    forwards, backwards = COST.search(section(name, "Cost")).groups()
    if not forwards.isdigit():
        return  # it depends on the images; the card says on what
    count = {"forward": 0, "backward": 0}
    backward = torch.Tensor.backward

    def counted(*args, **kwargs):
        count["backward"] += 1
        return backward(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    net = net_for(name)
    live = make_method(name, make_net(net), False)
    head = find_head(live.model)[1]
    head.register_forward_hook(lambda *_: count.update(forward=count["forward"] + 1))
    live(make_batches(net)[0])
    assert count == {"forward": int(forwards), "backward": int(backwards)}


@pytest.mark.parametrize("name", NAMES)
def test_the_code_runs(name):
    net = net_for(name)
    model = make_net(net)
    names = {"model": model, "adapter": make_adapter(model), "stream": make_batches(net)}
    blocks = re.findall(r"```python\n(.*?)```", section(name, "Use"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), names)
    assert names["logits"].shape[0] == len(names["stream"][-1])


def test_no_card_without_a_method():
    assert {p.stem for p in CARDS.glob("*.md")} - {"index"} == set(NAMES)
