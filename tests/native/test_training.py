"""Steps of training with the compiled helper, without, and with one that refuses at random: the same
launches, with the same values, in both passes."""

import pytest
import torch
from torch import nn

from sparse_bridge import settings
from sparse_bridge.kernels.gemm import wgrad_gemm
from sparse_bridge.kernels.ops.batch_norm import unread
from sparse_bridge.native import calls as native_calls
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud
from tests.host_time import pairs
from tests.native.recording import RANDOM, WAYS, Recorder, anew, check_alike, helper, served, way
from tests.walk_apis import pretended_gpu

COORDS, SHAPE = cloud((8, 9, 10)), [8, 9, 10]
HELPED = [one for one in (*WAYS, *RANDOM) if one != "off"]


EVENTS = {}


def event(run):
    EVENTS[run.__name__] = run
    return run


class Net(nn.Module):
    """A container, a norm that is called on features, and a residual sum."""

    def __init__(self, sp, bias):
        super().__init__()

        def conv(c_in=16):
            return sp.SubMConv3d(c_in, 16, 3, bias=bias, indice_key="a")

        self.first = sp.SparseSequential(conv(4), nn.BatchNorm1d(16), nn.ReLU())
        self.conv1, self.conv2, self.norm = conv(), conv(), nn.BatchNorm1d(16)
        self.last = conv()

    def forward(self, x):
        x = self.first(x)
        y = self.conv2(self.conv1(x))
        y = y.replace_feature(self.norm(y.features) + x.features)
        return self.last(y.replace_feature(torch.relu(y.features)))


class World:
    def __init__(self, sp, recorder, bias):
        torch.manual_seed(2)
        self.recorder, self.net = recorder, Net(sp, bias).train()
        self.x = sp.SparseConvTensor(torch.randn(len(COORDS), 4), COORDS, SHAPE, 2)
        with torch.no_grad(), settings.override(dataflow="per_offset"):
            self.x.indice_dict = self.net.first(self.x).indice_dict
        recorder.name(self.net)

    def step(self, x=None):
        """Both passes; what has a gradient, and how it lies in memory."""
        x = self.x if x is None else x
        lines = self.recorder.lines

        def both():
            y = self.net(x).features
            y.backward(torch.ones_like(y))
            return y

        self.recorder.tell(both)
        for name, one in (*self.net.named_parameters(), ("x", x.features)):
            grad = one.grad
            lines.append((name, grad if grad is None else (grad.dtype, grad.shape, grad.stride())))
            one.grad = None
        lines.append([(name, buffer._version) for name, buffer in self.net.named_buffers()])

    def over(self, features):
        return self.x.replace_feature(features)


@event
def nothing(world):
    world.step()


@event
def autocast(world):
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            world.step()
            world.step()


@event
def in_half(world):
    world.net.half()
    world.recorder.name(world.net)
    for _ in range(3):
        world.step(world.over(world.x.features.half()))


@event
def gradients_of_the_input(world):
    features = world.x.features.clone().requires_grad_()
    for _ in range(3):
        world.step(world.over(features))


@event
def frozen(world):
    for part in (world.net.conv1, world.net.conv1, world.net.norm, world.net):
        part.requires_grad_(False)
        world.net.last.weight.requires_grad_()
        world.step()


@event
def norms_of_other_kinds(world):
    for name, value in (("momentum", None), ("momentum", 0.2), ("eps", 0.0), ("eps", 1e-3), ("weight", None)):
        setattr(world.net.norm, name, value)
        if value != 1e-3:
            world.step()
    kinds = ({"track_running_stats": False}, {"affine": False})
    for norm in (*(nn.BatchNorm1d(16, **how) for how in kinds), nn.SyncBatchNorm(16).eval()):
        world.net.norm = norm
        world.step()


