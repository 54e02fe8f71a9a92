# SPDX-License-Identifier: Apache-2.0
"""Plain decoding without an engine: every token by a forward of its own over all before it."""

import numpy as np
import torch

from specvla_kernels.repetition_penalty import EarlierIds
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target


@torch.inference_mode()
def answer_of(target: Target, codec: Codec, observation: Observation) -> list[int]:
    """The whole answer to an observation; it starts with `answer_ids`, which are not a whole answer themselves."""
    decoder, layout, tokens = target.decoder, target.prompt_layout(observation), [*observation.answer_ids]
    assert len(tokens) < codec.max_tokens and not codec.end(tokens, 0), "nothing is left to decode"
    prompt = target.prompt_embeddings(observation, layout.ids)
    while not (end := codec.end(tokens, len(observation.answer_ids))):
        rows = torch.cat((prompt, decoder.embed_tokens(torch.tensor(tokens, dtype=torch.int64))))
        positions = None
        if layout.positions is not None:
            behind = layout.positions.max() + 1 + np.arange(len(tokens))
            positions = np.concatenate((layout.positions, np.tile(behind, (len(layout.positions), 1))), axis=1)
        cache = new_cache(decoder, slots=1, slot_rows=len(rows))
        logits = packed_forward(decoder, [Segment(0, 0, rows, positions=positions)], cache).logits
        ids = torch.tensor([*layout.ids, *tokens])
        earlier = EarlierIds(ids, torch.tensor([[0], [0], [len(ids)]]))
        root, path = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        tokens.append(int(target.generation.choose(logits, root, path, earlier)))
    return tokens[:end]
