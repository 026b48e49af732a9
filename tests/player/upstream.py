"""How long spconv itself takes for the networks of `zoo` over the scenes of `street`: Python inference of the library
that is installed, in a process where nothing of ours answers its name.

`python -m tests.player.upstream FILE NAME:DTYPE ...` writes a JSON object."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import statistics
import sys
import time

import torch

import sparse_bridge

from . import networks, street, zoo


def present() -> bool:
    """Whether a library of that name is installed, with an extension that was compiled. Nothing of it is imported."""
    spec = importlib.util.find_spec("spconv")
    folders = [] if spec is None else [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    ours = pathlib.Path(sparse_bridge.__file__).parent
    theirs = [folder for folder in folders if not folder.resolve().is_relative_to(ours.resolve())]
    return any(list(folder.glob("core_cc*.so")) for folder in theirs)


def timed(run, scenes, device):
    """Milliseconds of `run` for each scene, once it has seen all of them."""
    times = []
    for scene in [*scenes, *scenes]:
        wait(device)
        begin = time.perf_counter()
        run(*scene)
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[len(scenes) :]


def wait(device):
    if device != "cpu":
        torch.cuda.synchronize()


def sizes_of(tensors):
    """RMS of every output that is no coordinates: the same for any order of rows."""
    return [float(tensor.double().square().mean().sqrt()) for tensor in tensors if tensor.is_floating_point()]


def measured(name, dtype, wide=True, scenes=None, device="cuda"):
    """{"ms": of each scene, "rms": of the outputs of the first one}, by spconv."""
    sp = importlib.import_module("spconv.pytorch")
    assert not pathlib.Path(sp.__file__).is_relative_to(pathlib.Path(sparse_bridge.__file__).parent), sp.__file__
    torch.backends.cudnn.allow_tf32 = False  # as where packages are compared
    _, grid, n_items = street.middle()
    with torch.no_grad():
        with torch.device(device):
            own = zoo._of_spconv(name, sp, wide, grid, n_items)
        model = networks.ready(own.model.cpu()).to(device, dtype)  # the weights of `zoo.network`
        own_scenes = scenes or street.scenes_for(own.grid, dtype)
        inputs = [tuple(tensor.to(device) for tensor in scene) for scene in own_scenes]
        rms = sizes_of(torch.utils._pytree.tree_leaves(model(*inputs[0])))

        def run(features, coords):
            return model(features, coords.clone())  # as where ours are timed

        return {"ms": timed(run, inputs, device), "rms": rms}


def main(path, *cases):
    results = {}
    for case in cases:
        name, _, dtype = case.partition(":")
        try:
            results[case] = measured(name, getattr(torch, dtype))
            print(case, statistics.median(results[case]["ms"]), flush=True)
        except Exception as error:  # of one network, or of a build that has no kernels for this GPU
            results[case] = {"error": f"{type(error).__name__}: {error}"}
    pathlib.Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
