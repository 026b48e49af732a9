"""Where the projects of the matrix are, by how their models' names begin."""

from __future__ import annotations

__all__ = ["address"]

_HOST = "https://github.com/"
# Of several beginnings that fit, the longest counts.
_REPOSITORIES = {
    "4DMOS": "PRBonn/4DMOS",
    "BEVFusion": "mit-han-lab/bevfusion",
    "CenterPoint (OpenPCDet": "open-mmlab/OpenPCDet",
    "CenterPoint SpMiddleResNetFHD": "tianweiy/CenterPoint",
    "ComfyUI low-memory nodes": "visualbruno/ComfyUI-Trellis2",
    "Cylinder3D": "xinge008/Cylinder3D",
    "Deep Global Registration": "chrischoy/DeepGlobalRegistration",
    "Direct3D-S2": "DreamTechAI/Direct3D-S2",
    "FCAF3D": "SamsungLabs/fcaf3d",
    "FCGF": "chrischoy/FCGF",
    "GaussianFormer": "huang-yh/GaussianFormer",
    "LION": "happinesslz/LION",
    "Lidar_AI_Solution": "NVIDIA-AI-IOT/Lidar_AI_Solution",
    "LitePT": "prs-eth/LitePT",
    "Mask3D": "JonasSchult/Mask3D",
    "MinkowskiEngine": "NVIDIA/MinkowskiEngine",
    "Neural Body": "zju3dv/neuralbody",
    "NeuralRecon": "zju3dv/NeuralRecon",
    "OneFormer3D": "filaPro/oneformer3d",
    "OpenOccupancy": "JeffWang987/OpenOccupancy",
    "PCGCv2": "NJUVISION/PCGCv2",
    "PaSCo": "astra-vision/PaSCo",
    "Part-A2": "open-mmlab/OpenPCDet",
    "PillarNet": "agent-sgs/PillarNet",
    "Pixal3D": "TencentARC/Pixal3D",
    "Point Transformer V3": "Pointcept/PointTransformerV3",
    "PointContrast": "facebookresearch/PointContrast",
    "PointGroup": "dvlab-research/PointGroup",
    "Pointcept": "Pointcept/Pointcept",
    "RISE": "rise-policy/RISE",
    "SAM 3D Objects": "facebookresearch/sam-3d-objects",
    "SECOND": "open-mmlab/OpenPCDet",
    "SPINE": "DeepLearnPhysics/spine",
    "SPVNAS": "mit-han-lab/spvnas",
    "SST": "tusen-ai/SST",
    "SoftGroup": "thangvubk/SoftGroup",
    "Sonata": "facebookresearch/sonata",
    "SparsePCGC": "NJUVISION/SparsePCGC",
    "SpatioTemporalSegmentation": "chrischoy/SpatioTemporalSegmentation",
    "SphereFormer": "dvlab-research/SphereFormer",
    "Swin3D": "microsoft/Swin3D",
    "TRELLIS": "microsoft/TRELLIS",
    "TRELLIS.2": "microsoft/TRELLIS.2",
    "UniRig": "VAST-AI-Research/UniRig",
    "VoxelNeXt": "dvlab-research/VoxelNeXt",
    "mmdet": "open-mmlab/mmdetection3d",
}


def address(model: str) -> str | None:
    """The page of the project that the model is of; None where it is not listed."""
    fitting = [start for start in _REPOSITORIES if model.startswith(start)]
    return _HOST + _REPOSITORIES[max(fitting, key=len)] if fitting else None
