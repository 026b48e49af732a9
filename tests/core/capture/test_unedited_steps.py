"""Training programs that nobody edited: what they see with replays is what they see without."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sparse_bridge import policy, settings
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.replay_training import TrainingReplayer
from sparse_bridge.refusals import Why

from . import apis
from .closed_programs import Net
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

SCENES = 7  # the fifth is replayed


class WithHead(Net):
    """A linear layer behind the sparse ones, and a list for more of them."""

    def __init__(self, sp):
        super().__init__(sp)
        self.head, self.extra = nn.Linear(8, 8), nn.ModuleList()

    def end(self, x):
        x = x.replace_feature(self.head(x.features))
        for layer in self.extra:
            x = x.replace_feature(layer(x.features))
        return x


@pytest.fixture
def seen(device, rules):
    """The function that runs a program with replays and without: [what it has seen] of each, and the model that was
    replayed. The program is a class of models and a generator of what it sees, of a model, the function that makes a
    scene, and the framework's module."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)

    def run(model_class, program):
        both = []
        for mode in ("off", "graphs"):
            torch.manual_seed(0)
            with settings.override(optimize=mode):
                model = model_class(module).to(device)
                scene = lambda seed: apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed)  # noqa: E731
                both.append(list(program(model, scene)))
        return *both, model

    with apis.standin("spconv") as module:
        yield run


def replayer(model):
    return graph_regions.region_of(model).replayer.training


def reasons():
    return [one.reason or "" for one in graph_regions.summary()]


