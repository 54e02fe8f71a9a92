"""The shapes that the speed benchmarks time."""

from dataclasses import dataclass

from specvla_ros.models.config import LlamaConfig, VisionTowerConfig

PROMPT = 290  # rows: OpenVLA's 256 patches and about 34 text tokens
TOKENS = 7
_DINO = VisionTowerConfig(1024, 24, 16, 4096, 14, True, 4, True, 224)
_SIGLIP = VisionTowerConfig(1152, 27, 16, 4304, 14, False, 0, False, 224)


@dataclass(frozen=True)
class Size:
    """Shapes to time."""

    llama: LlamaConfig
    towers: tuple[VisionTowerConfig, ...]


SIZES = {
    "tiny": Size(
        LlamaConfig(256, 688, 4, 4, 4, 64, vocab_size=32064),
        (
            VisionTowerConfig(96, 4, 3, 384, 14, True, 4, True, 224),
            VisionTowerConfig(96, 4, 3, 358, 14, False, 0, False, 224),
        ),
    ),
    "1b": Size(LlamaConfig(2048, 5632, 22, 32, 4, 64, vocab_size=32064), (_DINO, _SIGLIP)),
    "7b": Size(LlamaConfig(vocab_size=32064), (_DINO, _SIGLIP)),
}


def tree_parents(nodes: int) -> list[int]:
    """A likeliest chain of six with siblings, as a small tree under relaxation is."""
    return [-1, *(node - 1 if node < 6 else node % 6 for node in range(1, nodes))]
