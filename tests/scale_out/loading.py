"""Run as a script with `fork` or `spawn`: loading processes voxelise and build sparse tensors.

What they deliver must equal what the main process makes itself, and go through layers. `enable()`
stands at the top level, as projects have it: a spawned process imports this module anew.
"""

from __future__ import annotations

import sparse_bridge

sparse_bridge.enable(profile="2.1")

import sys  # noqa: E402

import MinkowskiEngine as ME  # noqa: E402
import spconv.pytorch as spconv  # noqa: E402
import torch  # noqa: E402
from spconv.pytorch.utils import PointToVoxel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402
from torchsparse import SparseTensor  # noqa: E402
from torchsparse import nn as spnn  # noqa: E402
from torchsparse.utils.collate import sparse_collate_fn  # noqa: E402
from torchsparse.utils.quantize import sparse_quantize  # noqa: E402


class Scans(Dataset):
    """Points [N, 4] in [0, 8) metres, and who made them."""

    def __init__(self) -> None:
        self.voxelise = PointToVoxel([0.5] * 3, [0, 0, 0, 8, 8, 8], 4, 1000, 5)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict:
        made_by = -1 if get_worker_info() is None else get_worker_info().id
        points = torch.rand(400 + index, 4, generator=torch.Generator().manual_seed(index)) * 8
        voxels, cells, counts = self.voxelise(points)
        quantised, rows = sparse_quantize(points[:, :3].numpy(), 0.5, return_index=True)
        return {
            "made_by": made_by,
            "spconv": (voxels.sum(1) / counts[:, None], cells),
            "torchsparse": SparseTensor(points[rows], torch.from_numpy(quantised).int()),
            "minkowski": ME.utils.sparse_quantize(points[:, :3] * 2, points, return_index=False),
        }


def collate(samples: list[dict]) -> dict:
    """Batches as sparse tensors, built in the process that loads."""
    features, cells = zip(*(sample["spconv"] for sample in samples), strict=True)
    sites = [torch.nn.functional.pad(c, (1, 0), value=i) for i, c in enumerate(cells)]
    coords, feats = ME.utils.sparse_collate(*zip(*(s["minkowski"] for s in samples), strict=True))
    x = spconv.SparseConvTensor(torch.cat(features), torch.cat(sites), [16] * 3, len(samples))
    return {
        "made_by": [sample["made_by"] for sample in samples],
        "spconv": x,
        "torchsparse": sparse_collate_fn([{"x": s["torchsparse"]} for s in samples])["x"],
        "minkowski": ME.SparseTensor(feats.float(), coords),
    }


def results(batch: dict, layers: dict) -> list[torch.Tensor]:
    """Coordinates, features, and what a layer makes of them."""
    x, y, z = (batch[name] for name in ("spconv", "torchsparse", "minkowski"))
    out = [x.indices, x.features, y.C, y.F, z.C, z.F]
    return [*out, layers["spconv"](x).features, layers["torchsparse"](y).F, layers["minkowski"](z).F]


def main(method: str) -> None:
    torch.manual_seed(0)
    layers = {
        "spconv": spconv.SparseConv3d(4, 8, 3, 2),
        "torchsparse": spnn.Conv3d(4, 8, 3),
        "minkowski": ME.MinkowskiConvolution(4, 8, kernel_size=3, stride=2, dimension=3),
    }
    scans = Scans()
    options = {"batch_size": 2, "collate_fn": collate}
    # Layers have run in this process before it forks.
    expected = [results(batch, layers) for batch in DataLoader(scans, **options)]
    loader = DataLoader(scans, num_workers=2, multiprocessing_context=method, **options)
    makers = set()
    for batch, wanted in zip(loader, expected, strict=True):
        makers.update(batch["made_by"])
        for one, other in zip(results(batch, layers), wanted, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert makers == {0, 1}, makers
    print("same batches", method)


if __name__ == "__main__":
    main(sys.argv[1])
