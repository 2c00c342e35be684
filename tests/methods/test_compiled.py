"""A network compiled in place: the same predictions, states and names."""

import copy

import pytest
import torch

from tests.toys import make_batches, make_method, make_net, same
from twoshift.errors import ModelError
from twoshift.methods import Method, Tent, _compiled

BATCHES = make_batches("mlp", (8, 8, 5, 8))
NAMES = [
    "matched",
    "streamed",
    "cotta",
    "tribe",
    "sar",
]  # passes of one kind, of several networks, with and without hooks
# torch's, about itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


def both(name, **options):
    """A method with an adapter and an estimate, and the same one compiled."""
    net = make_net("mlp")
    plain, live = (make_method(name, net, True) for _ in range(2))
    live.compile(**options)
    return plain, live, net


@pytest.fixture(autouse=True)
def forget():
    """What was compiled for other tests counts against a limit of torch."""
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NAMES)
def test_everything_goes_on_as_before(name, tmp_path):
    plain, live, net = both(name, backend="eager")  # traced, but not translated: equal to the bit
    for x in BATCHES[:3]:
        assert torch.equal(live(x), plain(x))
    assert torch.equal(live.prior, plain.prior)
    assert same(live.state(), plain.state())
    assert live.origin() == plain.origin()
    live.save(tmp_path / "state")
    restored = type(live).load(tmp_path / "state", net)
    assert torch.equal(restored(BATCHES[3]), live(BATCHES[3]))
    live.reset()
    plain.reset()
    other = live.stream("other")
    assert torch.equal(live(BATCHES[0]), plain(BATCHES[0]))
    plain.reset()
    assert torch.equal(other(BATCHES[0]), plain(BATCHES[0]))


def test_a_stream_needs_no_new_compilation():
    """Not for other statistics, shares or labels."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, live, _ = both("streamed", backend=counting)
    assert torch.equal(live(BATCHES[0]), plain(BATCHES[0]))
    compiled = len(graphs)
    for x in make_batches("mlp", (8,) * 12, seed=5):  # more than torch compiles before it gives up
        assert torch.equal(live(0.1 * x), plain(0.1 * x))
    assert len(graphs) == compiled > 0


def test_all_copies_of_the_network_are_compiled_and_no_other():
    _, live, net = both("cotta", backend="eager")
    core = live.method
    networks = (core.model, core.teacher, core.anchor)
    assert all(n._compiled_call_impl is not None for n in networks)
    assert live._compiled_call_impl is None  # the lock and the checks are not traced
    assert net._compiled_call_impl is None
    assert copy.deepcopy(live).method.model._compiled_call_impl is None


def test_without_a_compiler_it_says_so_and_changes_nothing():
    def broken(graph, inputs):
        raise FileNotFoundError("no g++\nfar away")

    live = make_method("tent", make_net("mlp"), True)
    with pytest.raises(ModelError, match=r"anything here: .*no g\+\+.*Install a C\+\+ compiler"):
        live.compile(backend=broken)
    assert live.method.model._compiled_call_impl is None
    live(BATCHES[0])


def test_unknown_options_are_refused_at_once():
    live = Tent(make_net("mlp"))
    with pytest.raises(ModelError, match="no_such_backend"):
        live.compile(backend="no_such_backend")


def test_a_model_that_cannot_be_compiled_is_not_a_bad_batch():
    calls = []

    def only_once(graph, inputs):
        calls.append(graph)
        if len(calls) > 1:
            raise RuntimeError("too odd")
        return graph.forward

    live = Tent(make_net("mlp"))
    live.compile(backend=only_once)
    before = live.state()
    with pytest.raises(ModelError, match=r"cannot compile this model: .*too odd") as error:
        live(BATCHES[0])
    assert "backend='aot_eager'" in str(error.value)
    assert same(live.state(), before)


def test_other_errors_are_not_the_compilers():
    assert _compiled.compiler_refusal(RuntimeError("mat1 and mat2")) is None
    assert Method.compile is not torch.nn.Module.compile


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matched", "tent"])
def test_compiled_predictions_agree(name, tmp_path):
    plain, live, net = both(name)
    first = live(BATCHES[0])
    torch.testing.assert_close(first, plain(BATCHES[0]), rtol=1e-4, atol=1e-4)
    for x in (BATCHES[1], BATCHES[2][:3]):
        torch.testing.assert_close(live(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(live.prior, plain.prior, rtol=1e-4, atol=1e-4)
    live.save(tmp_path / "state")
    restored = type(live).load(tmp_path / "state", net)
    assert same(restored.state(), live.state())
    restored.compile()
    torch.testing.assert_close(restored(BATCHES[1]), live(BATCHES[1]), rtol=1e-4, atol=1e-4)
    live.reset()
    assert same(live.state(), make_method(name, net, True).state())
    torch.testing.assert_close(live(BATCHES[0]), first, rtol=1e-4, atol=1e-4)
