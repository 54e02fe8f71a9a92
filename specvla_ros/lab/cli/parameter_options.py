# SPDX-License-Identifier: Apache-2.0
"""Shared command-line options: a policy's options, and options generated from the parameters of plans."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import MODES, EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_names, find_policy
from specvla_ros.models.settings import ModelSettings
from specvla_ros.policy_parameters import PolicyParameters, load_complete, model_settings, read_policy_file
from specvla_ros.settings.parameter import Parameter, hint, parameter_of, values_of, walk, with_values
from specvla_ros.settings.profiles import read_assignments
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, Tolerance

if TYPE_CHECKING:
    from specvla_ros.models.target import Target


_WITHOUT_BINS = ("strict", "fly", "lvspec")  # acceptance rules that read no tolerance
_MODEL = "Model"  # help panel of the loading options; help shows only basic ones


@dataclass(frozen=True)
class PolicyOptions:
    """The policy to run and its settings."""

    checkpoint: Path
    model: ModelSettings
    engine: EngineSettings
    action: ConventionSettings
    in_file: Mapping[str, Any] = field(default_factory=dict)  # all values of its parameter file by name
    decoding: frozenset[str] = frozenset()  # names of the parameters of `engine` that the user gave
    typed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the command line's options as words, by name

    def load(self, progress: Callable[[str, float], None] = lambda *_: None) -> "Target":
        """Loads the checkpoint; leaves a core to other processes."""
        from specvla_ros.models.checkpoint import leave_a_core, load_target

        leave_a_core()
        return load_target(self.checkpoint, **vars(self.model), progress=progress)

    def load_with_text(
        self, progress: Callable[[str, float], None] = lambda *_: None, *, publishes: bool = False
    ) -> "Target":
        """Loads the checkpoint for text instructions and, with `publishes`, for published actions."""
        action = self.action if publishes else None
        return load_complete(self.load, progress, self.checkpoint, self.model, action)


def takes_policy(
    *, mode: str = "", decodes: bool = True, publishes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a policy's options to a command, which receives them as `chosen`, a `PolicyOptions`.

    Args:
        mode: fixed mode of a command that compares settings itself; it has neither --mode nor --tolerance.
        decodes: False: no --mode and --tolerance, and -p and --params-file only affect loading.
        publishes: the command publishes actions as messages, so that action.* may be set.
    """
    model = _Options(ModelSettings, panel=_MODEL)
    options = [_checkpoint() if decodes else _checkpoint("--target"), *model.options]
    options += _DECODING if mode or not decodes else [*_DECODING_IN_ANY_MODE, *_DECODING]

    context_argument = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command = takes_plans(command)
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "chosen"]

        @wraps(command)
        def run(**given: Any) -> None:
            context = given.pop("context")
            settings = vars(model.take(given))
            # A file may override options that the user did not give.
            usual = {name for name in settings if context.get_parameter_source(model.option_of(name)).name == "DEFAULT"}
            asked = {name: value for name, value in settings.items() if name not in usual}
            shared = {option.name: given.pop(option.name) for option in options if option.name in given}
            shared = {"mode": mode, "robot": given.get("robot", ""), **shared}
            chosen = _policy_options(asked, shared, publishes=publishes)
            command(chosen=replace(chosen, typed=_typed(context)), **given)

        run.__signature__ = inspect.Signature([*own, *options, context_argument])  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass(frozen=True)
class Taken:
    """A command's changes to a plan's options, given with the plan in an `Annotated`."""

    fixed: Mapping[str, Any] = field(default_factory=dict)  # values of parameters without an option in this command
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults that differ from the plan's


def takes_plans(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each plan among a command's arguments by its parameters as options; the command receives the plan."""
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in inspect.signature(command).parameters.values()]
    plans = {each.name: plan for each in own if (plan := _plan(each.annotation)) is not None}

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: plan.take(given) for name, plan in plans.items()}
        command(**given, **made)

    options = [option for each in own for option in (plans[each.name].options if each.name in plans else [each])]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _plan(annotation: Any) -> "_Options | None":
    kind, *others = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    if not is_dataclass(kind) or kind is PolicyOptions:
        return None
    taken = next((each for each in others if isinstance(each, Taken)), Taken())
    return _Options(kind, taken)


