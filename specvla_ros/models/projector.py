"""From vision features to the language model's embedding space."""

import torch.nn.functional as F
from torch import Tensor, nn


class Projector(nn.Module):
    """The MLP of the checkpoint: two layers behind one vision tower, three behind two (exact GELU between them).

    Args:
        vision_dim: channels of the joined vision features.
        hidden_size: of the language model.
        fused: two towers.
    """

    def __init__(self, vision_dim: int, hidden_size: int, *, fused: bool) -> None:
        super().__init__()
        widths = (
            [vision_dim, 4 * vision_dim, hidden_size, hidden_size] if fused else [vision_dim, hidden_size, hidden_size]
        )
        self.depth = len(widths) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, features: Tensor) -> Tensor:
        """[patches, vision_dim] to [patches, hidden_size]."""
        x = self.get_submodule("fc1")(features)
        for i in range(2, self.depth + 1):
            x = self.get_submodule(f"fc{i}")(F.gelu(x))
        return x
