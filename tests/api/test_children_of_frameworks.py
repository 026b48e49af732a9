"""Child processes that use real frameworks and stand-ins: data loaders, torch's launchers."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from tests.quick import quick

from .fakes import write

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="start methods of POSIX")


def python(folder, *arguments, **environment):
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


LOADED = """
    import sys, torch, torch.multiprocessing as mp
    ENABLE
    import MinkowskiEngine as ME
    from torch.utils.data import DataLoader, Dataset

    class Scans(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            import MinkowskiEngine as ME
            return ME.utils.sparse_quantize(torch.rand(20, 3) * 4)

    def train(rank, world):
        import MinkowskiEngine as ME
        x = ME.SparseTensor(torch.ones(2, 1), torch.IntTensor([[0, 0, 0], [0, 0, 1]]))
        layer = ME.MinkowskiConvolution(1, 1, kernel_size=3, dimension=2)
        print("rank", rank, tuple(layer(x).F.shape), flush=True)

    if __name__ == "__main__":
        for way in ("fork", "spawn", "forkserver"):
            scans = DataLoader(Scans(), None, num_workers=1, multiprocessing_context=way)
            print(way, len(list(scans)))
        mp.spawn(train, args=(1,), nprocs=1)
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("enabled", quick(["run"], ["run", "at the top of the main file"]))
def test_data_loaders_and_spawned_ranks(tmp_path, enabled):
    own = "import sparse_bridge; sparse_bridge.enable('minkowski')"
    script = write(tmp_path / "loaded.py", LOADED.replace("ENABLE", own if enabled != "run" else ""))
    command = ["-m", "sparse_bridge", "run", "--report", script] if enabled == "run" else [script]
    done = python(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["fork 3", "spawn 3", "forkserver 3", "rank 0 (2, 1)"]
    if enabled == "run":
        assert "layers of 1 child process" in done.stderr


RANK = """
    import os, torch
    import spconv.pytorch as spconv
    conv = spconv.SubMConv3d(2, 2, 3, algo=spconv.ConvAlgo.Native)
    cells = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]]).int()
    y = conv(spconv.SparseConvTensor(torch.ones(2, 2), cells, [8, 8, 8], 1))
    print("rank", os.environ.get("RANK", "none"), tuple(y.features.shape), flush=True)
"""


@pytest.mark.slow
def test_torchs_launcher(tmp_path):
    """In front of it, and behind it."""
    script = write(tmp_path / "train.py", RANK)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29641"]
    ours = ["-m", "sparse_bridge", "run", "--report"]
    done = python(tmp_path, *ours, *launch, script)
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 (2, 2)", "rank 1 (2, 2)"], done.stderr
    assert "SubMConv3d        2         0" in done.stderr
    assert "layers of 2 child processes are counted" in done.stderr
    done = python(tmp_path, *launch, *ours, script)
    assert done.stderr.count("SubMConv3d        1         0") == 2, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("spconv") is None, reason="needs spconv")
def test_an_installed_spconv_is_not_run_in_children_without_a_word(tmp_path):
    script = write(
        tmp_path / "program.py",
        """
        import multiprocessing
        import spconv.pytorch as spconv

        def mode():
            import sparse_bridge
            from sparse_bridge.adapters import call_stats
            status = sparse_bridge.status()["spconv"]
            return status.mode, call_stats.is_strict("spconv"), "flex_gemm" in sparse_bridge.status()

        if __name__ == "__main__":
            for way in ("spawn", "forkserver"):
                with multiprocessing.get_context(way).Pool(1) as pool:
                    print(*pool.apply(mode))
        """,
    )
    options = ["--strict", "--framework", "spconv"]
    done = python(tmp_path, "-m", "sparse_bridge", "run", *options, script)
    assert done.stdout.splitlines() == ["patch True True"] * 2, done.stderr


@pytest.mark.slow
def test_a_profile_that_the_program_found_is_that_of_its_children(tmp_path):
    script = write(
        tmp_path / "program.py",
        """
        import multiprocessing, sparse_bridge

        def profile():
            return sparse_bridge.status()["torchsparse"].notes[0][:11]

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(profile))
            from torchsparse import nn
            nn.Conv3d(1, 1, 3, 1, 1, False)  # as 1.4 has it: the last one is the bias
            print(profile())
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(profile))
        """,
    )
    done = python(tmp_path, "-m", "sparse_bridge", "run", script)
    first, found, after = done.stdout.splitlines()
    assert (first, found, after) == ("profile 2.1", "profile 1.4", "profile 1.4"), done.stderr


FORKED = """
    import multiprocessing
    import torch
    torch.set_num_threads(3)
    import MinkowskiEngine as ME

    def cells():
        return len(ME.utils.sparse_quantize(torch.rand(60000, 3) * 40))

    def rows():
        coordinates = torch.tensor([[0, 0, 0], [0, 0, 1]]).int()
        x = ME.SparseTensor(torch.ones(2, 1), coordinates)
        return tuple(ME.MinkowskiConvolution(1, 1, kernel_size=3, dimension=2)(x).F.shape)

    if __name__ == "__main__":
        for turn in range(2):
            rows(), cells()  # starts torch's threads
            with multiprocessing.get_context("fork").Pool(2) as pool:
                answers = [pool.apply_async(work) for work in (rows, cells)]
                found, many = (answer.get(timeout=60) for answer in answers)
                print(found, many > 1000, torch.get_num_threads())
"""


@pytest.mark.slow
def test_forks_of_a_program_that_has_computed(tmp_path):
    """torch's threads, of which a child has none, are not waited for."""
    script = write(tmp_path / "forked.py", FORKED)
    done = python(tmp_path, "-m", "sparse_bridge", "run", script, OMP_NUM_THREADS="3")
    assert done.stdout.splitlines() == ["(2, 1) True 3"] * 2, done.stderr
