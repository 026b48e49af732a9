"""Names and shapes of weights in the published checkpoints of the spconv models."""

from __future__ import annotations

# model of the matrix -> shapes by state_dict key
PUBLISHED = {
    "SECOND (OpenPCDet VoxelBackBone8x)": {
        "backbone_3d.conv_input.0.weight": (16, 3, 3, 3, 4),
        "backbone_3d.conv1.0.0.weight": (16, 3, 3, 3, 16),
        "backbone_3d.conv2.0.0.weight": (32, 3, 3, 3, 16),
        "backbone_3d.conv3.2.0.weight": (64, 3, 3, 3, 64),
        "backbone_3d.conv4.0.0.weight": (64, 3, 3, 3, 64),
        "backbone_3d.conv_out.0.weight": (128, 3, 1, 1, 64),
    },
    "CenterPoint (OpenPCDet VoxelResBackBone8x)": {
        "backbone_3d.conv1.0.conv1.bias": (16,),
        "backbone_3d.conv4.0.0.weight": (128, 3, 3, 3, 64),
        "backbone_3d.conv4.2.conv2.weight": (128, 3, 3, 3, 128),
        "backbone_3d.conv_out.0.weight": (128, 3, 1, 1, 128),
    },
    "Part-A2 (OpenPCDet UNetV2)": {
        "backbone_3d.conv_up_t4.conv1.weight": (64, 3, 3, 3, 64),
        "backbone_3d.conv_up_m4.0.weight": (64, 3, 3, 3, 128),
        "backbone_3d.inv_conv3.0.weight": (32, 3, 3, 3, 64),
        "backbone_3d.inv_conv2.0.weight": (16, 3, 3, 3, 32),
        "backbone_3d.conv5.0.0.weight": (16, 3, 3, 3, 16),
    },
    "VoxelNeXt": {
        "backbone_3d.conv6.0.0.weight": (128, 3, 3, 3, 128),
        "backbone_3d.conv_out.0.weight": (128, 3, 3, 128),
        "backbone_3d.shared_conv.0.bias": (128,),
        "dense_head.heads_list.1.hm.1.weight": (2, 1, 1, 128),
    },
    "mmdet3d SparseEncoder (conv_module)": {
        "conv_input.0.weight": (16, 3, 3, 3, 4),
        "encoder_layers.encoder_layer1.0.0.weight": (16, 3, 3, 3, 16),
        "encoder_layers.encoder_layer4.0.0.weight": (64, 3, 3, 3, 64),
        "conv_out.0.weight": (128, 3, 1, 1, 64),
    },
    "mmdet3d SparseEncoder (basicblock)": {
        "encoder_layers.encoder_layer1.0.conv1.weight": (16, 3, 3, 3, 16),
        "encoder_layers.encoder_layer3.2.0.weight": (128, 3, 3, 3, 64),
        "encoder_layers.encoder_layer4.1.bn2.weight": (128,),
        "conv_out.0.weight": (128, 3, 1, 1, 128),
    },
    "BEVFusion lidar encoder": {"conv_out.0.weight": (128, 1, 1, 3, 128)},
    "CenterPoint SpMiddleResNetFHD (det3d)": {
        "conv1.0.conv1.bias": (16,),
        "conv4.0.weight": (128, 3, 3, 3, 64),
        "extra_conv.0.weight": (128, 3, 1, 1, 128),
    },
    "mmdet3d SparseUNet": {
        "lateral_layer4.conv1.weight": (64, 3, 3, 3, 64),
        "merge_layer3.0.weight": (64, 3, 3, 3, 128),
        "upsample_layer3.0.weight": (32, 3, 3, 3, 64),
        "upsample_layer1.0.weight": (16, 3, 3, 3, 16),
    },
    "mmdet3d MinkUNet (spconv)": {
        "backbone.conv_input.1.0.weight": (32, 3, 3, 3, 32),
        "backbone.encoder.3.0.0.weight": (128, 2, 2, 2, 128),
        "backbone.encoder.3.1.downsample.0.weight": (256, 1, 1, 1, 128),
        "backbone.decoder.0.0.0.weight": (256, 2, 2, 2, 256),
        "backbone.decoder.3.1.0.conv1.weight": (96, 3, 3, 3, 128),
    },
    "Pointcept SpUNet-v1m1": {
        "conv_input.0.weight": (32, 5, 5, 5, 6),
        "enc.3.block5.conv2.weight": (256, 3, 3, 3, 256),
        "up.3.0.weight": (256, 2, 2, 2, 256),
        "dec.0.block0.proj.0.weight": (96, 1, 1, 1, 128),
        "final.weight": (20, 1, 1, 1, 96),
    },
    "Point Transformer V3": {
        "embedding.stem.conv.weight": (32, 5, 5, 5, 6),
        "enc.enc3.block5.cpe.0.bias": (256,),
        "enc.enc4.block0.cpe.0.weight": (512, 3, 3, 3, 512),
        "dec.dec0.block1.cpe.1.weight": (64, 64),
    },
    "PointGroup (spconv 1.x dialect)": {
        "input_conv.0.weight": (16, 3, 3, 3, 6),
        "unet.u.u.u.u.u.u.blocks.block0.conv_branch.2.weight": (112, 3, 3, 3, 112),
        "unet.blocks_tail.block0.i_branch.0.weight": (16, 1, 1, 1, 32),
        "unet.deconv.2.weight": (16, 2, 2, 2, 32),
    },
    "SoftGroup": {
        "input_conv.0.weight": (32, 3, 3, 3, 6),
        "unet.u.u.u.u.u.u.blocks.block1.conv_branch.5.weight": (224, 3, 3, 3, 224),
        "tiny_unet.conv.2.weight": (64, 2, 2, 2, 32),
    },
    "SphereFormer U-Net": {
        "unet.conv.2.weight": (64, 2, 2, 2, 32),
        "unet.u.u.u.u.blocks.block0.conv_branch.2.weight": (256, 3, 3, 3, 256),
    },
    "Cylinder3D (spconv 1.x keys)": {
        "downCntx.conv1.weight": (32, 1, 3, 3, 16),
        "downCntx.conv1_2.weight": (32, 3, 1, 3, 32),
        "resBlock5.pool.weight": (512, 3, 3, 3, 512),
        "upBlock0.conv3.weight": (512, 3, 3, 3, 512),
        "ReconNet.conv1_3.weight": (64, 1, 1, 3, 64),
        "logits.weight": (20, 3, 3, 3, 128),
    },
    "TRELLIS mesh decoder": {
        "upsample.0.out_layers.0.conv.weight": (192, 3, 3, 3, 768),
        "upsample.0.skip_connection.conv.weight": (192, 1, 1, 1, 768),
        "upsample.1.out_layers.3.conv.weight": (96, 3, 3, 3, 96),
        "out_layer.weight": (101, 96),
    },
    "TRELLIS flow, input and output blocks": {
        "input_blocks.1.conv1.conv.weight": (1024, 3, 3, 3, 128),
        "out_blocks.0.skip_connection.weight": (128, 2048),
    },
    "Neural Body": {
        "c.weight": (6890, 16),
        "xyzc_net.down0.0.weight": (32, 3, 3, 3, 16),
        "xyzc_net.conv4.6.weight": (128, 3, 3, 3, 128),
    },
}

