"""What projects use around spconv's layers: cumm's tensorview, voxelizers, boxes, hash tables."""
