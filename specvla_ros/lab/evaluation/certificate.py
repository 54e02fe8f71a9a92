# SPDX-License-Identifier: Apache-2.0
"""`specvla certify`: how a setting changes a policy's answers to recorded images, as a file that can be verified.

Every image is answered by plain decoding and by the setting, with as many frames in flight as its mode allows. Strict
settings must give identical tokens; for relaxed ones the file states how far the actions are apart.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import specvla_kernels
import specvla_ros
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.lerobot.dataset import as_episode, name_of, origin
from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.compare import compare
from specvla_ros.lab.evaluation.deviation import deviation
from specvla_ros.lab.evaluation.frame_sources import frames_in
from specvla_ros.lab.evaluation.run_directory import bag_hashes, checkpoint_hashes, head
from specvla_ros.lab.files import replace_file
from specvla_ros.models.generation import NO_RULES
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.settings.json_file import load_json
from specvla_ros.settings.parameter import values_of, with_values
from specvla_ros.speculation.settings import AcceptanceSettings

VERSION = 2
# Margin between the two largest logits of a position below which the order of summation may decide the token.
_TIES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.0625, torch.float16: 0.0078125}
_SHOWN = 20  # maximum number of listed differences
_ROUNDED = ("near_ties", "closest", "margin", "ties")
_PLAIN, _OWN = "plain", "own"
# The fields that another run must reproduce, in words.
_COMPARED = {
    "strict": "the acceptance rule",
    "instruction": "the instruction",
    "settings": "the settings",
    "policy_files": "the policy's files",
    "draft_files": "the draft head's files",
    "bags": "the bags or their results",
    "result": "the result",
}
_FIELDS = {
    *("certificate", "date", "software", "hardware", "code", "policy", "strict", "instruction", "settings"),
    *("policy_files", "draft_files", "tie", "ties_looked_at", "bags", "datasets", "details", "result", "not_compared"),
}
# The fields whose differences are named, but which another run need not reproduce.
_NAMED = {"code": "the package's sources", "software": "the software", "hardware": "the hardware"}


@dataclass
class Finding:
    """The results of one bag, or of all."""

    frames: int = 0  # images with an instruction
    actions: int = 0  # frames answered by both
    tokens: int = 0  # of those answers
    lost: Counter[str] = field(default_factory=Counter)  # frames answered by plain decoding only, by reason
    # frames without an action from plain decoding, by reason; the setting must have none either
    unanswered: Counter[str] = field(default_factory=Counter)
    gained: int = 0  # the part of these that the setting answered
    differing: int = 0  # frames whose tokens differ
    ties: int = 0  # the part of these whose first different token is a near tie; see `tie`
    near_ties: int = 0  # plain decoding's tokens whose two largest logits differ by less than `tie`
    closest: float | None = None  # smallest margin between the two largest logits of any token; None: not computed
    digest: str = ""  # SHA-256 of all of plain decoding's tokens

    def add(self, other: "Finding") -> None:
        for name in ("frames", "actions", "tokens", "lost", "unanswered", "gained", "differing", "ties", "near_ties"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        known = [each for each in (self.closest, other.closest) if each is not None]
        self.closest = min(known, default=None)


@dataclass(frozen=True)
class Certificate:
    """A comparison of one setting with plain decoding, as the JSON file holds it."""

    content: Mapping[str, Any]

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons why certification fails, in sentences. Differing tokens count for strict settings only."""
        result = self.content["result"]
        alone, different = sum(result["lost"].values()) + result["gained"], result["differing"] - result["ties"]
        failures = []
        if not result["actions"]:
            failures.append("the policy answered no image with an action")
        if alone:
            failures.append(f"{alone} images were answered by only one of the two")
        if self.content["strict"] and different > 0:
            failures.append(f"{different} of {result['actions']} strict answers differ from plain decoding")
        return tuple(failures)

    def write(self, path: Path) -> None:
        """Writes the file atomically, and a page of the same name next to it."""
        page = page_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(self.content, indent=1) + "\n")
        _write_page(page, self.content, self.failures)


def page_of(path: Path) -> Path:
    """The page next to a certificate; raises UserError if it would replace the certificate."""
    page = path.with_suffix(".html")
    if page == path:
        raise UserError(f"{path} is the name of the certificate's page; give a name that ends in .json")
    return page


