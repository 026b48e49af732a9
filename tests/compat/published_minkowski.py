"""Entries of the published checkpoints of MinkowskiEngine models, as their stacks give them."""

MINKUNET = {
    "conv0p1s1.kernel": (125, 3, 32),
    "bn0.bn.running_mean": (32,),
    "conv1p1s2.kernel": (8, 32, 32),
    "block2.0.downsample.0.kernel": (32, 64),
    "block2.0.downsample.1.bn.weight": (64,),
    "block4.5.conv2.kernel": (27, 256, 256),
    "convtr4p16s2.kernel": (8, 256, 256),
    "block5.0.conv1.kernel": (27, 384, 256),
    "block8.0.conv1.kernel": (27, 128, 96),
    "block8.0.norm1.bn.weight": (96,),
    "final.kernel": (96, 20),
    "final.bias": (1, 20),
}
RES16UNET = {k: v for k, v in MINKUNET.items() if not k.startswith("final")}
RESUNET = {
    "conv1.kernel": (343, 1, 32),
    "norm1.bn.weight": (32,),
    "block1.conv1.kernel": (27, 32, 32),
    "conv4.kernel": (27, 128, 256),
    "conv4_tr.kernel": (27, 256, 128),
    "conv3_tr.kernel": (27, 256, 64),
    "conv2_tr.kernel": (27, 128, 64),
    "conv1_tr.kernel": (96, 64),
    "final.kernel": (64, 32),
}
INCEPTION = {
    "encoder.conv0.kernel": (27, 1, 16),
    "encoder.down1.kernel": (8, 32, 64),
    "encoder.block0.2.conv1_2.kernel": (8, 16),
    "encoder.conv3.bias": (1, 8),
    "decoder.up0.kernel": (8, 8, 64),
    "decoder.conv2_cls.kernel": (27, 16, 1),
}
URESNET = {
    "net.encoder.input_layer.kernel": (27, 1, 32),
    "net.encoder.encoding_block.4.1.conv2.kernel": (27, 160, 160),
    "net.encoder.encoding_conv.0.2.kernel": (8, 32, 64),
    "net.decoder.decoding_block.0.0.residual.linear.weight": (128, 256),
    "net.decoder.decoding_conv.3.2.kernel": (8, 64, 32),
    "ppn.ppn_masks.0.linear.weight": (2, 128),
    "ppn.final_block.norm1.bn.weight": (32,),
}
RESNET14 = {
    "conv1.kernel": (27, 6, 64),
    "layer1.0.downsample.0.kernel": (1, 64, 64),
    "layer4.0.conv1.kernel": (27, 256, 512),
    "layer4.0.norm2.bn.running_var": (512,),
    "final.kernel": (512, 512),
    "final.bias": (1, 512),
}
# Module, its options (None: those of the matrix), entries of the state, millions of parameters.
FACTS = [
    ("minkunet", None, MINKUNET, 37.86),
    ("minkunet", {"name": "MinkUNet18A"}, {"block5.0.conv1.kernel": (27, 256, 128)}, 15.49),
    ("minkunet", {"name": "MinkUNet50"}, {"block1.0.conv3.kernel": (32, 128)}, 31.76),
    ("pointcept_minkunet", None, MINKUNET | {"conv0p1s1.kernel": (125, 6, 32)}, 37.87),
    ("mask3d", None, {f"backbone.{k}": v for k, v in RES16UNET.items()}, 39.6),
    ("pointcontrast", {}, RES16UNET | {"final.bias": (1, 32)}, 37.86),
    ("pointcontrast", {"squeeze": True}, {"block1.0.se.fc.0.linear.weight": (2, 32)}, 37.95),
    ("mmdet3d_minkunet", None, {"backbone.decoder.0.0.0.kernel": (8, 256, 256)}, 21.72),
    ("fcgf", None, RESUNET, 8.76),
    ("dgr", {}, {"conv1.kernel": (729, 1, 32), "conv1_tr.kernel": (96, 64), "final.bias": (1, 1)}, 235.93),
    (
        "completion",
        None,
        {
            "enc_block_s1.0.kernel": (27, 1, 16),
            "enc_block_s32s64.0.kernel": (8, 512, 1024),
            "dec_block_s64s32.0.kernel": (64, 1024, 512),
            "dec_block_s2s1.0.kernel": (8, 32, 16),
            "dec_s64s32_cls.bias": (1, 1),
        },
        87.73,
    ),
    ("reconstruction", None, {"block1.0.kernel": (8, 1024, 1024), "block5_cls.kernel": (32, 1)}, 51.72),
    (
        "fcaf3d",
        None,
        {
            "backbone.conv1.kernel": (27, 3, 64),
            "backbone.norm1.weight": (1, 64),
            "backbone.layer1.0.downsample.0.kernel": (1, 64, 64),
            "backbone.layer4.2.norm2.bn.weight": (512,),
            "head.up_block_3.0.kernel": (8, 512, 256),
            "head.out_block_0.0.kernel": (27, 64, 128),
            "head.conv_cls.bias": (1, 18),
            "head.scales.3.scale": (),
        },
        70.48,
    ),
    (
        "four_dmos",
        None,
        {
            "MinkUNet.conv0p1s1.kernel": (125, 1, 8),
            "MinkUNet.conv1p1s2.kernel": (8, 8, 8),
            "MinkUNet.block4.0.conv1.kernel": (81, 32, 64),
            "MinkUNet.final.kernel": (8, 3),
        },
        1.85,
    ),
    ("pcgc", None, INCEPTION, 0.78),
    ("spine", None, URESNET, 15.55),
    ("rise", None, {f"sparse_encoder.cloud_encoder.{k}": v for k, v in RESNET14.items()}, 30.48),
]
