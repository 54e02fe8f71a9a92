# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, hint, parameter, section, values_of, walk, with_values
from specvla_ros.settings.profiles import merge_parameters, read_assignments
from specvla_ros.speculation.settings import PRESETS, AcceptanceSettings, DraftSettings, Tolerance

if TYPE_CHECKING:  # settings are also read without torch
    import torch

    from specvla_ros.models.codecs.codec import Codec

_SLOTS = {"ar": 1, "spec": 1, "pipeline": 7, "specpipe": 4, "auto": 3}
MODES = tuple(_SLOTS)
_DRAFTING = ("spec", "specpipe", "auto")
_PIPELINED = ("pipeline", "specpipe", "auto")
_SPREADS = (1, 2, 4)  # forwards over which mode auto may spread a prompt
_NO_PRESET = "none"

MAX_STREAMS = 256


@dataclass(frozen=True)
class EngineSettings:
    """Settings of decoding and scheduling. Raises UserError if a value is out of range."""

    ROS_PREFIX: ClassVar[str] = "decode."

    mode: str = parameter(
        "auto",
        "How tokens are decoded. ar: one frame at a time, one token per forward. spec: one frame, one draft tree per "
        "forward. pipeline (ActionFlow): a forward carries the newest frame's prefill and one token of every frame in "
        "flight. specpipe: the same with a draft tree of every frame. auto: chooses among these for each frame, from "
        "the ticks and answers so far, to minimize the age of the image that the robot acts on. With the strict rule "
        "all give ar's tokens, except at near ties of two tokens in bfloat16 and float16: specvla certify counts them.",
        choices=MODES,
        writable=True,
        basic=True,
    )
    max_in_flight: int = parameter(
        0,
        "Max requests in flight per robot in pipeline, specpipe and auto; 0: "
        f"{_SLOTS['pipeline']}, {_SLOTS['specpipe']} and {_SLOTS['auto']}.",
        minimum=0,
        maximum=64,
        writable=True,
    )
    streams: int = parameter(
        1,
        "Number of robots whose frames are decoded together. Each has its own requests in flight and KV slots.",
        minimum=1,
        maximum=MAX_STREAMS,
    )
    prefill_chunks: int = parameter(
        1, "Number of forwards over which pipeline and specpipe spread a prompt.", minimum=1, maximum=16, writable=True
    )
    in_order: bool = parameter(
        False,
        "Finish every started frame in pipeline and specpipe: actions wait for those of older frames. If false, a "
        "frame is dropped when a newer one overtakes it.",
        writable=True,
    )
    # A KV slot has this many rows after those of the image.
    max_text_tokens: int = parameter(
        128, "Max length of the prompt text; a longer instruction is rejected.", unit="tokens", minimum=1, maximum=4096
    )
    max_reasoning_tokens: int = parameter(
        0,
        "Max length of the text before the policy's action; 0: its first token is an action, as OpenVLA's is.",
        unit="tokens",
        minimum=0,
        maximum=4096,
    )
    think_every_s: float = parameter(
        0.0,
        "For policies that write text before they act: min time between two images for which they write it. In "
        "between, the last text is given with the newest image and only the action is decoded; in pipeline, specpipe "
        "and auto also while the next text is written. Lossy: actions follow an older text. 0: each image has its own.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
    )
    commit: str = parameter(
        "none",
        "Start of an answer of several actions. none: decoded from its image alone. executed: the actions that the "
        "robot executes until the answer's own are out are given, from the answer before (real-time chunking), so that "
        "the motion continues and they cost no forward. Lossy. Only for policies that write digits, and never with "
        "decode.ensemble. Assumes that the robot follows published actions, each for as long as decode.chunk_step_s.",
        choices=("none", "executed"),
        writable=True,
    )
    partial_actions: bool = parameter(
        True,
        "Publish the first actions of an answer while the rest is decoded, as messages with the same stamp. Only for "
        "policies that write digits, and never with decode.ensemble.",
        writable=True,
    )
    tail: str = parameter(
        "whole",
        "How far an answer is decoded once its first actions are published (decode.partial_actions). whole: to its "
        "end. needed: until the published actions cover the time to the first action of a newer, waiting image, by "
        "the duration of an action (decode.chunk_step_s, or as the checkpoint says).",
        choices=("whole", "needed"),
        writable=True,
    )
    ensemble: int = parameter(
        0,
        "Number of answers whose action chunks are averaged where they overlap: the newest has weight 1, each earlier "
        "one 0.5 (VLA-0's evaluation uses 8); 0: no averaging.",
        minimum=0,
        maximum=64,
        writable=True,
    )
    chunk_step_s: float = parameter(
        0.0,
        "Duration of one action of a chunk, for decode.ensemble, decode.tail, decode.commit and draft.chunk_shift; 0: "
        "as the checkpoint says. If neither gives it, successive images are one action apart, answers are decoded "
        "whole, and decode.commit is refused.",
        unit="s",
        minimum=0.0,
        maximum=60.0,
        writable=True,
    )
    max_image_age_s: float = parameter(
        0.0,
        "Max age of an image. An older image is dropped, before decoding or when its action is ready; 0 disables the "
        "check, e.g. for recorded images.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
        writable=True,
        name="max_image_age_s",
        basic=True,
    )
    preset: str = parameter(
        _NO_PRESET,
        "A paper's values for draft.* and acceptance.*; explicitly set values take precedence. A node reads it at "
        "startup only.",
        choices=(_NO_PRESET, *PRESETS),
        presets=PRESETS,
    )
    draft: DraftSettings = section(DraftSettings)
    acceptance: AcceptanceSettings = section(AcceptanceSettings)

    def __post_init__(self) -> None:
        check(self)

    def check_action_head(self) -> None:
        """Raises UserError if text may come before the actions: an action head gives no logits for text."""
        if self.max_reasoning_tokens:
            raise UserError(
                f"model.action_head gives no logits for text, but decode.max_reasoning_tokens is "
                f"{self.max_reasoning_tokens}: set it to 0, or model.action_head to false"
            )

    def check_thinking(self, *, causal_prompt: bool) -> None:
        """Raises UserError if think_every_s is set for a policy whose answers do not begin with a text to be given."""
        if not self.max_reasoning_tokens:
            raise UserError(
                "decode.think_every_s is for policies that write text before they act, but decode.max_reasoning_tokens "
                "is 0: set it to the length of the longest text, or decode.think_every_s to 0"
            )
        if not causal_prompt:
            raise UserError(
                "this policy's prompt attends bidirectionally, so it cannot be given a text: set decode.think_every_s "
                "to 0"
            )

    @property
    def gives_no_prefix(self) -> bool:
        """True if each answer is decoded from its image alone, from its first token."""
        return not self.think_every_s and self.commit == "none"

    def without_prefix(self) -> "EngineSettings":
        """The same settings with `gives_no_prefix`."""
        return replace(self, think_every_s=0.0, commit="none")

    @property
    def lossless(self) -> bool:
        """True if answers are plain decoding's, except at near ties in half precision."""
        return self.gives_no_prefix and (self.acceptance.rule == "strict" or not self.drafts)

    @property
    def preset_summary(self) -> str:
        """The preset's name and the values that differ from it; empty without a preset."""
        if self.preset == _NO_PRESET:
            return ""
        values = values_of(self)
        others = [f"{name} {values[name]}" for name, own in PRESETS[self.preset].items() if values[name] != own]
        return f"{self.preset}, except {', '.join(others)}" if others else self.preset

    @property
    def drafts(self) -> bool:
        return self.mode in _DRAFTING

    def step_s(self, codec: "Codec") -> float:
        """Duration of one chunk action in seconds; 0 if neither the settings nor the checkpoint gives it."""
        return self.chunk_step_s or codec.dt_s or 0.0

    def tokens_in(self, dtype: "torch.dtype") -> str:
        """The condition for tokens to equal plain decoding's in a dtype; empty if they always do, or need not."""
        if dtype.itemsize > 2 or not self.lossless or not (self.drafts or self.slots > 1):
            return ""
        name = str(dtype).removeprefix("torch.")
        return f"plain decoding's except at near ties, which {name} may break differently: specvla certify counts them"

    @property
    def tree_nodes(self) -> int:
        """Max nodes in a request's tree, including the root."""
        return self.draft.nodes if self.drafts else 1

    @property
    def slots_per_stream(self) -> int:
        if self.mode not in _PIPELINED or (self.chooses and self.streams > 1):
            return 1  # several robots already share forwards
        return self.max_in_flight or _SLOTS[self.mode]

    @property
    def slots(self) -> int:
        return self.streams * self.slots_per_stream

    @property
    def chooses(self) -> bool:
        """True if the engine decides while decoding when and how the next frame starts."""
        return self.mode == "auto"

    @property
    def spreads(self) -> tuple[int, ...]:
        """The numbers of forwards over which a prompt may be spread."""
        if self.chooses:
            return _SPREADS
        return (self.prefill_chunks if self.mode in _PIPELINED else 1,)


