"""The parameters that say how tokens are decoded, for the policy node and for the command line."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from specvla_ros.engine.settings import MODES, MOST_CHUNKS, MOST_SLOTS, EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter, problem, ros_name
from specvla_ros.settings.profiles import merge_parameters
from specvla_ros.speculation.settings import CHILDREN, LEAST_IMAGE_SHARE, RULES, AcceptanceSettings, DraftSettings

SWITCHED = ("decode.mode", "decode.max_in_flight", "decode.prefill_chunks", "decode.in_order")
_PREFIXES = ("decode.", "draft.", "acceptance.")


@dataclass(frozen=True)
class DecodeParameters:
    """Every parameter of decoding; the descriptions are those that `ros2 param describe` shows."""

    decode_mode: str = parameter("ar", "How tokens are decoded.", name="decode.mode", choices=MODES, writable=True)
    decode_max_in_flight: int = parameter(
        0,
        "Requests in flight at most in pipeline and specpipe; 0: 7 and 4.",
        name="decode.max_in_flight",
        minimum=0,
        maximum=MOST_SLOTS,
        writable=True,
    )
    decode_prefill_chunks: int = parameter(
        1,
        "Forwards over which pipeline and specpipe spread a prompt.",
        name="decode.prefill_chunks",
        minimum=1,
        maximum=MOST_CHUNKS,
        writable=True,
    )
    decode_in_order: bool = parameter(
        False,
        "Finish every frame that was begun; actions wait for older ones, in place of overtaking them.",
        name="decode.in_order",
        writable=True,
    )
    decode_max_text_tokens: int = parameter(
        128,
        "Longest prompt text [tokens]; a longer instruction is refused.",
        name="decode.max_text_tokens",
        minimum=1,
        maximum=4096,
    )
    decode_max_reasoning_tokens: int = parameter(
        0,
        "Longest text that the policy may write before its action [tokens]; 0: its first token is an action.",
        name="decode.max_reasoning_tokens",
        minimum=0,
        maximum=4096,
    )
    draft_head: str = parameter(
        "",
        "Directory of the draft head; empty: the folder `draft` of the checkpoint if there is one; none: no head.",
        name="draft.head",
    )
    draft_fallback_to_ar: bool = parameter(
        False, "Decode plainly, with a warning, when no draft can be had.", name="draft.fallback_to_ar"
    )
    draft_top_k: int = parameter(
        8, "Children per node that a draft tree considers.", name="draft.top_k", minimum=1, maximum=64
    )
    draft_depth: int = parameter(
        5, "Drafted tokens on a draft tree's longest path.", name="draft.depth", minimum=1, maximum=63
    )
    draft_nodes: int = parameter(
        50, "Nodes of a draft tree, the root included.", name="draft.nodes", minimum=1, maximum=64
    )
    draft_children: str = parameter(
        "top_k",
        "How children are chosen: the likeliest, or those whose tolerance covers most of the draft's mass.",
        name="draft.children",
        choices=CHILDREN,
    )
    draft_temporal: bool = parameter(
        False, "Draft the previous action too, held and extrapolated.", name="draft.temporal"
    )
    draft_prompt_lookup_tokens: int = parameter(
        0,
        "Tokens drafted by looking the last ones up in prompt and answer; 0: none. For policies that write text.",
        name="draft.prompt_lookup_tokens",
        minimum=0,
        maximum=63,
    )
    draft_self_tokens: int = parameter(
        0,
        "Tokens drafted by the policy itself with few image tokens, a forward each; 0: none. For policies that write "
        "text.",
        name="draft.self_tokens",
        minimum=0,
        maximum=63,
    )
    draft_self_image_share: float = parameter(
        0.1,
        "Share of the image's tokens that draft.self_tokens are drafted with.",
        name="draft.self_image_share",
        minimum=LEAST_IMAGE_SHARE,
        maximum=1.0,
    )
    acceptance_rule: str = parameter(
        "strict", "Which drafted tokens are taken.", name="acceptance.rule", choices=RULES, writable=True
    )
    acceptance_bins: tuple[int, ...] = parameter(
        (0,),
        "Tolerance of bin_distance [bins of the action tokens]: one number for all moving dimensions, or one each.",
        name="acceptance.bins",
        minimum=0,
        maximum=254,
        writable=True,
    )
    acceptance_tolerance_m: float = parameter(
        0.0,
        "Tolerance of bin_distance for x, y, z [m], in place of bins; 0: none.",
        name="acceptance.tolerance_m",
        minimum=0.0,
        maximum=1.0,
        writable=True,
    )
    acceptance_tolerance_rad: float = parameter(
        0.0,
        "Tolerance of bin_distance for roll, pitch, yaw [rad], in place of bins; 0: none.",
        name="acceptance.tolerance_rad",
        minimum=0.0,
        maximum=3.2,
        writable=True,
    )
    acceptance_gripper_bins: int = parameter(
        0, "Tolerance for the gripper [bins].", name="acceptance.gripper_bins", minimum=0, maximum=254, writable=True
    )
    acceptance_fly_theta: float = parameter(
        0.3,
        "FLy: entropy from which on a mismatch may be deferred.",
        name="acceptance.fly_theta",
        minimum=0.0,
        maximum=10.0,
        writable=True,
    )
    acceptance_fly_window: int = parameter(
        2,
        "FLy: tokens behind a mismatch that must agree [tokens].",
        name="acceptance.fly_window",
        minimum=1,
        maximum=32,
        writable=True,
    )
    acceptance_lvspec_loose_share: float = parameter(
        0.3,
        "LVSpec: share of the drafted tokens, those that depend least on the image, that are taken as they are.",
        name="acceptance.lvspec_loose_share",
        minimum=0.0,
        maximum=1.0,
        writable=True,
    )
    acceptance_lvspec_top_n: int = parameter(
        8,
        "LVSpec: image tokens whose similarity is averaged.",
        name="acceptance.lvspec_top_n",
        minimum=1,
        maximum=4096,
        writable=True,
    )
    acceptance_lvspec_shift: int = parameter(
        1,
        "LVSpec: places by which a drafted token may be off [tokens].",
        name="acceptance.lvspec_shift",
        minimum=0,
        maximum=16,
        writable=True,
    )

    def engine_settings(self, max_image_age_s: float = 0.0) -> EngineSettings:
        """What the engine is made with.

        Raises:
            UserError: the values do not fit together.
        """
        return EngineSettings(
            mode=self.decode_mode,
            max_in_flight=self.decode_max_in_flight,
            prefill_chunks=self.decode_prefill_chunks,
            in_order=self.decode_in_order,
            max_text_tokens=self.decode_max_text_tokens,
            max_reasoning_tokens=self.decode_max_reasoning_tokens,
            max_image_age_s=max_image_age_s,
            draft=DraftSettings(
                head=self.draft_head,
                fallback_to_ar=self.draft_fallback_to_ar,
                top_k=self.draft_top_k,
                depth=self.draft_depth,
                nodes=self.draft_nodes,
                children=self.draft_children,
                temporal=self.draft_temporal,
                prompt_lookup_tokens=self.draft_prompt_lookup_tokens,
                self_tokens=self.draft_self_tokens,
                self_image_share=self.draft_self_image_share,
            ),
            acceptance=self.acceptance_settings(),
        )

    def acceptance_settings(self) -> AcceptanceSettings:
        """The share of it that may change while the engine runs.

        Raises:
            UserError: the values do not fit together.
        """
        return AcceptanceSettings(
            rule=self.acceptance_rule,
            bins=self.acceptance_bins,
            tolerance_m=self.acceptance_tolerance_m,
            tolerance_rad=self.acceptance_tolerance_rad,
            gripper_bins=self.acceptance_gripper_bins,
            fly_theta=self.acceptance_fly_theta,
            fly_window=self.acceptance_fly_window,
            lvspec_loose_share=self.acceptance_lvspec_loose_share,
            lvspec_top_n=self.acceptance_lvspec_top_n,
            lvspec_shift=self.acceptance_lvspec_shift,
        )


def read_decode_parameters(assignments: Sequence[str] = (), params_file: Path | None = None) -> DecodeParameters:
    """Parameters as ROS users write them.

    Args:
        assignments: `name:=value`, with YAML's values; they win over the file.
        params_file: a ROS parameter file; what is in it beyond decoding is left to others.

    Raises:
        UserError: a file that cannot be read, an unknown name, a value out of range.
    """
    in_file = merge_parameters([params_file], {}, node="policy") if params_file is not None else {}
    given: dict[str, Any] = {name: value for name, value in in_file.items() if name.startswith(_PREFIXES)}
    for assignment in assignments:
        name, separator, text = assignment.partition(":=")
        if not separator:
            raise UserError(f"'{assignment}' is no parameter; write it as name:=value, for example decode.mode:=spec")
        given[name] = yaml.safe_load(text)
    known = {ros_name(declared): declared for declared in fields(DecodeParameters)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known ones: {', '.join(known)}"
            raise UserError(f"there is no parameter '{name}'; {hint}")
        declared = known[name]
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(declared.default, tuple):
            value = (value,)
        elif isinstance(declared.default, float) and type(value) is int:
            value = float(value)
        reason = problem(declared, value)
        if reason:
            raise UserError(reason)
        values[declared.name] = value
    return DecodeParameters(**values)
