"""spconv's point cloud codec, whose format is not written here."""

from sparse_bridge.adapters.spconv.upstream.missing import missing_class

PointCloudCompress = missing_class(__name__, "PointCloudCompress", "compress with laspy (.laz) or DracoPy")
