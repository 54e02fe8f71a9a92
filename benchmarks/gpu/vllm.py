# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenVLA in the timed shapes, with its dummy weights: one action after the other.

Written against vLLM's documentation; it has not been run with vLLM installed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.random_policy import Size
from specvla_ros.models.observation import Observation


def seconds_per_action(size: Size, observation: Observation, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns the latencies of actions after two uncounted ones."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        _write_config(Path(directory), size)
        model = LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=1,
            gpu_memory_utilization=0.6,
        )
        images = observation.images
        picture = Image.fromarray(next(iter(images.values())) if isinstance(images, Mapping) else images)
        asked = {"prompt_token_ids": list(observation.prompt_ids or ()), "multi_modal_data": {"image": picture}}
        greedy = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, detokenize=False)
        times = []
        for _ in range(2 + repeats):
            started = time.perf_counter()
            model.generate([asked], greedy, use_tqdm=False)
            times.append(time.perf_counter() - started)
    times = times[2:]
    return {
        "action_rate_hz": 1 / statistics.median(times),
        "latency_s": {"mean": statistics.fmean(times), "p50": statistics.median(times), "p95": sorted(times)[-1]},
        "peak_bytes": None,
    }


def _write_config(directory: Path, size: Size) -> None:
    """Writes config.json as OpenVLA's own."""
    llama = size.llama
    config = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "use_fused_vision_backbone": True,
        "image_sizes": [224, 224],
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "pad_to_multiple_of": 64,
        "text_config": {
            "model_type": "llama",
            "hidden_size": llama.hidden_size,
            "intermediate_size": llama.intermediate_size,
            "num_hidden_layers": llama.num_hidden_layers,
            "num_attention_heads": llama.num_attention_heads,
            "num_key_value_heads": llama.num_key_value_heads,
            "vocab_size": llama.vocab_size,
        },
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
