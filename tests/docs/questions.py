"""What users ask, in the words that they search with, and the page of the site that answers."""

from __future__ import annotations

# Themes are ranked by how often they come up in the trackers of spconv, torchsparse,
# MinkowskiEngine, FlexGEMM and TRELLIS.
QUESTIONS = {
    "CUDA 12.8 RTX 5090": {"questions", "hardware"},
    "Blackwell sm_120": {"hardware", "questions", "targets"},
    "install wheel nvcc": {"getting_started", "questions"},
    "undefined symbol torch version": {"questions"},
    "Windows": {"questions", "hardware", "getting_started"},
    "macOS Apple": {"questions", "hardware"},
    "Jetson ARM": {"questions", "hardware"},
    "int32 overflow large scene": {"questions", "hardware"},
    "illegal memory access": {"questions", "hardware"},
    "out of memory": {"troubleshooting", "questions", "speed"},
    "spconv 1.x checkpoint": {"migration", "questions"},
    "torchsparse 1.4 PointTensor": {"torchsparse", "questions", "migration"},
    "MinkowskiEngine replacement": {"questions", "minkowski", "migration"},
    "ONNX TensorRT": {"export", "questions"},
    "torch.jit.trace": {"questions", "compile"},
    "autocast bf16": {"questions", "spconv"},
    "fp16 NaN": {"questions", "troubleshooting"},
    "run on CPU without GPU": {"questions", "getting_started", "hardware"},
    "AMD ROCm MI300": {"questions", "hardware"},
    "several GPUs DDP SyncBatchNorm": {"scale_out", "questions", "projects"},
    "first iteration slow": {"questions", "troubleshooting"},
    "depthwise groups": {"questions", "spconv"},
    "empty tensor zero points": {"questions", "spconv"},
    "deterministic results": {"questions", "troubleshooting"},
    "torch.compile graph break": {"compile", "questions"},
    "OpenPCDet": {"projects", "migration", "compatibility"},
    "TRELLIS": {"projects", "questions", "flex_gemm"},
    "profile layers time": {"speed", "api"},
    "environment variables": {"environment", "hardware"},
    "which layer is slow": {"speed", "questions", "troubleshooting"},
    "which models run": {"compatibility", "projects", "questions"},
    "reserved memory graphs": {"speed"},
    "SPARSE_BRIDGE_TUNE": {"environment"},
    "which way does a call take": {"which_way"},
    "report a wrong result": {"questions", "migration", "troubleshooting"},
}

# Where one page is the right one, and must come before all others.
FIRST = {
    "CUDA graphs": "speed",
    "optimize graphs": "speed",
    "where it loses": "speed",
    "checkpoint": "migration",
    "checkpoints": "migration",
    "torch.compile": "compile",
    "torch.export": "compile",
    "TensorRT": "export",
    "glossary": "architecture",
    "reproducibility": "reproducibility",
    "PyG": "relations",
}