def read_certificate(path: Path) -> Certificate:
    """Reads a file written by `Certificate.write`; raises UserError if it is not one."""
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a file written by `specvla certify`") from None
    if not isinstance(content, dict) or content.get("certificate") != VERSION or not {*_COMPARED} <= content.keys():
        raise UserError(f"{path} is not a certificate of this version ({VERSION}); run `specvla certify` again")
    if unknown := sorted(content.keys() - _FIELDS):
        raise UserError(
            f"{path} has '{unknown[0]}', which `specvla certify` does not write: it was changed; run it again"
        )
    return Certificate(content)


def settings_of(certificate: Certificate) -> EngineSettings:
    """The certified settings; raises UserError if the certificate names unknown ones."""
    return with_values(EngineSettings(), dict(certificate.content["settings"]))


def refuse_others(certificate: Certificate, settings: EngineSettings, names: Iterable[str]) -> None:
    """Raises UserError where a value of `names`, which the user gave, is not the certified one."""
    ours, certified = values_of(settings), values_of(settings_of(certificate))
    others = [name for name in sorted(names) if ours[name] != certified[name]]
    if others:
        words = "; ".join(f"{name} {ours[name]}, certified {certified[name]}" for name in others)
        raise UserError(
            f"--verify checks the certificate's setting, but the options or the parameter file give another: {words}; "
            "leave them out, or certify that setting"
        )


def certify(
    policy: Target,
    settings: EngineSettings,
    bags: Sequence[Path],
    topics: TopicChoice,
    on_frame: Callable[[int], None] = lambda done: None,
) -> Certificate:
    """Compares a setting with plain decoding; `on_frame` gets the number of images that both have answered.

    Raises UserError if a bag cannot be read or the settings do not fit the policy.
    """
    if len({*map(name_of, bags)}) < len(bags):
        raise UserError(
            "two bags have the same name, by which the certificate identifies them: rename one of the bag directories"
        )
    comparison, total, of_bags = Comparison(policy), Finding(), {}
    not_compared: dict[str, list[str]] = {}  # parts of bags that could not be read, by the bag's name
    digest = hashlib.sha256()
    asked = replace(settings, max_image_age_s=0.0, in_order=True)
    plainly = replace(asked.without_prefix(), mode="ar", acceptance=AcceptanceSettings())
    for bag in bags:
        found, of_bag = Finding(), hashlib.sha256()
        engines = {_PLAIN: Engine(policy, plainly), _OWN: Engine(policy, asked)}
        frames = frames_in(policy, [bag], topics, not_compared.setdefault(name_of(bag), []).append)
        for observation, answers in compare(engines, frames, in_flight=True):
            plain = answers[_PLAIN].outcome
            comparison.add(found, name_of(bag), observation, plain, answers[_OWN].outcome)
            if isinstance(plain, Action):
                for each in (of_bag, digest):
                    each.update(np.asarray((*plain.text_tokens, *plain.tokens), np.int64).tobytes())
            on_frame(total.frames + found.frames)
        found.digest = of_bag.hexdigest()
        of_bags[name_of(bag)] = {"files": bag_hashes(bag)} | vars(found)
        total.add(found)
    total.digest = digest.hexdigest()
    strict = settings.lossless
    defaults = values_of(EngineSettings())
    content = {
        "certificate": VERSION,
        **head(),
        "code": _code_hash(),
        "policy": policy.describe() | {"checkpoint": policy.directory.name},
        "strict": strict,
        "instruction": topics.instruction or "",
        "settings": {
            name: value
            for name, value in values_of(settings).items()
            if value != defaults[name] or name == "decode.mode"
        },
        **checkpoint_hashes(policy.directory, settings),
        "tie": comparison.tie,
        "ties_looked_at": comparison.has_margins,
        "bags": of_bags,
        "datasets": [origin(path) for path in dict.fromkeys(bag.parent for bag in bags if as_episode(bag) is not None)],
        "details": comparison.details,
        "not_compared": {name: "; ".join(lost) for name, lost in not_compared.items() if lost},
        "result": vars(total) | {"deviation": comparison.deviation(), "differences": comparison.differences},
    }
    return Certificate(json.loads(json.dumps(content)))


