# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: declared once, handed on as one object."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specvla_ros.control.convention_settings import ConventionSettings
from specvla_ros.engine.settings import MODES, EngineSettings, engine_settings_from
from specvla_ros.models.settings import ModelSettings
from specvla_ros.settings.parameter import Declared, walk, with_values
from specvla_ros.settings.profiles import merge_parameters, read_assignments

if TYPE_CHECKING:
    from specvla_ros.models.target import Target


@dataclass(frozen=True)
class PolicyOptions:
    """Which policy runs, and how."""

    checkpoint: Path
    model: ModelSettings
    engine: EngineSettings
    action: ConventionSettings

    def load(self) -> "Target":
        """Loads the checkpoint, and leaves a core to other processes."""
        from specvla_ros.models.checkpoint import leave_a_core, load_target

        leave_a_core()
        return load_target(self.checkpoint, **vars(self.model))


def takes_policy(
    *, mode: str = "", decodes: bool = True, publishes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of a policy; it gets them as its argument `chosen`, a `PolicyOptions`.

    Args:
        mode: that of a command which compares settings itself, and so has neither --mode nor --tolerance.
        decodes: whether it decodes as the options say; otherwise it has those of loading alone.
        publishes: whether its actions go out as messages, so that action.* may be set.
    """
    options = [_checkpoint() if decodes else _checkpoint("--target"), *map(_model_option, walk(ModelSettings()))]
    if decodes:
        options += _DECODING if mode else [*_DECODING_IN_ANY_MODE, *_DECODING]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "chosen"]

        @wraps(command)
        def run(**given: Any) -> None:
            shared = {option.name: given.pop(option.name) for option in options}
            command(chosen=_policy_options({"mode": mode, **shared}, publishes=publishes), **given)

        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def _policy_options(given: Mapping[str, Any], *, publishes: bool) -> PolicyOptions:
    from specvla_ros.cli.laboratory import find_policy

    plain = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
    names = [declared.path[0] for declared in walk(ModelSettings())]
    model: dict[str, Any] = {
        name: tuple(plain[name]) if isinstance(plain[name], list) else plain[name] for name in names
    }
    checkpoint, decoding = find_policy(plain["checkpoint"])
    assignments, file = plain.get("param") or (), plain.get("params_file") or decoding
    of_actions = [each for each in assignments if publishes and each.startswith(ConventionSettings.ROS_PREFIX)]
    return PolicyOptions(
        checkpoint,
        ModelSettings(**model),
        engine_settings_from(
            mode=plain["mode"] or "",
            tolerance=plain.get("tolerance", ""),
            assignments=[each for each in assignments if each not in of_actions],
            params_file=file,
        ),
        _convention_settings(of_actions, file if publishes else None),
    )


def _convention_settings(assignments: Sequence[str], file: Path | None) -> ConventionSettings:
    in_file = merge_parameters([file], {}, node="policy") if file is not None else {}
    values = {name: value for name, value in in_file.items() if name.startswith(ConventionSettings.ROS_PREFIX)}
    return with_values(ConventionSettings(), values | read_assignments(assignments))


def _option(name: str, kind: Any, default: object, panel: str, *flags: str, **given: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(*flags, rich_help_panel=panel, **given)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _model_option(declared: Declared) -> inspect.Parameter:
    (name,) = declared.path
    kind: Any = declared.kind
    default = declared.value
    if declared.is_list:
        kind, default = list[kind], [*default]
    if declared.parameter.allowed:
        kind = _choice(name, declared.parameter.allowed)
        default = kind(default)
    return _option(name, kind, default, "Model", f"--{name.replace('_', '-')}", help=declared.description)


def _checkpoint(*flags: str) -> inspect.Parameter:
    from specvla_ros.cli.laboratory import bundled_names

    names = ", ".join(bundled_names())
    text = f"Checkpoint of the policy: a Hugging Face directory, or one of this package: {names}. Default: nano."
    return _option("checkpoint", Path | None, None, "Model", "--checkpoint", "--policy", *flags, help=text)


def _choice(name: str, allowed: tuple[str, ...]) -> Any:
    return Enum(name.title(), {each: each for each in allowed}, type=str)


_DECODING_IN_ANY_MODE = [
    _option(
        "mode",
        _choice("mode", MODES) | None,
        None,
        "Decoding",
        help="How tokens are decoded; short for -p decode.mode:=…",
    ),
    _option(
        "tolerance",
        str,
        "",
        "Decoding",
        help="How far an action may be from the policy's own, such as 2mm,1deg or 5bins; 0: not at all. Takes the rule "
        "bin_distance, unless -p acceptance.rule:=… says otherwise.",
    ),
]
_DECODING = [
    _option(
        "param",
        list[str] | None,
        None,
        "Decoding",
        "-p",
        "--param",
        help="name:=value, as the policy node takes it: decode.*, draft.*, acceptance.*, and action.* where actions "
        "are published; again for more.",
    ),
    _option(
        "params_file",
        Path | None,
        None,
        "Decoding",
        help="ROS parameter file (a profile) with decode.*, draft.*, acceptance.*",
    ),
]
