# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint directory to a policy: model, prompt, image processor and action statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import TARGETS, refuse_options
from specvla_ros.models.codecs.bins import ActionStatistics, ActionTokenizer, BinsCodec, select_statistics
from specvla_ros.models.codecs.codec import Codec, CodecContext, make_codec
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder, head_dtype, layer_tensors
from specvla_ros.models.families.openvla.config import OPENVLA_TYPES, OpenVLAConfig, read_config
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, read_image_processor
from specvla_ros.models.families.openvla.model import OpenVLA
from specvla_ros.models.families.openvla.oft import OFTParts, OFTTarget, read_oft
from specvla_ros.models.families.openvla.prompt import PromptTokenizer, read_prompt_tokenizer
from specvla_ros.models.generation import NO_RULES, GreedyRules, read_end_ids, read_generation
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import (
    BYTES_PER_WEIGHT,
    MATRICES,
    ROTATED,
    check_quantization,
    parameter_count,
    quantize_layer,
)
from specvla_ros.models.rotation import rotate_layer, turn_stream
from specvla_ros.models.settings import ALL_CAMERAS, PromptStyle
from specvla_ros.models.target import ImageEmbeddings, Pixels, PromptLayout, Target
from specvla_ros.models.tokenizer import check_tokenizer
from specvla_ros.models.weights import Progress, check_weights, load_weights


def load_model(
    directory: Path,
    config: OpenVLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "none",
    progress: Progress | None = None,
) -> OpenVLA:
    """The model of a checkpoint, ready to decode.

    Args:
        directory: of the checkpoint.
        config: what its config.json says.
        device: where the weights go.
        dtype: of what is not quantised; the output head may be of another, see `head_dtype`.
        quantization: of the decoder layers' matrices, one that `check_quantization` let pass.
        progress: called with what is being done and the fraction of it that is done.

    Raises:
        UserError: the device's memory is too small, or the weights are incomplete or do not fit the config.
    """
    with torch.device("meta"):
        model = OpenVLA(config)
    check_weights(directory, model.checkpoint_tensors(), unused=model.unused_tensors)
    model.to(dtype)
    model.decoder.lm_head.to(head_dtype(dtype, device))
    _check_memory(model, device, quantization)
    if quantization == "none":
        model.to_empty(device=device)
        _tie(model)
        load_weights(directory, model.checkpoint_tensors(), progress)
    else:
        _load_quantized(model, directory, device, quantization, progress)
    return model.eval().requires_grad_(False)


def _load_quantized(
    model: OpenVLA, directory: Path, device: torch.device, quantization: str, progress: Progress | None
) -> None:
    """Allocates, reads and quantises one layer after the other, for a device that could not hold them unquantised."""
    decoder = model.decoder
    for part in (*model.towers, model.projector, decoder.embed_tokens, decoder.norm, decoder.lm_head):
        part.to_empty(device=device)
    _tie(model)
    turn = turn_stream(decoder) if quantization == ROTATED else None
    around = {name: tensor for name, tensor in model.checkpoint_tensors().items() if not tensor.is_meta}
    load_weights(directory, around, _share(progress, 0, len(decoder.layers) + 1))
    for i, module in enumerate(decoder.layers):
        layer = cast(DecoderLayer, module).to_empty(device=device)
        tensors = layer_tensors(layer, decoder.config, f"language_model.model.layers.{i}.")
        load_weights(directory, tensors, _share(progress, i + 1, len(decoder.layers) + 1))
        del tensors  # they hold the unquantised matrices
        if turn is not None:
            rotate_layer(layer, turn)
        quantize_layer(layer, quantization)


def _tie(model: OpenVLA) -> None:
    if model.config.llama.tie_word_embeddings:
        model.decoder.lm_head.weight = model.decoder.embed_tokens.weight


def _share(progress: Progress | None, index: int, parts: int) -> Progress | None:
    """Reports one of several parts as its share of the whole."""
    if progress is None:
        return None
    return lambda what, done: progress(what, (index + done) / parts)


