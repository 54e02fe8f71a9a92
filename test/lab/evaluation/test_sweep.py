# SPDX-License-Identifier: Apache-2.0
"""Several settings on the same episodes, with the shipped policy and the previous action as the only draft."""

import json
from dataclasses import replace

import pytest
from support.gl import needs_gl

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation import compare as sweep_module
from specvla_ros.lab.evaluation.compare import SWEEP_FILE, relaxation_settings, sweep
from specvla_ros.lab.evaluation.simulate import SimulateSettings
from specvla_ros.lab.plans import SimulatePlan
from specvla_ros.speculation.settings import DraftSettings, adjusted


@needs_gl
def test_strict_is_plain_episode_by_episode_and_relaxed_takes_fewer_forwards(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "_TIMED_FRAMES", 6)
    base = SimulateSettings(nano_policy(), time_limit=0.15)
    spec = EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True))
    plan = SimulatePlan(tasks=("lift_red",), episodes=2, films=0)
    seen: list[str] = []
    rows = sweep(base, relaxation_settings(spec, [9]), plan, tmp_path, lambda name, *_: seen.append(name))
    plain, strict, relaxed = rows
    assert [row.setting.name for row in rows] == ["ar", "strict", "r9"]
    assert seen == ["ar"] * 2 + ["strict"] * 2 + ["r9"] * 2
    assert strict.summary.tasks == plain.summary.tasks
    assert (strict.against_first.only_first, strict.against_first.only_second) == (0, 0)
    forwards = [row.summary.decode.forwards_per_action for row in rows]
    assert forwards[0] == 7 and forwards[0] > forwards[1] > forwards[2]
    off = {bins for (_, bins) in relaxed.summary.decode.bins_off}
    assert 0 < max(off) <= 9
    written = json.loads((tmp_path / SWEEP_FILE).read_text())["rows"]
    assert written[2]["tau"] == pytest.approx(relaxed.summary.decode.tau)
    assert written[0]["speed_up"] == 1.0 and written[2]["action_s"] > 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ("ar", "strict", "r9"))
    again = sweep(base, relaxation_settings(spec, [9]), plan, tmp_path, lambda name, *_: seen.append(name))
    assert len(seen) == 6 and again[2].summary.tasks == relaxed.summary.tasks


@needs_gl
def test_episodes_of_an_earlier_plan_in_the_folder_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "_TIMED_FRAMES", 1)
    base = SimulateSettings(nano_policy(), time_limit=0.02)
    spec = EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True))
    more = SimulatePlan(tasks=("lift_red", "push_green"), episodes=2, films=0)
    for plan in (more, replace(more, tasks=("lift_red",)), replace(more, episodes=1)):
        for row in sweep(base, relaxation_settings(spec, [9]), plan, tmp_path):
            assert row.summary.success.n == row.against_first.second.n == len(plan.tasks) * plan.episodes