@event
def rows_lie_otherwise(world):
    wide, memory = torch.randn(len(COORDS), 8), torch.randn(len(COORDS) * 4 + 1)
    for features in (wide[:, :4], wide.t().contiguous().t()[:, :4], wide[:, ::2], memory[1:].view(-1, 4)):
        world.step(world.over(features))
        world.step(world.over(features))


@event
def wrong_inputs(world):
    for wrong in (torch.zeros(len(COORDS), 8), torch.zeros(3, 4), torch.zeros(len(COORDS), 4).double()):
        world.step(world.over(wrong))
    world.net.last.weight.data = world.net.last.weight.data.double()
    world.step()
    world.net.last.weight.data = torch.randn(16, 3, 3, 3, 4)
    world.step()


@event
def hooks(world):
    layer = world.net.conv2
    for register in (layer.register_forward_hook, layer.register_full_backward_hook):
        hook = register(lambda *_: None)
        world.step()
        hook.remove()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        world.step()
    world.step()


@event
def the_graph_is_kept(world):
    features = world.x.features.clone().requires_grad_()

    def twice():
        y = world.net(world.over(features)).features
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return y

    world.recorder.tell(twice)
    world.recorder.tell(lambda: torch.autograd.grad(twice().sum(), features, create_graph=True))


@event
def settings_change_between_the_passes(world):
    y = world.net(world.x).features
    with settings.override(tune="off"):
        world.recorder.tell(lambda: y.sum().backward())
    with settings.override(optimize="off"):
        world.step()
    world.step()


@event
def scenes_change(world):
    """Layers that are known meet maps that nobody has seen."""
    scenes = []
    with torch.no_grad(), settings.override(dataflow="per_offset"):
        for seed in range(3):
            coords = cloud((8, 9, 10), seed=seed + 5)
            x = world.x.replace_feature(torch.randn(len(coords), 4))
            x.indices, x.indice_dict = coords, {}
            x.indice_dict = world.net.first[0](x).indice_dict
            scenes.append(x)
    world.step()
    world.step()
    for x in scenes:
        world.step(x)
        world.step(x)


@event
def turned_off_and_on(world):
    """Python takes every call while it is off."""
    with settings.override(native=False), served() as by_helper:
        world.step()
        world.step()
    assert set(by_helper.values()) == {0}
    world.step()


@event
def launches_fail(world):
    for name in ("gather_gemm", "wgrad_gemm", "sum_shares", "batch_norm_apply", "batch_norm_dx"):
        left = [2]

        def fails(kernel, name=name, left=left):
            left[0] -= kernel == name
            return 700 if kernel == name and left[0] < 0 else 0

        world.recorder.before = fails
        world.step()
        world.recorder.before = lambda kernel: 0
        world.step()


def told(name, chosen, bias):
    """(what was recorded, what the helper did) of steps with an event between them."""
    recorder = Recorder()
    with anew(), way(chosen), recorder.recording(), spconv_apis.standin() as sp:
        world = World(sp, recorder, bias)
        with pretended_gpu(), pairs(), served() as by_helper:
            for _ in range(4):
                world.step()
            EVENTS[name](world)
            world.step()
    return recorder.lines, by_helper


def alike(name, ways, bias):
    helper()
    unread(torch.device("cpu"))  # made once per process
    check_alike(lambda chosen: told(name, chosen, bias), ways, 100, set(native_calls.TRAINING), 4)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event(name):
    alike(name, ["on", "refused 2.0%, 1"], bias=True)


@pytest.mark.parametrize("name", ["nothing", "autocast", "in_half", "launches_fail"])
def test_weight_gradients_in_two_launches(name, monkeypatch):
    """As on a GPU: several programs share a weight's gradient, and a second launch adds up."""
    launched, own = [], wgrad_gemm.wgrad_shares
    monkeypatch.setattr(wgrad_gemm, "wgrad_shares", lambda *args: launched.append(own(*args)) or 40)
    alike(name, HELPED, bias=False)
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("bias", [False, True])
def test_an_event_with_more_refusals(name, bias):
    alike(name, HELPED, bias)