def step(model, x):
    model.zero_grad()
    features = model(x).features
    features.square().mean().backward()
    return features


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def close(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (mine[name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(mine[name], expected, rtol=2e-3, atol=1e-4, msg=name)


def adds_a_layer(model):
    model.extra.append(nn.Linear(8, 8).to(model.head.weight.device))


def puts_one_in_its_place(model):
    model.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(model.head.weight.device)


def parametrizes(model):
    nn.utils.parametrizations.weight_norm(model.head)


@pytest.mark.parametrize("change", [adds_a_layer, puts_one_in_its_place, parametrizes])
def test_modules_that_come_later_are_trained(seen, change):
    def program(model, scene):
        for seed in range(2 * SCENES):
            step(model, scene(seed))
            if seed == SCENES:
                change(model)
        yield gradients(model)

    (theirs,), (mine,), model = seen(WithHead, program)
    close(mine, theirs)
    assert replayer(model).hits > SCENES - 4 and replayer(model).graphs


def test_weights_that_torch_caches(seen):
    """A replay would compute them anew: of what they are made of by now, and without a gradient of their own."""

    def program(model, scene):
        nn.utils.parametrizations.weight_norm(model.head)
        for seed in range(SCENES):
            step(model, scene(seed))
        with nn.utils.parametrize.cached():
            loss = model(scene(0)).features.square().mean()
            yield {"weight": torch.autograd.grad(loss, model.head.weight)[0]}

    (theirs,), (mine,), model = seen(WithHead, program)
    close(mine, theirs)
    assert replayer(model).hits


class Checkpointed(Net):
    """The second half is computed again in the backward pass."""

    def forward(self, x):
        x = self.a(x)
        again = lambda values: self.b(x.replace_feature(values)).features  # noqa: E731
        return x.replace_feature(checkpoint(again, x.features, use_reentrant=False))


def test_a_trial_of_a_model_with_checkpoints_leaves_its_statistics(seen):
    """What is computed in a backward pass writes to the model's own buffers."""

    def program(model, scene):
        for seed in range(SCENES):
            step(model, scene(seed))
        yield {name: buffer.float() for name, buffer in model.named_buffers()}

    (theirs,), (mine,), _ = seen(Checkpointed, program)
    close(mine, theirs)


class Dropping(Net):
    rate = 0.3

    def end(self, x):
        return x.replace_feature(F.dropout(x.features, self.rate, self.training))


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.01 * torch.randn_like(gradient)


class Noisy(Net):
    """Draws in its backward pass alone."""

    def end(self, x):
        return x.replace_feature(_Noise.apply(x.features))


@pytest.mark.parametrize("drawing", [Dropping, Noisy])
def test_random_numbers_are_those_of_the_program(seen, drawing):
    """The comparison of gradients allows for rounding, and would take other numbers for a lot of it."""

    def program(model, scene):
        for seed in range(SCENES):
            torch.manual_seed(seed)
            yield step(model, scene(seed)).detach(), torch.rand(1)

    theirs, mine, _ = seen(drawing, program)
    assert any("(random numbers)" in reason for reason in reasons())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


class TwoHeads(Net):
    """Outputs of which one learns nothing of the other."""

    def __init__(self, sp):
        super().__init__(sp)
        self.one, self.other = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        values = self.b(self.a(x)).features
        return self.one(values), self.other(values.detach())


def test_outputs_without_a_common_graph_go_backward_one_by_one(seen):
    def program(model, scene):
        for seed in range(SCENES):
            model.zero_grad()
            one, other = model(scene(seed))
            one.square().mean().backward()
            other.square().mean().backward()
        yield gradients(model)

    (theirs,), (mine,), _ = seen(TwoHeads, program)
    assert any(Why.GRAPH_SEPARATE.name in reason for reason in reasons())
    close(mine, theirs)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_run_in_their_order(seen, kind):
    def program(model, scene):
        order = []
        for name, parameter in model.named_parameters():
            getattr(parameter, kind)(lambda _, name=name: order.append(name))
        for seed in range(SCENES):
            step(model, scene(seed))
        yield order

    (theirs,), (mine,), _ = seen(Net, program)
    assert mine == theirs and len(theirs) == SCENES * 6


@pytest.mark.parametrize("name", ["head.bias", "head.weight", "b.0.weight"])
def test_parameters_written_to_before_the_backward_pass(seen, name):
    """What the layers need for it must not be; the rest may. The message is torch's own."""

    def program(model, scene):
        for seed in range(SCENES):
            values = model(scene(seed)).features
            with torch.no_grad():
                model.get_parameter(name).mul_(1.01)
            try:
                step(model, scene(seed)) if seed < 5 else values.square().mean().backward()
                yield "done"
            except RuntimeError as error:
                yield re.sub(r", which is output 0 of \w+,", "", str(error))  # a layer's own view of it

    theirs, mine, model = seen(WithHead, program)
    assert mine == theirs and replayer(model).hits
    assert ("modified by an inplace operation" in theirs[-1]) == (name != "head.bias")


def test_a_second_backward_pass_after_a_write_that_the_first_allows(seen, device):
    """The forward pass is replayed again before it, and would be another one."""

    def program(model, scene):
        for seed in range(SCENES):
            model.zero_grad()
            loss = model(scene(seed)).features.square().mean()
            loss.backward(retain_graph=True)
            with torch.no_grad():
                model.head.bias.add_(0.1)
            if seed == SCENES - 1:
                with pytest.raises(RuntimeError, match="and a second backward pass"):
                    loss.backward()
                yield replayer(model).hits

    with settings.override(optimize="graphs"), apis.standin("spconv") as module:
        model = WithHead(module).to(device)
        scene = lambda seed: apis.scene(module, "spconv", seed, device, 0.25)  # noqa: E731
        assert next(program(model, scene)) > 0


def test_the_gradient_of_the_features_has_memory_for_their_rows_alone(seen):
    def program(model, scene):
        for seed in range(SCENES):
            x = scene(seed)
            x = x.replace_feature(x.features.requires_grad_())
            step(model, x)
            yield x.features.grad.untyped_storage().nbytes()

    theirs, mine, model = seen(Net, program)
    assert mine == theirs and replayer(model).hits


@pytest.fixture
def own_precision():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="fp32_precision is of torch 2.9")
def test_programs_that_set_fp32_precision(seen, own_precision):
    """Asked by its older name the switch raises then."""

    def program(model, scene):
        for seed in range(SCENES):
            step(model, scene(seed))
        yield gradients(model)

    (theirs,), (mine,), model = seen(Net, program)
    close(mine, theirs)
    assert replayer(model).hits


@pytest.mark.parametrize("used", [0, 1], ids=["linear", "sparse"])
def test_gradients_of_gradients_are_those_of_the_layers(seen, used):
    """Dense layers have them, sparse ones say why they have none."""

    def program(model, scene):
        for seed in range(SCENES):
            model.zero_grad()
            weight = (model.head.weight, model.a[0].weight)[used]
            (first,) = torch.autograd.grad(model(scene(seed)).features.square().mean(), weight, create_graph=True)
            try:
                first.square().sum().backward()
            except Exception as error:
                yield {"first": first.detach()}, type(error), str(error)
            else:
                yield {"first": first.detach(), **gradients(model)}, None, ""

    theirs, mine, model = seen(WithHead, program)
    assert replayer(model).hits and (theirs[-1][1] is None) == (used == 0)
    for one, other in zip(mine, theirs, strict=True):
        assert one[1:] == other[1:]
        close(one[0], other[0])
    for name, buffer in model.named_buffers():
        assert not name.endswith("num_batches_tracked") or int(buffer) == SCENES


def test_gradients_of_gradients_under_autocast(seen, device):
    def program(model, scene):
        for seed in range(SCENES):
            model.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = model(scene(seed)).features.float().square().mean()
            (first,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
            first.square().sum().backward()
            yield {"first": first.detach(), "head": model.head.weight.grad}

    theirs, mine, model = seen(WithHead, program)
    assert replayer(model).hits
    for one, other in zip(mine, theirs, strict=True):
        for name, expected in other.items():
            torch.testing.assert_close(one[name], expected, rtol=3e-2, atol=1e-3)


def test_gradients_of_gradients_behind_another_backward_pass(seen):
    """The call, which the layers would need once more, is gone by then."""

    def program(model, scene):
        for seed in range(SCENES):
            loss = model(scene(seed)).features.square().mean()
            loss.backward(retain_graph=True)
            if seed == SCENES - 1 and settings.get().optimize == "graphs":
                with pytest.raises(RuntimeError, match=r"with sparse_bridge.eager\(\):"):
                    torch.autograd.grad(loss, model.head.weight, create_graph=True)
        yield None

    assert replayer(seen(WithHead, program)[-1]).hits


def test_a_single_row_is_what_torch_s_norms_refuse(seen):
    def program(model, scene):
        for seed in range(SCENES):
            x = scene(seed)
            if seed == SCENES - 1:
                x = type(x)(x.features[:1], x.indices[:1], x.spatial_shape, x.batch_size)
                with pytest.raises(ValueError, match="more than 1 value per channel"):
                    model(x)
            else:
                step(model, x)
        yield None

    assert replayer(seen(Net, program)[-1]).hits


def test_a_level_without_rows_is_what_the_framework_makes_of_it(device, rules):
    """Torchsparse's norms do not count such a batch."""
    rules.hold(graphs_of(512, watched=True))
    counts = []
    for mode in ("off", "graphs"):
        with apis.standin("torchsparse") as module, settings.override(optimize=mode):
            model = apis.network(module, "torchsparse", device).train()
            for seed in range(SCENES + 1):
                x = apis.scene(module, "torchsparse", seed, device, 0.25 + 0.002 * seed)
                if seed == SCENES:  # none of them lies at even coordinates, nor beside such ones
                    x = module.SparseTensor(x.feats[-2:], x.coords[-2:])
                found = model(x)
                apis.loss_of(apis.values_of(found)).backward()
            assert not len(found["deep"].feats) and (mode == "off" or replayer(model).hits)
            counts.append({name: buffer.float() for name, buffer in model.named_buffers()})
    close(*counts)


def test_a_loss_that_is_kept_keeps_nothing_of_its_scene(seen):
    """As in `total = total + loss`."""

    def program(model, scene):
        total, stored = 0.0, []
        for seed in range(SCENES):
            x = scene(seed)
            stored = [StorageWeakRef(one.untyped_storage()) for one in (x.features, x.indices)]
            loss = model(x).features.square().mean()
            loss.backward()
            total = total + loss
            del x, loss
        yield [one.expired() for one in stored]

    theirs, mine, model = seen(Net, program)
    assert mine == theirs == [[True, True]] and replayer(model).hits


class WithBuffer(Net):
    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("factor", torch.ones(8))

    def end(self, x):
        return x.replace_feature(x.features * self.factor)


@pytest.mark.parametrize("first", [0, SCENES - 1])
def test_buffers_that_require_a_gradient_get_one(seen, first):
    def program(model, scene):
        for seed in range(SCENES):
            if seed == first:
                model.factor.requires_grad_()
            step(model, scene(seed))
        yield {"factor": model.factor.grad}

    (theirs,), (mine,), _ = seen(WithBuffer, program)
    assert theirs["factor"] is not None
    close(mine, theirs)


class Decays(Net):
    """Writes to a parameter in its forward."""

    def __init__(self, sp):
        super().__init__(sp)
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def end(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x.replace_feature(x.features * self.scale)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_a_model_that_writes_to_its_parameters(seen, trains):
    """No trial writes to them, too."""

    def program(model, scene):
        model.train(trains)
        for seed in range(SCENES):
            with torch.set_grad_enabled(trains):
                features = step(model, scene(seed)) if trains else model(scene(seed)).features
            yield {"features": features.detach(), "scale": model.scale.detach().clone()}

    theirs, mine, model = seen(Decays, program)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)
    assert graph_regions.region_of(model) is None
    assert any("it writes to scale (aten.mul_.Tensor)" in one for one in reasons())


class WithTable(Net):
    """More buffers than a step keeps a copy of."""

    def __init__(self, sp):
        super().__init__(sp)
        self.register_buffer("table", torch.zeros(policy.UNDONE_BYTES // 4))


@pytest.mark.parametrize(("model_class", "queued"), [(Net, True), (WithTable, False)])
def test_a_step_that_is_queued_before_it_is_looked_at(seen, model_class, queued, rules):
    """Where the look finds something, statistics are those of the layers alone."""
    early, own = [], TrainingReplayer.launch_speculatively

    def launch(*given):
        early.append(own(*given))
        return early[-1]

    rules.set(TrainingReplayer, launch_speculatively=launch)

    def program(model, scene):
        for seed in range(2 * SCENES):
            if seed == 2 * SCENES - 1:
                model.a[1].momentum = 0.5
            step(model, scene(seed))
            yield {**gradients(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}

    theirs, mine, model = seen(model_class, program)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)
    assert (early[-1], any(early)) == (queued, queued) and replayer(model).hits
