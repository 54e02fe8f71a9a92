# SPDX-License-Identifier: Apache-2.0
"""What a certificate and a comparison of settings say of answers that a test makes up: no policy is run."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.engine.outcome import Action, DecodeRecord, Drop, DropReason, StageTimings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation import certificate
from specvla_ros.lab.evaluation.certificate import Certificate, Comparison, Finding, differences, read_certificate
from specvla_ros.lab.evaluation.compare import (
    FrameRun,
    compare,
    relaxation_settings,
    time_settings,
)
from specvla_ros.lab.evaluation.deviation import Deviation, deviation
from specvla_ros.models.generation import NO_RULES
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import DraftSettings, adjusted

IMAGE = np.zeros((2, 2, 3), np.uint8)
SPEC = EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True))


def frame(stamp_ns: int = 1, instruction: str = "lift") -> Observation:
    return Observation(IMAGE, instruction, stamp_ns)


def action(*tokens: int, values: Any = (0.0,) * 7, text: tuple[int, ...] = (), of: Observation | None = None) -> Action:
    record = DecodeRecord("spec", tokens_per_forward=(len(tokens),))
    actions = np.array([values], dtype=np.float64)
    return Action(of or frame(), (), actions, tokens, StageTimings(), record, 0, text_tokens=text)


def drop(reason: DropReason = DropReason.NOT_AN_ACTION) -> Drop:
    return Drop(frame(), reason)


def compared(*pairs: tuple[Any, Any], margins: Any = None, **policy: Any) -> tuple[Finding, Comparison]:
    codec = SimpleNamespace(names=ACTION_NAMES)
    given = dict(causal_prompt=margins is not None, generation=NO_RULES, head=None, codec=codec) | policy
    made = Comparison(SimpleNamespace(decoder=SimpleNamespace(dtype=torch.float32), **given))  # type: ignore[arg-type]
    found = Finding()
    for plain, own in pairs:
        made.add(found, "bag", frame(7), plain, own)
    return found, made


def test_each_picture_is_counted_under_what_the_two_answered() -> None:
    same = action(1, 2, 3)
    found, made = compared(
        (same, action(1, 2, 3)),
        (action(4, text=(8, 9)), action(4, text=(8, 9))),
        (same, action(1, 5, 3)),
        (same, drop(DropReason.NOT_FINITE)),
        (drop(), drop()),
        (drop(), same),
    )
    assert (found.frames, found.actions, found.tokens, found.differing, found.gained) == (6, 3, 9, 1, 1)
    assert found.lost == {"not_finite": 1} and found.unanswered == {"not_an_action": 2}
    assert (found.ties, found.near_ties, found.closest) == (0, 0, None)
    assert made.differences == [{"bag": "bag", "frame": 7, "place": 1, "margin": None}]


def test_an_answer_differs_by_its_tokens_its_text_its_length_or_its_numbers() -> None:
    one = action(1, 2)
    for other, place in (
        (action(2, 2), 0),
        (action(1, 2, 3), 2),
        (action(1), 2),
        (action(1, 2, text=(1,)), 1),
        (action(1, 2, values=(0.0,) * 6 + (1.0,)), 2),
    ):
        found, made = compared((one, other))
        assert found.differing == 1 and made.differences[0]["place"] == place
    found, made = compared(*[(one, action(2, 2))] * 25)
    assert found.differing == 25 and len(made.differences) == 20


def test_a_first_difference_at_a_near_tie_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "_margins", lambda *_: np.array([2e-4, 1e-4, 0.5e-4]))
    one = action(1, 2, 3)
    found, made = compared(
        (one, one), (one, action(1, 2, 9)), (one, action(9, 2, 3)), (one, action(1, 9, 3)), margins=1
    )
    assert made.tie == 1e-4 and made.has_margins
    assert (found.near_ties, found.closest, found.differing, found.ties) == (4, 0.5e-4, 3, 1)
    assert [each["margin"] for each in made.differences] == [0.5e-4, 2e-4, 1e-4]
    monkeypatch.setattr(certificate, "_margins", lambda *_: np.array([3.0, 9.0]))
    found, _ = compared((action(1, 2), action(1, 2, 3)), margins=1)
    assert (found.closest, found.differing, found.ties) == (3.0, 1, 0)
    for other in (dict(causal_prompt=False), dict(generation="others"), dict(head="one")):
        assert not compared((one, one), margins=1, **other)[1].has_margins


def test_a_tie_is_a_few_roundings_and_how_far_actions_are_apart_is_told() -> None:
    ties = certificate._TIES
    for half in (torch.bfloat16, torch.float16):
        assert ties[half] == 8 * torch.finfo(half).eps
    assert (ties[torch.float32], ties[torch.float64]) == (1e-4, 1e-10)
    _, made = compared((action(1), action(1, values=(0.003, 0.004, *[0.0] * 5))), (action(1), drop()))
    found = made.deviation()
    assert found is not None and found["largest_mm"] == pytest.approx(5.0) and found["lost_share"] == 0
    assert compared((drop(), drop()))[1].deviation() is None
    assert compared((action(1, values=(1.0,)), action(1, values=(1.0,))))[1].deviation() is None, "no such units"


def test_findings_are_added_up() -> None:
    names = ("frames", "actions", "tokens", "gained", "differing", "ties", "near_ties")
    first = Finding(lost=Counter(a=1), closest=0.5)
    second = Finding(lost=Counter(a=2, b=1), unanswered=Counter(c=4))
    for number, name in enumerate(names, 1):
        setattr(first, name, number)
        setattr(second, name, 10)
    first.add(second)
    assert [getattr(first, name) for name in names] == [11, 12, 13, 14, 15, 16, 17]
    assert first.lost == {"a": 3, "b": 1} and first.unanswered == {"c": 4} and first.closest == 0.5
    first.add(Finding(closest=0.25))
    assert first.closest == 0.25
    second.add(Finding())
    assert second.closest is None


def content(*, strict: bool = True, **result: Any) -> dict[str, Any]:
    found = {"actions": 9, "lost": {}, "gained": 0, "differing": 0, "ties": 0, "closest": 0.5, "digest": "ab"}
    others = dict(instruction="", settings={"mode": "spec"}, policy_files={"a": "1"}, draft_files={}, bags={"b": {}})
    return {"certificate": 2, "strict": strict, "result": found | result, **others}


def test_a_setting_fails_by_answers_of_one_alone_and_strictly_by_others() -> None:
    assert Certificate(content()).failures == Certificate(content(differing=2, ties=2)).failures == ()
    assert Certificate(content(differing=2, strict=False)).failures == ()
    assert Certificate(content(lost={"stale": 2, "not_finite": 1}, gained=2, strict=False)).failures == (
        "5 images were answered by only one of the two",
    )
    assert Certificate(content(differing=3, ties=2)).failures == ("1 of 9 strict answers differ from plain decoding",)
    assert Certificate(content(actions=0)).failures == ("the policy answered no image with an action",)


def test_another_run_must_find_all_but_the_last_places_of_the_logits() -> None:
    given = Certificate(content())
    rounded = content(closest=0.4, ties=1, near_ties=3) | {"bags": {"b": {"closest": 1.0, "near_ties": 2}}}
    assert differences(given, Certificate(rounded)) == ()
    for name, other, said in (
        ("strict", False, "the acceptance rule: not as in the certificate: False, not True"),
        ("instruction", "lift", "the instruction: not as in the certificate: lift, not "),
        ("settings", {}, "the settings: not as in the certificate: mode is missing"),
        ("policy_files", {}, "the policy's files: not as in the certificate: a is missing"),
        ("draft_files", {"h": "1"}, "the draft head's files: not as in the certificate: h is new"),
        ("bags", {"c": {}}, "the bags or their results: not as in the certificate: b is missing, c is new"),
        ("bags", {"b": {"actions": 1}}, "the bags or their results: not as in the certificate: b (actions is new)"),
        ("result", content(digest="cd")["result"], "the result: not as in the certificate: digest"),
    ):
        assert differences(given, Certificate(content() | {name: other})) == (said,)
    listed = content() | {"bags": [{"margin": 1.0, "place": 1}]}
    for margin, place, same in ((2.0, 1, True), (1.0, 2, False)):
        again = content() | {"bags": [{"margin": margin, "place": place}]}
        assert (differences(Certificate(listed), Certificate(again)) == ()) == same


@pytest.mark.parametrize("text", ["[]", "{}", '{"certificate": 2}', '{"certificate": 1, "strict": true}', None])
def test_what_is_no_certificate_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        UserError, match="does not exist" if text is None else r"not a certificate of this version \(2\)"
    ):
        read_certificate(path)


def test_a_certificate_of_this_version_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, whole = tmp_path / "certificate.json", content()
    path.write_text(json.dumps(whole))
    assert read_certificate(path) == Certificate(whole)
    for other in (whole | {"certificate": 1}, {name: each for name, each in whole.items() if name != "bags"}):
        path.write_text(json.dumps(other))
        with pytest.raises(UserError, match=r"not a certificate of this version \(2\)"):
            read_certificate(path)


class Turns:
    """An engine with one or two frames in flight, each answered two ticks after it was begun; and who was at work."""

    def __init__(self, name: str, log: list[str], slots: int = 1) -> None:
        self._name, self._log, self._slots = name, log, slots
        self._flight: list[list[Any]] = []
        self.asked: list[Observation] = []
        self.last_work = None

    @property
    def has_room(self) -> bool:
        return len(self._flight) < self._slots

    @property
    def busy(self) -> bool:
        return bool(self._flight)

    def submit(self, observation: Observation) -> list[Any]:
        assert self.has_room
        self.asked.append(observation)
        if observation.instruction == "":
            return [Drop(observation, DropReason.NO_INSTRUCTION)]
        self._flight.append([2, observation])
        return []

    def tick(self) -> list[Any]:
        self._log.append(self._name)
        for each in self._flight:
            each[0] -= 1
        done = [each for each in self._flight if not each[0]]
        self._flight = [each for each in self._flight if each[0]]
        return [action(1, of=observation) for _, observation in done]


@pytest.mark.parametrize(("in_flight", "order"), [(False, "aabbaabbaabb"), (True, "abaabbaabbab")])
def test_settings_take_turns_frame_after_frame(in_flight: bool, order: str) -> None:
    log: list[str] = []
    engines: Any = {name: Turns(name, log) for name in "ab"}
    frames = [frame(50, "lift"), frame(40, "lift"), frame(30, "push")]
    found = list(compare(engines, frames, first_epoch=5, in_flight=in_flight, pace=lambda work, seconds: 1.0))
    assert "".join(log) == order
    assert [(each.stamp_ns, each.epoch, each.instruction) for each, _ in found] == [
        (1, 5, "lift"),
        (2, 5, "lift"),
        (3, 6, "push"),
    ]
    for seen, answers in found:
        assert [each.outcome.observation for each in answers.values()] == [seen, seen]
        assert [each.seconds for each in answers.values()] == [2.0, 2.0]


def test_frames_are_handed_out_when_all_have_answered_them() -> None:
    engines: Any = {"a": Turns("a", []), "b": Turns("b", [], slots=2)}
    found = list(compare(engines, [frame(1), frame(2, ""), frame(3)], in_flight=True, pace=lambda *_: 1.0))
    assert [seen.stamp_ns for seen, _ in found] == [1, 2, 3] and [seen.epoch for seen, _ in found] == [1, 2, 3]
    assert all(isinstance(each.outcome, Drop) for each in found[1][1].values())


def test_the_mean_time_leaves_the_slowest_twentieth_out() -> None:
    assert FrameRun(seconds=[1.0] * 19 + [99.0]).action_s == 1.0
    assert FrameRun(seconds=[99.0, *[1.0] * 18]).action_s == 1.0 and FrameRun(seconds=[4.0]).action_s == 4.0
    assert FrameRun(seconds=[*[2.0] * 38, 99.0, 99.0]).action_s == 2.0 and FrameRun(seconds=[1.0, 3.0]).action_s == 1.0
    run = FrameRun()
    run.keep(action(1, values=range(7)), 7)
    run.keep(drop(), 7)
    assert run.values[0].tolist() == [*range(7)] and run.values[1].shape == (7,) and np.isnan(run.values[1]).all()
    assert run.tally.actions == 1
    with pytest.raises(UserError, match="no frames to try the settings on"):
        time_settings(None, {}, [])  # type: ignore[arg-type]


def test_how_far_actions_are_apart_where_both_answered() -> None:
    plain, other = np.zeros((3, 7)), np.zeros((3, 7))
    other[0, :3], other[1, 3:6] = (0.001, 0.002, 0.002), np.radians((1.0, 2.0, 2.0))
    plain[1, 6], other[1, 6], plain[2, 0] = 0.6, 0.5, np.nan
    found = deviation(list(plain), list(other))
    assert (found.largest_mm, found.largest_deg) == pytest.approx((3.0, 3.0))
    assert (found.gripper_share, found.lost_share) == pytest.approx((0.5, 1 / 3))
    assert deviation([np.full(7, np.nan)], [np.zeros(7)]) == Deviation(lost_share=1.0)


def test_a_sweep_is_plain_then_strict_then_each_tolerance() -> None:
    loose = replace(SPEC, acceptance=replace(SPEC.acceptance, rule="fly"))
    plain, strict, *relaxed = relaxation_settings(loose, [3, 9])
    assert (plain.name, plain.engine.mode, strict.name, strict.engine.acceptance.rule) == (
        "ar",
        "ar",
        "strict",
        "strict",
    )
    assert strict.engine.draft == SPEC.draft and strict.engine.mode == "spec"
    assert [(each.name, each.engine.acceptance.rule, each.engine.acceptance.bins) for each in relaxed] == [
        ("r3", "bin_distance", (3,)),
        ("r9", "bin_distance", (9,)),
    ]