class _Options:
    """The options of a settings class, one per parameter."""

    def __init__(self, kind: Any, taken: Taken = Taken(), panel: str = "") -> None:
        self._kind, self._fixed = kind, taken.fixed
        hints = get_type_hints(kind)
        defaults = {each.name: each.default for each in fields(kind)} | {**taken.defaults}
        self._by_field = {
            each.name: _plan_option(each.name, hints[each.name], declared, defaults[each.name], panel)
            for each in fields(kind)
            if each.name not in taken.fixed and (declared := parameter_of(each)) is not None
        }
        self.options = [*self._by_field.values()]

    def option_of(self, field: str) -> str:
        """The name of a field's option."""
        return self._by_field[field].name

    def take(self, given: dict[str, Any]) -> Any:
        """Builds the settings from their options' values, which are removed from `given`."""
        values = {name: _plain(given.pop(option.name)) for name, option in self._by_field.items()}
        hints = get_type_hints(self._kind)
        lists = {name: tuple(value or ()) for name, value in values.items() if get_origin(hints[name]) is tuple}
        return self._kind(**self._fixed, **values | lists)


def _plan_option(name: str, kind: Any, declared: Parameter, default: Any, panel: str) -> inspect.Parameter:
    option = declared.name if declared.name and "." not in declared.name else name
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], [*default] or None  # type: ignore[misc]
        kind = kind if default else kind | None
    elif declared.allowed:
        kind = _choice(name, declared.allowed)
        kind, default = (kind | None, None) if default is None else (kind, kind(default))
    limits = {"min": declared.minimum, "max": declared.maximum}
    given: dict[str, Any] = {each: limit for each, limit in limits.items() if limit is not None}
    given |= {"help": declared.text, "hidden": panel == _MODEL and not declared.basic}
    return _option(option, kind, default, panel, f"--{option.replace('_', '-')}", **given)


def _typed(context: typer.Context) -> dict[str, tuple[str, ...]]:
    """The options that the user typed, each with its values, by their names in the command."""
    words: dict[str, tuple[str, ...]] = {}
    for each in context.command.params:
        name, value = str(each.name), context.params.get(str(each.name))
        source = context.get_parameter_source(name)
        if each.param_type_name == "option" and source is not None and source.name == "COMMANDLINE":
            values = value if isinstance(value, (list, tuple)) else [value]
            flag = max(each.opts, key=len)
            words[name] = (
                ((flag if value else each.secondary_opts[0]),)
                if isinstance(value, bool)
                else tuple(word for one in values for word in (flag, str(_plain(one))))
            )
    return words


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _policy_options(model: Mapping[str, Any], given: Mapping[str, Any], *, publishes: bool) -> PolicyOptions:
    plain = {name: _plain(value) for name, value in given.items()}
    file = plain.get("params_file")
    in_file = read_policy_file(file) if file is not None else {}
    checkpoint, decoding = find_policy(_checkpoint_of(plain["checkpoint"], in_file, file), plain["robot"])
    assigned = read_assignments(plain.get("param") or ())
    of_options = {"decode.mode": plain["mode"]} | dict.fromkeys(values_of(AcceptanceSettings()), plain.get("tolerance"))
    typed = {*in_file, *assigned, *(name for name, value in of_options.items() if value)}
    if file is None and decoding is not None:
        file, in_file = decoding, read_policy_file(decoding)
    known = [ModelSettings(), EngineSettings(), *([ConventionSettings()] if publishes else [])]
    names = dict.fromkeys(name for settings in known for name in values_of(settings))
    if unknown := [name for name in assigned if name not in names]:
        if unknown[0] in values_of(PolicyParameters()):
            raise UserError(f"'{unknown[0]}' is a parameter of the policy node that this command does not use: omit it")
        raise UserError(f"there is no parameter '{unknown[0]}'; {hint(unknown[0], names)}")
    of_loading = {name: assigned.pop(name) for name in values_of(ModelSettings()) if name in assigned}
    prefix = ConventionSettings.ROS_PREFIX
    of_actions = {name: assigned.pop(name) for name in [*assigned] if publishes and name.startswith(prefix)}
    engine = engine_settings_from(
        mode=plain["mode"] or "", tolerance=plain.get("tolerance", ""), values=assigned, params_file=file
    )
    tolerance = plain.get("tolerance")
    if tolerance and not engine.drafts:
        typer.echo(
            f"--tolerance {tolerance} has no effect: it applies to drafted tokens, and mode {engine.mode} "
            "does not draft; add --mode spec",
            err=True,
        )
    elif tolerance and Tolerance.parse(tolerance).acceptance.rule != (rule := engine.acceptance.rule) in _WITHOUT_BINS:
        typer.echo(f"--tolerance {tolerance} has no effect: the rule {rule} has none; omit either", err=True)
    conventions = {name: value for name, value in in_file.items() if name.startswith(prefix)}
    action = with_values(ConventionSettings(), conventions | of_actions)
    ours = frozenset(typed & {*values_of(engine)})
    return PolicyOptions(checkpoint, model_settings(in_file | of_loading, model), engine, action, in_file, ours)


