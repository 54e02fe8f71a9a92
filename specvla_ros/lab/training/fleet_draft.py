# SPDX-License-Identifier: Apache-2.0
"""`specvla fleet-draft`: trains a draft head on bags, compares it with the one in use, and promotes or refuses it."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import DEFAULT_TOPICS, TopicChoice
from specvla_ros.lab.evaluation.calibrate import PROFILE_FILE, calibrate
from specvla_ros.lab.evaluation.certificate import certify
from specvla_ros.lab.evaluation.compare import FrameRun, time_settings
from specvla_ros.lab.evaluation.frame_sources import frames_in, shuffled
from specvla_ros.lab.evaluation.page import answer, provenance, table, write_page
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory, bag_hashes, checkpoint_hashes, head
from specvla_ros.lab.evaluation.simulate import SimulateSettings
from specvla_ros.lab.plans import THIS_PROCESS, FleetPlan, Spread
from specvla_ros.lab.training.train_draft import DraftValidation, check_frames, collect_features, train_draft
from specvla_ros.lab.training.trainer import Progress
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.settings import ModelSettings
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings

FLEET_FILE, CERTIFICATE_FILE, HEAD, CALIBRATION = "fleet.json", "certificate.json", "head", "calibration"
RUNS_HEAD = ("held-out frames", "forwards per action", "τ", "ms")
_PLAIN, _USED, _NEW = "plain decoding", "in use", "new"


@dataclass(frozen=True)
class FleetDraft:
    """The verdict on a new head."""

    refusals: tuple[str, ...]  # reasons for refusing it, as sentences; empty if it is accepted
    runs: Mapping[str, FrameRun]  # held-out frames: plain decoding, the head in use if there is one, the new head
    promoted: Path | None  # directory that the new head was copied to; None if it was not
    kept: Path | None  # backup of the head that it replaced; None if there was none
    calibration: str  # the calibrated setting, or why there is none
    context: Mapping[str, Any]

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows, with the columns of RUNS_HEAD."""
        rows: list[tuple[str, ...]] = []
        for name, run in self.runs.items():
            tau = f"{run.tally.tau:.2f}" if run.tally.tau else ""
            rows.append((name, f"{run.tally.forwards_per_action:.2f}", tau, f"{run.action_s * 1e3:.1f}"))
        return rows

    def as_json(self) -> dict[str, Any]:
        tallied = ("actions", "forwards_per_action", "tau")
        runs = {
            name: {key: getattr(run.tally, key) for key in tallied} | {"action_s": run.action_s}
            for name, run in self.runs.items()
        }
        return {
            "refusals": self.refusals,
            "runs": runs,
            "promoted": str(self.promoted) if self.promoted else None,
            "kept": str(self.kept) if self.kept else None,
            "calibration": self.calibration,
            **self.context,
        }


def fleet_draft(
    policy: OpenVLATarget,
    model: ModelSettings,
    engine: EngineSettings,
    data: Sequence[Path],
    out: Path,
    plan: FleetPlan,
    *,
    promote: Path | None = None,
    topics: TopicChoice = DEFAULT_TOPICS,
    spread: Spread = THIS_PROCESS,
    on_frame: Callable[[int], None] = lambda done: None,
    on_training: Callable[[Progress[DraftValidation]], None] = lambda progress: None,
) -> FleetDraft:
    """Trains a head on some of the bags, judges it on the others, and accepts or refuses it.

    It is accepted if it saves forwards and if strict answers with it equal those of plain decoding, token for token. An
    interrupted run resumes its training. Raises UserError if there are too few bags or frames, or if `out` holds
    another run.

    Args:
        engine: settings with the head in use, and the other drafters to combine with either head.
        promote: directory that an accepted head is copied to, replacing another; None: it only stays in `out`.
        spread: workers for the training data, as for `run_jobs`.
    """
    taught, judged = _split(find_bags(data).bags, plan)
    check_frames(taught, plan.frames, topics)
    directory = open_output(out)
    bags = {"trained on": _hashes(taught), "judged by": _hashes(judged)}
    directory.begin({"plan": _plan_json(plan), "bags": bags} | checkpoint_hashes(policy.directory, engine))
    new = directory.path / HEAD
    if not (new / "training.json").exists():
        shards = collect_features(
            policy,
            taught,
            new,
            seed=plan.training.seed,
            frames=plan.frames,
            max_text=engine.max_reasoning_tokens,
            max_bytes=plan.max_bytes,
            topics=topics,
            model=model,
            spread=spread,
            on_frame=on_frame,
        )
        train_draft(policy, shards, new, plan.training, on_training)
    strict = replace(engine.without_prefix(), mode="spec", acceptance=AcceptanceSettings())
    with_new = replace(strict, draft=replace(strict.draft, head=str(new.resolve())))
    certificate = certify(policy, with_new, judged, topics)
    certificate.write(directory.path / CERTIFICATE_FILE)
    frames = list(islice(frames_in(policy, judged, topics), plan.judged_frames))
    settings = {_PLAIN: replace(strict, mode="ar"), _USED: strict, _NEW: with_new}
    used = strict.draft.head_directory(policy.directory)
    if strict.draft.head == NO_HEAD or used is None or not used.exists():
        del settings[_USED]
    runs = time_settings(policy, settings, frames, rounds=1)
    refusals = (*certificate.failures, *_too_slow(runs, plan))
    chosen, promoted = "not calibrated: the head is refused", promote if not refusals else None
    if not refusals:
        base = SimulateSettings(policy=policy.directory, engine=with_new, model=model)
        chosen = _calibrated(policy, base, frames, plan, directory.path)
    kept = _put(new, promoted) if promoted is not None else None
    context = {"frames": len(frames), "bags": bags, "policy": policy.describe(), "plan": _plan_json(plan), **head()}
    found = FleetDraft(refusals, runs, promoted, kept, chosen, context)
    with directory.reporting_errors():
        directory.write_json(FLEET_FILE, found.as_json())
        _write_report(directory.path / REPORT_FILE, found)
    return found