def _check_memory(model: OpenVLA, device: torch.device, quantization: str) -> None:
    if device.type != "cuda":
        return
    needed = _bytes_needed(model, quantization)
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        fitting = [kind for kind in BYTES_PER_WEIGHT if kind != quantization and _bytes_needed(model, kind) <= free]
        hint = f"model.quantization {' or '.join(fitting)}, " if fitting else ""
        raise UserError(
            f"the weights take {needed / 2**30:.1f} GiB, but {device} has {free / 2**30:.1f} of {total / 2**30:.1f} "
            f"GiB free: end what else runs there, choose bfloat16, {hint}or another device"
        )


def _bytes_needed(model: OpenVLA, quantization: str) -> float:
    """While loading: what stays, and one layer that is not quantised yet."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if quantization == "none":
        return whole
    layers = [[getattr(layer, name).weight for name in MATRICES] for layer in model.decoder.layers]
    before = sum(weight.nbytes for layer in layers for weight in layer)
    after = sum(weight.numel() for layer in layers for weight in layer) * BYTES_PER_WEIGHT[quantization]
    return whole - before + after + before / len(layers)


@dataclass(frozen=True)
class StateTokens:
    """The robot's state in the prompt: each number as the bin token that stands for it in an action.

    Args:
        tokenizer: of the bins.
        statistics: of the state's numbers in the training data; what lies outside their range takes its last bin.
    """

    tokenizer: ActionTokenizer
    statistics: ActionStatistics

    @property
    def dims(self) -> int:
        """Numbers, and tokens."""
        return len(self.statistics.low)

    def ids(self, states: np.ndarray) -> np.ndarray:
        """Float [..., dims] in the units of the training data to int64 of the same shape."""
        return self.tokenizer.encode(self.statistics.normalise(states))


@dataclass(frozen=True)
class OpenVLATarget:
    """A checkpoint, ready to decode. Holds no state between observations.

    Its prompt is BOS | the cameras' images | the state's tokens | the rest of the text.
    """

    directory: Path
    model: OpenVLA
    image_processor: ImageProcessor
    prompt: PromptTokenizer
    codec: Codec
    quantization: str = "none"
    generation: GreedyRules = NO_RULES
    state: StateTokens | None = None
    head: None = None

    @property
    def cameras(self) -> tuple[str, ...]:
        """Those that it is asked with, in its own order."""
        return self.model.config.cameras

    @property
    def state_dims(self) -> int:
        """Numbers of the robot's state that it reads; 0: none."""
        return 0 if self.state is None else self.state.dims

    @property
    def bins(self) -> BinsCodec:
        """Its codec, where training and drafting know bins alone.

        Raises:
            UserError: it has another.
        """
        if not isinstance(self.codec, BinsCodec):
            raise UserError(f"{self.directory} does not write its actions as bins, which this needs")
        return self.codec

    @property
    def action_tokenizer(self) -> ActionTokenizer:
        """Action tokens to normalised values."""
        return self.bins.tokenizer

    @property
    def statistics(self) -> ActionStatistics:
        """Normalised values to the robot's units."""
        return self.bins.statistics

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text to ids and back; None where the checkpoint has no tokenizer.json."""
        return self.prompt.tokenizer

    @property
    def causal_prompt(self) -> bool:
        """A prompt row sees only earlier rows."""
        return True

    @property
    def decoder(self) -> PackedDecoder:
        """The language model."""
        return self.model.decoder

    @property
    def action_head(self) -> bool:
        """Whether the output head computes the logits of action tokens alone."""
        return self.decoder.head_ids is not None

    @property
    def unnorm_key(self) -> str:
        """Whose statistics turn tokens into the robot's units."""
        return self.codec.unnorm_key

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name per action dimension."""
        return self.codec.names

    @property
    def action_dim(self) -> int:
        """Values, and tokens, per action."""
        return len(self.codec.names)

    @property
    def image_tokens(self) -> int:
        """Rows of the prompt that the images take."""
        return len(self.cameras) * self.model.config.image_tokens

    def prompt_ids(self, instruction: str) -> tuple[int, ...]:
        """Prompt ids of an instruction.

        Raises:
            UserError: the instruction is empty, or the checkpoint has no tokenizer.
        """
        return self.prompt.ids(instruction)

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """See `Target`.

        Raises:
            UserError: images of other cameras, no state of the right length, an empty instruction, or no tokenizer.
        """
        observation.of_cameras(self.cameras)
        state = observation.state_of(self.state_dims)
        ids = observation.prompt_ids
        ids = self.prompt_ids(observation.instruction) if ids is None else self.prompt.complete(ids)
        if self.state is not None:
            ids = (ids[0], *self.state.ids(state).tolist(), *ids[1:])
        return self._layout(ids)

    @property
    def text_end_ids(self) -> frozenset[int]:
        return read_end_ids(self.directory)

    def question_layout(self, observation: Observation, question: str) -> PromptLayout:
        """See `Target`; asked as Prismatic's language models are."""
        return self._layout(self.prompt.question_ids(question))

    def _layout(self, ids: tuple[int, ...]) -> PromptLayout:
        return PromptLayout(ids, len(ids) + self.image_tokens, (range(1, 1 + self.image_tokens),))

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesPictures`; picture by picture: a captured tower has the size of one."""
        return tuple(self.image_processor(image) for image in observation.of_cameras(self.cameras).values())

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        """The prompt as the decoder reads it.

        Args:
            observation: its images are read.
            prompt_ids: [n], BOS first.
            vision: the image embeddings' implementation; None: the model's own.
            pixels: of its images; None: they are computed here.

        Returns:
            [n + image_tokens, hidden].
        """
        embed = vision or self.model.image_embeddings
        first, *others = pixels or self.pixels(observation)
        images = torch.cat([embed(each).clone() for each in (first, *others)]) if others else embed(first)
        return self.model.prompt_embeddings(images, to_device(prompt_ids, self.decoder.device))

    def blank_observation(self) -> Observation:
        """Black images, a state of zeros and a prompt of one token."""
        image = np.zeros((self.model.config.towers[0].image_size,) * 2 + (3,), np.uint8)
        ids = self.prompt.complete((1,))
        return Observation(
            dict.fromkeys(self.cameras, image), "", stamp_ns=1, prompt_ids=ids, state=np.zeros(self.state_dims)
        )

    def action(self, tokens: Sequence[int]) -> np.ndarray:
        """Action tokens [action_dim] to float64 values in the robot's units."""
        return self.codec.decode(tokens)[0]

    def describe(self) -> dict[str, str | int]:
        """What is loaded, for diagnostics and results."""
        return {
            "checkpoint": str(self.directory),
            "unnorm_key": self.unnorm_key,
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            "action_head": str(self.action_head).lower(),
            "parameters": parameter_count(self.model),
            "image_resize_strategy": self.image_processor.strategy,
            "center_crop": str(self.image_processor.center_crop).lower(),
        }


def require_openvla(target: Target) -> OpenVLATarget:
    """The target as OpenVLA's, for what knows no other family yet.

    Raises:
        UserError: it is of another family.
    """
    if not isinstance(target, OpenVLATarget):
        raise UserError(f"{target.directory} is no OpenVLA checkpoint, and no other can be trained or drafted for here")
    return target


def load_openvla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    center_crop: bool,
    quantization: str,
    action_head: bool,
    prompt: str,
    cameras: tuple[str, ...],
    progress: Progress | None,
    **options: Any,
) -> OpenVLATarget | OFTTarget:
    """Loads an OpenVLA checkpoint from a Hugging Face directory.

    Args:
        directory: holds config.json, safetensors weights, preprocessor_config.json and tokenizer.json.
        device: where the weights go.
        dtype: precision of the weights.
        unnorm_key: whose action statistics to use; empty: the only ones there are.
        center_crop: as the fine-tuned checkpoints need that were trained with image augmentation.
        quantization: of the decoder layers' matrices, see `check_quantization`.
        action_head: compute the logits of action tokens alone, for a policy that answers with nothing else.
        prompt: how it is asked; `auto`: as config.json says.
        cameras: of an OFT checkpoint: `image`, `image` and `wrist`, or these and `wrist_2`; ALL_CAMERAS: the first two.
        progress: called with what is being done and the fraction of the tensors read.
        options: of other families, as they are where nobody sets them.

    Raises:
        UserError: anything about the directory or an argument that does not fit, before weights are read if possible.
    """
    refuse_options(directory, options)
    config = read_config(directory)
    generation = read_generation(directory)
    oft = read_oft(directory, config, unnorm_key, cameras)
    if oft is None and cameras not in (ALL_CAMERAS, config.cameras):
        raise UserError(
            f"{directory}: this policy is asked with {', '.join(config.cameras)}, neither more nor fewer; leave "
            "model.cameras out"
        )
    style = _prompt_style(prompt, config, directory)
    codec = (
        oft.codec
        if oft is not None
        else make_codec(
            config.action_codec,
            CodecContext(
                directory,
                config.norm_stats,
                unnorm_key,
                config.token_vocab_size,
                config.action_bins,
                end_ids=read_end_ids(directory) if style is PromptStyle.ECOT else frozenset(),
            ),
        )
    )
    image_processor = read_image_processor(directory, center_crop=center_crop and oft is None)
    sizes = [tower.image_size for tower in config.towers]
    if [tower.size for tower in image_processor.towers] != sizes:
        raise UserError(f"{directory}: preprocessor_config.json does not give the towers' image sizes {sizes}")
    prompts = read_prompt_tokenizer(
        directory,
        style=style,
        token_vocab_size=config.token_vocab_size,
        vocab_size=config.llama.vocab_size,
        taught=config.instructions,
    )
    if prompts.tokenizer is not None:
        check_tokenizer(prompts.tokenizer, directory / "tokenizer.json", config.llama.vocab_size)
    check_quantization(quantization, device, dtype)
    model = load_model(directory, config, device, dtype, quantization=quantization, progress=progress)
    if oft is not None:
        return _oft_target(directory, model, image_processor, prompts, oft, cropped=center_crop)
    if action_head:
        model.decoder.head_ids = _action_head(codec, directory)
    return OpenVLATarget(
        directory=directory,
        model=model,
        image_processor=image_processor,
        prompt=prompts,
        codec=codec,
        quantization=quantization,
        generation=generation,
        state=_state_tokens(config, directory, unnorm_key) if config.state_dims else None,
    )


def _state_tokens(config: OpenVLAConfig, directory: Path, unnorm_key: str) -> StateTokens:
    try:
        statistics = select_statistics(config.norm_stats, unnorm_key, "proprio")
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    if len(statistics.low) != config.state_dims:
        raise UserError(
            f"{directory}: config.json gives state_dims {config.state_dims} and statistics of {len(statistics.low)} "
            "numbers under proprio: they must be as many"
        )
    return StateTokens(ActionTokenizer(config.token_vocab_size, config.action_bins), statistics)


def _oft_target(
    directory: Path,
    model: OpenVLA,
    image_processor: ImageProcessor,
    prompt: PromptTokenizer,
    parts: OFTParts,
    *,
    cropped: bool,
) -> OFTTarget:
    modules = [module for module in (parts.head, parts.proprio) if module is not None]
    for module in modules:
        module.to(model.decoder.device, model.decoder.dtype).eval().requires_grad_(False)
    return OFTTarget(
        directory, model, image_processor, prompt, parts.codec, parts.head, parts.proprio, parts.cameras, cropped
    )


def _action_head(codec: Codec, directory: Path) -> range:
    """The ids whose logits an action needs.

    Raises:
        UserError: they are no range.
    """
    ids = range(codec.action_ids.first, codec.action_ids.stop)
    if not ids:
        raise UserError(f"{directory} does not answer with bins alone, so it needs all logits: leave model.action_head")
    return ids


def _prompt_style(chosen: str, config: OpenVLAConfig, directory: Path) -> PromptStyle:
    """How it is asked.

    Raises:
        UserError: it is to be seen from config.json, which does not tell.
    """
    if chosen != "auto":
        return PromptStyle(chosen)
    if config.vicuna:
        raise UserError(
            f"{directory}: config.json names Vicuna, which OpenVLA v0.1 and ECoT have, and does not say which of them "
            "this is; asked as the other it acts wrongly: set model.prompt to vicuna or to ecot"
        )
    return PromptStyle.OPENVLA


for order, model_type in enumerate(OPENVLA_TYPES):
    TARGETS.register(model_type, order=order)(load_openvla)
