"""The shapes of OpenVLA-7B, for plans without a checkpoint at hand."""

from specvla_ros.models.config import LlamaConfig, OpenVLAConfig, VisionTowerConfig

# Hugging Face openvla/openvla-7b, config.json: Llama-2-7B with a vocabulary padded to 32064, DINOv2 ViT-L/14 with four
# registers and SigLIP SoViT-400m/14 at 224 pixels; the towers' shapes are timm's for the names given there.
OPENVLA_7B = OpenVLAConfig(
    towers=(
        VisionTowerConfig(1024, 24, 16, 4096, 14, True, 4, layer_scale=True, image_size=224),
        VisionTowerConfig(1152, 27, 16, 4304, 14, False, 0, layer_scale=False, image_size=224),
    ),
    llama=LlamaConfig(vocab_size=32064),
    pad_to_multiple_of=64,
    action_bins=256,
    norm_stats={},
    chat_prompt=False,
)
