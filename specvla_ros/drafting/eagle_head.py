"""The draft head of EAGLE and Spec-VLA: one decoder layer that foresees the target's next hidden state."""

import torch
from torch import Tensor, nn

from specvla_kernels.layout import PackedLayout
from specvla_ros.models.config import LlamaConfig
from specvla_ros.models.llama import LlamaLayer


class EagleHead(nn.Module):
    """Spec-VLA eq. 4: the linear fusion of the next token's embedding and the target's hidden state, then one layer.

    No norm in front of the attention and none behind the layer; embeddings and output head are the target's.

    Args:
        config: the layer's shape.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaLayer(config, input_norm=False)

    def forward(
        self,
        following: Tensor,
        hidden: Tensor,
        layout: PackedLayout,
        rotation: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """One packed forward.

        Args:
            following: [n_rows, hidden], embedding of the token behind each row.
            hidden: [n_rows, hidden], the target's state at each row, or the head's own where the target has none yet.
            layout: where the segments lie.
            rotation: cosines and sines of the rows, see `LlamaDecoder.rotation`.
            keys: [slots, slot_rows, kv_heads, head_dim], written in place.
            values: like keys.

        Returns:
            [n_rows, hidden]: the state behind each row, as the head foresees it.
        """
        fused: Tensor = self.fc(torch.cat((following, hidden), dim=-1))
        out: Tensor = self.layer(fused, *rotation, layout, keys, values)
        return out

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in published draft checkpoints; writing into a value writes into the head."""
        config, layer = self.config, self.layer
        rows = [heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)]
        q, k, v = layer.qkv.weight.split((rows[0], rows[1], rows[1]))
        gate, up = layer.gate_up.weight.chunk(2)
        tensors = {
            "fc.weight": self.fc.weight,
            "fc.bias": self.fc.bias,
            "layers.0.self_attn.q_proj.weight": q,
            "layers.0.self_attn.k_proj.weight": k,
            "layers.0.self_attn.v_proj.weight": v,
            "layers.0.self_attn.o_proj.weight": layer.out.weight,
            "layers.0.post_attention_layernorm.weight": layer.post_norm.weight,
            "layers.0.mlp.gate_proj.weight": gate,
            "layers.0.mlp.up_proj.weight": up,
            "layers.0.mlp.down_proj.weight": layer.down.weight,
        }
        return {name: tensor.detach() for name, tensor in tensors.items()}