def open_output(out: Path) -> RunDirectory:
    """The directory of the results; raises UserError if it holds those of an earlier run or of another command."""
    directory = RunDirectory(out, "fleet-draft")
    directory.check()
    if directory.read_json(FLEET_FILE) is not None:
        raise UserError(f"{out} holds the verdict of an earlier run; give another directory with --out")
    return directory


def _split(bags: Sequence[Path], plan: FleetPlan) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The bags to train on and the bags to judge by, which never share a recording."""
    if len(bags) < 2:
        raise UserError("one bag cannot both train a head and judge it: give at least two")
    order = shuffled(bags, plan.training.seed)
    held_out = min(len(bags) - 1, max(1, round(plan.held_out * len(bags))))
    return tuple(order[held_out:]), tuple(order[:held_out])


def _hashes(bags: Sequence[Path]) -> dict[str, dict[str, str]]:
    return {str(bag): bag_hashes(bag) for bag in sorted(bags)}


def _plan_json(plan: FleetPlan) -> dict[str, Any]:
    tolerances = [str(each) for each in plan.calibrate.tolerances] if plan.calibrate else []
    return asdict(replace(plan, calibrate=None)) | {"tolerances": tolerances}


def _too_slow(runs: Mapping[str, FrameRun], plan: FleetPlan) -> list[str]:
    """Reasons why the new head saves too little against the one in use or, without one, plain decoding."""
    rival = _USED if _USED in runs else _PLAIN
    before, after = (runs[name].tally.forwards_per_action for name in (rival, _NEW))
    if after <= before * (1 - plan.min_gain):
        return []
    change, asked = after / before - 1 if before else 0.0, f"{0 - plan.min_gain:+.1%} or less is required"
    return [f"it needs {after:.2f} forwards per action, {rival} {before:.2f}: {change:+.1%}, but {asked}"]


def _calibrated(
    policy: OpenVLATarget, base: SimulateSettings, frames: Sequence[Any], plan: FleetPlan, out: Path
) -> str:
    if plan.calibrate is None:
        return "not calibrated: not requested"
    try:
        found = calibrate(policy, base, frames, plan.calibrate, out / CALIBRATION)
    except UserError as error:  # e.g. a policy whose actions are not in millimetres and degrees
        return f"not calibrated: {error}"
    return f"{found.chosen.trial.name}, see {CALIBRATION}/{PROFILE_FILE}"


def _put(new: Path, place: Path) -> Path | None:
    """Copies a head to a directory; returns the backup of the head that was there."""
    place = place.expanduser()
    waiting = place.with_name(f".{place.name}.new")
    kept = place.with_name(f"{place.name}-before-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(waiting)
        shutil.copytree(new, waiting)
        replaced = place.exists()
        if replaced:
            place.rename(kept)
        waiting.rename(place)
    except OSError as error:
        raise UserError(f"the head cannot be copied to {place} ({error}); it is in {new}") from None
    return kept if replaced else None


def _write_report(path: Path, found: FleetDraft) -> None:
    where = f"; it is in {found.promoted}" if found.promoted else ""
    number, plain = (f"{found.runs[name].tally.forwards_per_action:.2f}" for name in (_NEW, _PLAIN))
    of = f"forwards per action; plain decoding needs {plain}"
    taken = answer("passed", number, of, f"The new head is accepted{where}.")
    if found.refusals:
        taken = answer("failed", number, of, "The new head is refused:", found.refusals)
    how = f"{found.context['frames']} frames, the settings taking turns, strict acceptance"
    parts = [
        f"{taken}<h2>On bags that it was not trained on</h2>{table(RUNS_HEAD, found.rows())}",
        f"<p class=note>{how}. Calibration: {escape(found.calibration)}.</p>",
        provenance(found.context),
    ]
    write_page(path, f"A draft head for {Path(found.context['policy']['checkpoint']).name}", parts)