# file of a model that the matrix runs narrower than published -> shapes as published
WHOLE = {
    "sonata": {
        "backbone.embedding.mask_token": (1, 48),
        "backbone.enc.enc4.down.proj.weight": (512, 384),
        "backbone.enc.enc3.block11.cpe.0.weight": (384, 3, 3, 3, 384),
    },
    "unirig": {
        "mesh_encoder.embedding.stem.conv.weight": (32, 5, 5, 5, 9),
        "mesh_encoder.embedding.res_linear.weight": (32, 9),
        "mesh_encoder.enc.enc4.0.weight": (384, 256),
        "mesh_encoder.enc.enc4.block15.cpe.0.weight": (384, 3, 3, 3, 384),
        "mesh_encoder.enc.enc0.block0.attn.qkv.weight": (96, 32),
    },
    "sam3d_objects": {
        "slat_generator.input_blocks.1.conv1.conv.weight": (1024, 3, 3, 3, 128),
        "slat_generator.blocks.23.self_attn.to_qkv.weight": (3072, 1024),
        "slat_generator.blocks.0.self_attn.q_rms_norm.gamma": (16, 64),
        "slat_generator.blocks.0.cross_attn.to_kv.weight": (2048, 1024),
        "slat_generator.out_blocks.0.skip_connection.weight": (128, 2048),
        "slat_decoder_mesh.blocks.11.mlp.mlp.0.weight": (3072, 768),
        "slat_decoder_mesh.upsample.1.out_layers.3.conv.weight": (96, 3, 3, 3, 96),
    },
    "litept": {
        "embedding.stem.conv.weight": (36, 5, 5, 5, 6),
        "enc.enc2.block1.conv.0.weight": (144, 3, 3, 3, 144),
        "enc.enc4.block1.attn.qkv.weight": (1512, 504),
    },
}
