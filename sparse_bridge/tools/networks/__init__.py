"""Networks that the demo, `warm`, the benchmarks, the tests and the examples run: once per API.

They are written the way projects write them, and know nothing of sparse_bridge: the framework's
module is their first argument, so that the same file serves the real library, its stand-in and a
reference implementation.

| file | networks |
|---|---|
| `spconv` | `Second`, `ResidualUNet`; takes `spconv.pytorch`, or anything with its names |
| `torchsparse` | `ResidualUNet`, `Backbone`; takes `torchsparse`, with `nn` and `backbones` |
| `codec` | `OccupancyCodec`, a learned codec of voxels; takes `torchsparse` |
| `minkowski` | `MinkUNet` (Res16UNet, 4DMOS by options), `basic_block`; takes `MinkowskiEngine` |
"""
