# SPDX-License-Identifier: Apache-2.0
"""Trees and draft forwards recorded from the published code of EAGLE-2 and SpecVLA."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.growth import expand
from support.paths import ORACLES, needs

from specvla_ros.models.config import DecoderShape
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.eagle.tree_growth import TreeGrowth, split_trees, tree_size
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tree import Tree

DATA = ORACLES / "eagle2_tree"


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Each node as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def paths_of(tree: Tree) -> set[tuple[int, ...]]:
    return paths(tree.tokens.tolist(), tree.ancestry.parents.tolist())


@needs(DATA)
def test_the_same_nodes_are_kept_as_in_the_published_code() -> None:
    cases = json.loads((DATA / "markov_trees.json").read_text())
    recorded, tables = np.load(DATA / "markov_trees.npz"), np.load(DATA / "markov_tables.npz")
    whole = 0
    for case in cases:
        key, levels = case["key"], case["depth_arg"] + 1
        growth = TreeGrowth(torch.tensor([case["root"]]), torch.tensor([levels]), k=case["top_k"], levels=levels)
        table = f"{key.split('_')[0]}_table_logits"
        for step in range(levels):
            if table in tables.files:
                logits = torch.from_numpy(tables[table])[step][growth.beam_tokens[0]]
                log_probs = logits.log_softmax(-1)
            else:
                assert growth.beam_tokens[0].tolist() == recorded[f"{key}_step{step}_tokens"].tolist()
                log_probs = torch.from_numpy(recorded[f"{key}_step{step}_logprobs"])
            best = log_probs.topk(case["top_k"])
            expand(growth, best.indices[None], best.values[None])
        nodes = case["total_tokens_arg"]
        kept = tree_size(levels, case["top_k"], nodes)
        (tree,) = split_trees(growth.finish(torch.tensor([nodes]), nodes), [(kept, levels)])
        expected = paths(recorded[f"{key}_draft_tokens"].tolist(), recorded[f"{key}_parents"].tolist())
        assert paths_of(tree) == expected, key
        assert sorted(tree.log_probs.tolist()) == pytest.approx(sorted(recorded[f"{key}_cum_logprob"]), abs=1e-4)
        assert tree.ancestry.depths.max() == case["max_path_draft_tokens"]
        whole += 1
    assert whole == 39


@needs(DATA)
def test_the_head_foresees_what_the_published_head_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {call["tag"]: call for call in json.loads((DATA / "tiny_draft_trees.json").read_text())["calls"]}
    recorded = np.load(DATA / "tiny_draft_trees.npz")
    weights = load_file(DATA / "tiny_draft.safetensors")
    config = DecoderShape(64, 160, 1, 4, 4, 16, vocab_size=512, max_position_embeddings=256)
    decoder = PackedDecoder(config).requires_grad_(False)
    decoder.embed_tokens.weight.copy_(weights["embed_tokens.weight"])
    decoder.lm_head.weight.copy_(weights["__lm_head.weight"])
    head = EagleHead(config).requires_grad_(False)
    for name, tensor in head.checkpoint_tensors().items():
        tensor.copy_(weights[name])
    drafter = EagleDrafter(head, decoder, DraftSettings(), slots=2, slot_rows=64)
    consider, seen = drafter._grower._consider, []

    def recording(growth: TreeGrowth, logits: torch.Tensor, dimensions: torch.Tensor) -> None:
        seen.append(logits[0].log_softmax(-1))
        consider(growth, logits, dimensions)

    monkeypatch.setattr(drafter._grower, "_consider", recording)
    for tag in ("eagle_r0", "eagle_r1"):
        hidden = torch.from_numpy(recorded[f"{tag}_hidden_in"])[0]
        embeddings = torch.from_numpy(recorded[f"{tag}_input_embeds"])[0]
        prefix = len(embeddings) - 1
        assert prefix == calls[tag]["stable_kv_len"]
        request = DraftInput(
            slot=1,
            prefix_len=prefix,
            new=NewRows(hidden, embeddings[prefix + 1 - len(hidden) :]),
            root=torch.tensor(calls[tag]["root"]),
            max_depth=5,
            position=1,
        )
        seen.clear()
        (tree,) = drafter.draft([request])
        for step, log_probs in enumerate(seen):
            np.testing.assert_allclose(log_probs.numpy(), recorded[f"{tag}_step{step}_logprobs"], atol=5e-3, rtol=1e-4)
        assert len(seen) == 5
        assert paths_of(tree) == paths(recorded[f"{tag}_draft_tokens"].tolist(), recorded[f"{tag}_parents"].tolist())