_FILE_PREFIXES = tuple(each.ROS_PREFIX for each in (EngineSettings, DraftSettings, AcceptanceSettings))


def engine_settings_from(
    *,
    mode: str = "",
    tolerance: str = "",
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    params_file: Path | None = None,
    **keywords: Any,
) -> EngineSettings:
    """Settings from the arguments of the command line or of Python callers.

    Later sources take precedence: the file, the tolerance, the assignments and keywords, the mode. Raises UserError for
    an unreadable file or tolerance, an unknown name, or a value out of range.

    Args:
        mode: value of decode.mode; empty if not given.
        tolerance: e.g. 2mm,1.1deg or 5bins, applied by bin_distance unless another rule is set; 0 or strict for none.
            Empty if not given.
        assignments: `name:=value`, with YAML values; `values`: the same by name.
        params_file: a ROS parameter file; only its decode.*, draft.* and acceptance.* are read.
        keywords: parameters with underscores for dots (draft_nodes=16), or a field of EngineSettings.
    """
    in_file = merge_parameters([params_file], {}, node="policy") if params_file is not None else {}
    chosen: dict[str, Any] = {name: value for name, value in in_file.items() if name.startswith(_FILE_PREFIXES)}
    if tolerance:
        accepted, names = Tolerance.parse(tolerance).acceptance, ("rule", "bins", "tolerance_m", "tolerance_rad")
        chosen |= {f"{accepted.ROS_PREFIX}{name}": getattr(accepted, name) for name in names}
    chosen |= read_assignments(assignments) | {**(values or {})}
    known = {declared.name.replace(".", "_"): declared.name for declared in walk(EngineSettings())}
    for keyword, value in keywords.items():
        name = known.get(keyword) or known.get(f"{EngineSettings.ROS_PREFIX}{keyword}".replace(".", "_"))
        if name is None:
            raise UserError(f"there is no parameter '{keyword}'; {hint(keyword, known)}")
        chosen[name] = value
    if mode:
        chosen[f"{EngineSettings.ROS_PREFIX}mode"] = mode
    return with_values(EngineSettings(), chosen)