def _checkpoint_of(given: Path | None, in_file: Mapping[str, Any], file: Path | None) -> Path | None:
    """The checkpoint given as an option, else the parameter file's; None: neither names one."""
    named = in_file.get("checkpoint")
    if given is None or not named:
        return Path(named) if named and given is None else given
    if Path(named) != given:
        typer.echo(f"checkpoint: --checkpoint {given} replaces {named} of {file}", err=True)
    return given


def _option(name: str, kind: Any, default: object, panel: str, *flags: str, **given: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(*flags, rich_help_panel=panel or None, **given)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _checkpoint(*flags: str) -> inspect.Parameter:
    names = ", ".join(bundled_names())
    text = (
        f"The policy's checkpoint: a Hugging Face directory, or a bundled policy: {names}. Default: the bundled one "
        "named like the robot, else nano."
    )
    return _option("checkpoint", Path | None, None, _MODEL, "--checkpoint", "--policy", *flags, help=text)


def _basic_names() -> str:
    prefixes = (EngineSettings.ROS_PREFIX, DraftSettings.ROS_PREFIX, AcceptanceSettings.ROS_PREFIX)
    declared = [each for each in walk(EngineSettings()) if each.parameter.basic]
    return ", ".join(each.name for each in declared if each.name.startswith(prefixes))


def _choice(name: str, allowed: tuple[str, ...]) -> Any:
    return Enum(name.title(), {each: each for each in allowed}, type=str)


def _decoding(name: str, kind: Any, default: object, help: str, *flags: str) -> inspect.Parameter:
    return _option(name, kind, default, "Decoding", *flags, help=help)


_DECODING_IN_ANY_MODE = [
    _decoding("mode", _choice("mode", MODES) | None, None, "Decoding mode; short for -p decode.mode:=…"),
    _decoding(
        "tolerance",
        str,
        "",
        "Maximum deviation of each drafted token from the policy's own choice, such as 2mm,1deg or 5bins; 0: none. A "
        "whole answer may differ by more. Selects the rule bin_distance unless -p acceptance.rule:=… is given.",
    ),
]
_DECODING = [
    _decoding(
        "param",
        list[str] | None,
        None,
        f"A node parameter as name:=value: {_basic_names()}; or any other of decode.*, draft.*, acceptance.*, model.*, "
        "and action.* for commands that publish actions (docs/reference/parameters.md); repeatable.",
        "-p",
        "--param",
    ),
    _decoding("params_file", Path | None, None, "ROS parameter file of the policy node."),
]
