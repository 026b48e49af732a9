"""What torchsparse offers beside its layers: hashes, point-voxel operators, map builders."""