def differences(given: Certificate, again: Certificate) -> tuple[str, ...]:
    """The differences found by another run with the same settings, in sentences."""
    found = []
    for name, what in _COMPARED.items():
        before, now = _exact(given.content[name]), _exact(again.content[name])
        if before != now:
            which = ", ".join(_differing(before, now)) or f"{now}, not {before}"
            found.append(f"{what}: not as in the certificate: {which}")
    return tuple(found)


def _differing(before: Any, now: Any) -> Iterator[str]:
    """The entries that differ between two objects; of an entry that is an object itself, with its own."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return
    for name in {**before, **now}:
        if name not in now:
            yield f"{name} is missing"
        elif name not in before:
            yield f"{name} is new"
        elif before[name] != now[name]:
            inner = ", ".join(_differing(before[name], now[name]))
            yield f"{name} ({inner})" if inner else name


def other_conditions(given: Certificate, again: Certificate) -> tuple[str, ...]:
    """Under which other conditions than the certificate's the run was made, in sentences."""
    found = []
    for name, what in _NAMED.items():
        before, now = given.content.get(name), again.content[name]
        if isinstance(now, dict):
            parts = [key for key in now if not isinstance(before, dict) or before.get(key) != now[key]]
            changed = ", ".join(f"{key} {now[key]}, not {(before or {}).get(key)}" for key in parts)
        else:
            changed = "" if before == now else "other files"
        if changed:
            found.append(f"{what}: not as in the certificate: {changed}")
    return tuple(found)


def _exact(value: Any) -> Any:
    """The value without logit margins, whose last digits depend on the machine."""
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items() if name not in _ROUNDED}
    return [_exact(each) for each in value] if isinstance(value, list) else value


class Comparison:
    """Compares answers one by one; keeps both actions in the robot's units, and the first differences."""

    def __init__(self, policy: Target) -> None:
        self._policy = policy
        self._plain: list[np.ndarray] = []
        self._own: list[np.ndarray] = []
        self.differences: list[dict[str, Any]] = []
        self.details: dict[str, str] = {}  # the first detail of each reason for no action
        self.tie = _TIES[policy.decoder.dtype]
        self.has_margins = policy.causal_prompt and policy.generation == NO_RULES and policy.head is None

    def deviation(self) -> dict[str, float] | None:
        """Deviation in millimetres, degrees and gripper; None if the policy's actions lack such units."""
        try:
            return asdict(deviation(self._plain, self._own, self._policy.codec.names)) if self._plain else None
        except UserError:
            return None

    def add(self, found: Finding, bag: str, observation: Observation, plain: Outcome, own: Outcome) -> None:
        found.frames += 1
        if not isinstance(plain, Action):
            found.unanswered[plain.reason.value] += 1
            self.details.setdefault(plain.reason.value, plain.detail)
            found.gained += isinstance(own, Action)
            return
        if not isinstance(own, Action):
            found.lost[own.reason.value] += 1
            self.details.setdefault(own.reason.value, own.detail)
            return
        found.actions += 1
        tokens, others = ((*each.text_tokens, *each.tokens) for each in (plain, own))
        found.tokens += len(tokens)
        self._plain.append(plain.values)
        self._own.append(own.values)
        margins = _margins(self._policy, observation, tokens) if self.has_margins and tokens else np.empty(0)
        if len(margins):
            found.near_ties += int((margins < self.tie).sum())
            found.closest = min(float(margins.min()), np.inf if found.closest is None else found.closest)
        if tokens == others and np.array_equal(plain.actions, own.actions):
            return
        found.differing += 1
        pairs = enumerate(zip(tokens, others, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), len(tokens))
        margin = float(margins[place]) if place < len(margins) else None
        found.ties += margin is not None and margin < self.tie
        if len(self.differences) < _SHOWN:
            self.differences.append({"bag": bag, "frame": observation.stamp_ns, "place": place, "margin": margin})


@torch.inference_mode()
def _margins(policy: Target, observation: Observation, tokens: Sequence[int]) -> np.ndarray:
    """Margins between the two largest logits, float [tokens], from one forward over prompt and answer."""
    decoder, layout = policy.decoder, policy.prompt_layout(observation)
    answer = torch.tensor(tokens, device=decoder.device)
    prompt = policy.prompt_embeddings(observation, layout.ids)
    inputs = torch.cat((prompt, decoder.embed_tokens(answer[:-1]).to(prompt.dtype)))
    positions = None
    if layout.positions is not None:
        of_root = layout.tree_root_positions(layout.rows, len(tokens) - 1)
        assert of_root is not None
        positions = np.concatenate((layout.positions, of_root + np.arange(len(tokens) - 1)), axis=1)
    cache = new_cache(decoder, slots=1, slot_rows=len(inputs))
    segment = Segment(0, 0, inputs, wanted=len(tokens), positions=positions)
    largest = packed_forward(decoder, [segment], cache).logits.topk(2, dim=1).values
    margins: np.ndarray = (largest[:, 0] - largest[:, 1]).double().cpu().numpy()
    return margins


def _code_hash() -> str:
    """SHA-256 of the sources of this package and of its kernels."""
    digest = hashlib.sha256()
    for package in (specvla_ros, specvla_kernels):
        root = Path(str(package.__file__)).parent
        for path in filter(Path.is_file, sorted(root.rglob("*.py"))):  # not links to removed files
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


MAY_DIFFER_BY_MORE = (
    "A tolerance bounds each drafted token, axis by axis, against the policy's own choice at that point. Later tokens "
    "follow from the accepted ones, so a whole action may differ by more"
)
_HEAD = (
    "bag",
    "images",
    "answered",
    "tokens",
    "different answers",
    "near ties",
    "smallest logit margin",
    "tokens' SHA-256",
)
_DIGITS = 12  # shown of a digest
_FOUND = ("bags", "result", "settings", "not_compared")


def _write_page(path: Path, content: Mapping[str, Any], failures: Sequence[str]) -> None:
    result = content["result"]
    kind = "failed" if failures else "passed" if content["strict"] else ""
    setting = "strict: its answers must be the same" if content["strict"] else "relaxed: its answers may differ"
    text = f"The setting is {setting}. {result['tokens']} tokens were compared in {content['policy']['dtype']}"
    if result["differing"]:
        text += f"; different answers that begin at a near tie: {result['ties']} of {result['differing']}"
    of = f"of {result['actions']} answers differ from plain decoding"
    rows = [_row(name, each) for name, each in (*content["bags"].items(), ("all", result))]
    parts = [page.answer(kind, str(result["differing"]), of, f"{text}.", failures)]
    parts += [page.noticed(f"not compared: {name}: {lost}") for name, lost in content["not_compared"].items()]
    parts += ["<h2>Bags</h2>", page.table(_HEAD, rows)]
    for title, counts in (("plain decoding", result["unanswered"]), ("the setting", result["lost"])):
        if counts:
            parts += [f"<h2>No action by {title}</h2>", page.table(("reason", "images"), page.context_rows(counts))]
    if result["deviation"]:
        values = {name.replace("_", " "): f"{value:.4g}" for name, value in result["deviation"].items()}
        note = "" if content["strict"] else f"<p class=note>{MAY_DIFFER_BY_MORE}.</p>"
        parts += ["<h2>Deviation of the actions</h2>", note, page.table(("", ""), page.context_rows(values))]
    if result["differences"]:
        found = [
            [f"{value:.3g}" if isinstance(value, float) else str(value) for value in each.values()]
            for each in result["differences"]
        ]
        title = f"The first {len(found)} of {result['differing']} different answers"
        parts += [f"<h2>{title}</h2>", page.table(tuple(result["differences"][0]), found)]
    parts += ["<h2>Setting</h2>", page.table(("", ""), page.context_rows(content["settings"]))]
    parts.append(page.provenance({name: value for name, value in content.items() if name not in _FOUND}))
    page.write_page(path, f"Certificate of {content['policy']['checkpoint']}", parts)


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (str(found[each]) for each in ("frames", "actions", "tokens", "differing", "near_ties"))
    return (name, *counts, page.cell(found["closest"], ".3g"), found["digest"][:_DIGITS])
