# SPDX-License-Identifier: Apache-2.0
"""`specvla replay` of many bags: one report, and one set of limits over all frames."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from specvla_ros.control.convention import ACTION_NAMES, ConventionSettings
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.lerobot.dataset import as_episode, name_of
from specvla_ros.lab.bags.reader import BAG_SUFFIXES, open_bag
from specvla_ros.lab.evaluation.replay import (
    BAG_DIRECTORY,
    FRAMES_FILE,
    INTERRUPTED,
    check_senses,
    replay,
    report_if_possible,
)
from specvla_ros.lab.evaluation.replay_page import write_bags_report
from specvla_ros.lab.evaluation.replay_summary import BagRow, BagsSummary, FrameRecord, ReplayColumns, summarise
from specvla_ros.lab.evaluation.rerun_recording import RerunSettings
from specvla_ros.lab.evaluation.run_directory import (
    REPORT_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    RunDirectory,
    checkpoint_hashes,
    file_hashes,
    head,
    read_lines,
)
from specvla_ros.lab.jobs.hosted_engine import EngineHost, HostedEngine
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.jobs.workers import Host, share
from specvla_ros.lab.plans import THIS_PROCESS, EngineSpread, Thresholds
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.settings import ModelSettings

_COMMAND = "replay"


@dataclass(frozen=True)
class ReplaySettings:
    """The settings that decide a bag's actions."""

    policy: Path  # checkpoint directory
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    action: ConventionSettings = field(default_factory=ConventionSettings)
    topics: TopicChoice = field(default_factory=TopicChoice)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "policy": str(self.policy.resolve())}


@dataclass(frozen=True)
class BagJob:
    """One bag to replay."""

    settings: ReplaySettings
    bag: Path
    out: Path  # directory of its results
    rerun: str = ""  # the Rerun file to write; empty: none


def named_bags(bags: Sequence[Path]) -> dict[str, Path]:
    """Bags by name, sorted; raises UserError if two have the same name."""
    by_name = {folder_name(path): path for path in sorted(bags, key=folder_name)}
    if len(by_name) < len(bags):
        twice = next(name for name, count in Counter(map(folder_name, bags)).items() if count > 1)
        raise UserError(
            f"two bags are called {twice}, and each bag's results go to a folder of its name: replay them separately, "
            "each with its own --out"
        )
    return by_name


def folder_name(bag: Path) -> str:
    """The name of the folder that a bag's results go to."""
    bag = bag.resolve()
    if as_episode(bag) is not None:
        return name_of(bag)
    return bag.stem if bag.suffix in BAG_SUFFIXES else bag.name


def replay_bags(
    settings: ReplaySettings,
    bags: Mapping[str, Path],
    out_dir: str | Path,
    *,
    left_out: Sequence[str] = (),
    thresholds: Thresholds | None = None,
    rerun: str = "",
    spread: EngineSpread = THIS_PROCESS,
    on_bag: Callable[[str, int, int], None] = lambda name, done, wanted: None,
) -> BagsSummary:
    """Replays each bag into a folder of its name and writes summary.json and report.html for all of them.

    A repeated call with the same settings replays missing and interrupted bags. A bag that cannot be read, or whose
    worker dies repeatedly, becomes a row that fails the replay; the other bags continue. Raises UserError if the policy
    or a setting is wrong for all bags.

    Args:
        bags: by the name of their folder.
        left_out: other files found, for the summary.
        thresholds: limits over the frames of all bags together.
        rerun: name of the Rerun file in each bag's folder; empty: none.
        on_bag: gets the name of a finished bag, the number of finished bags and the total.
    """
    directory = RunDirectory(out_dir, _COMMAND)
    hashes = checkpoint_hashes(settings.policy, settings.engine)
    resumed = directory.begin(settings.as_json() | hashes)
    jobs: list[BagJob] = []
    why: dict[str, str] = {}
    others: set[str] = set()  # bags whose folder is not known to hold their replay
    for name, bag in bags.items():
        out = directory.path / name
        try:
            if not _is_replayed(bag, out, hashes, resumed=resumed):
                jobs.append(BagJob(settings, bag, out, str(out / rerun) if rerun else ""))
                why[name] = "not replayed: the run ended first"
        except UserError as error:
            why[name] = str(error)
            others.add(name)
    results = run_jobs(
        replay_bag,
        jobs,
        spread,
        gpu=settings.model.device != "cpu",
        shared=share(partial(host_engine, settings), spread.per_engine),
        name=lambda job: job.out.name,
        lost=lambda _, why: why,
    )
    summarised = partial(_summarise, settings, directory, bags, why, others, left_out, thresholds or Thresholds())
    done = len(bags) - len(jobs)
    try:
        for job, reason in results:
            why[job.out.name] = reason
            done += 1
            on_bag(job.out.name, done, len(bags))
            if reason.startswith(INTERRUPTED):
                break
    except BaseException:
        with suppress(OSError):  # report the first error
            if resumed or any((directory.path / name).exists() for name in bags):
                summarised()
            else:  # an error common to all bags leaves no files behind
                (directory.path / SETTINGS_FILE).unlink()
                directory.path.rmdir()
        raise
    with directory.reporting_errors("; finished bags are kept, and the same command resumes"):
        return summarised()


def replay_bag(job: BagJob, host: Host | None = None) -> str:
    """Replays one bag; returns the reason if incomplete, else an empty string. Keeps the engine for the next bag."""
    settings, topics = job.settings, job.settings.topics
    engine = _engine(settings.policy, settings.model, settings.engine, topics.instruction, host)
    # Errors common to all bags are raised once.
    check_senses(engine.target, topics.cameras, topics.state_topic)
    target = engine.target
    settings.action.convention(target.unnorm_key, target.codec.dt_s, target.codec.names)
    try:
        summary = replay(
            engine,
            job.bag,
            job.out,
            topics=topics,
            action=settings.action,
            shown=RerunSettings(job.rerun) if job.rerun else None,
            progress=False,
        )
    except UserError as error:
        return str(error)
    return summary.incomplete


def host_engine(settings: ReplaySettings, workers: int) -> EngineHost:
    """Creates the engine that several workers share."""
    return EngineHost(load_target(settings.policy, **vars(settings.model)), settings.engine, workers)


@lru_cache(maxsize=1)
def _engine(
    directory: Path, model: ModelSettings, settings: EngineSettings, instruction: str | None, host: Host | None
) -> Engine | HostedEngine:
    engine = HostedEngine(host) if host is not None else Engine(load_target(directory, **vars(model)), settings)
    if instruction is not None:
        engine.check_instruction(instruction)
    if isinstance(engine, Engine):
        engine.warm_up()
    return engine


def _is_replayed(bag: Path, out: Path, hashes: Mapping[str, Any], *, resumed: bool) -> bool:
    """True if the folder holds this bag's complete replay; raises UserError if it holds something else.

    `resumed`: the folder lies in a replay of many bags with the same settings.
    """
    with open_bag(bag) as opened:
        files = file_hashes(opened.files)
    directory = RunDirectory(out, _COMMAND)
    directory.check()
    summary = directory.read_json(SUMMARY_FILE)
    if summary is None or summary.get("incomplete"):
        return False
    found = directory.read_json(SETTINGS_FILE)
    if found.get("bag", {}).get("sha256") != files or any(found.get(name) != hashes[name] for name in hashes):
        raise UserError(f"{out} holds the replay of another bag or policy; remove it, or give another --out")
    if not resumed:  # it may have any settings
        raise UserError(f"{out} holds a replay that was made on its own; remove it, or give another --out")
    return True


def _summarise(
    settings: ReplaySettings,
    directory: RunDirectory,
    bags: Mapping[str, Path],
    why: Mapping[str, str],
    others: Set[str],
    left_out: Sequence[str],
    thresholds: Thresholds,
) -> BagsSummary:
    """Writes summary and report from the results in the bags' folders."""
    rows: list[BagRow] = []
    together: ReplayColumns | None = None
    context: dict[str, Any] = {"settings": settings.as_json(), "policy": {"checkpoint": str(settings.policy)}, **head()}
    in_bags = 0
    for name, bag in bags.items():
        folder = RunDirectory(directory.path / name, _COMMAND)
        found = folder.read_json(SUMMARY_FILE) if name not in others else None
        if found is None:
            rows.append(BagRow(name, str(bag), why.get(name, "")))
            continue
        names = tuple(found["names"])
        together = together or ReplayColumns(names, 0)
        columns = ReplayColumns(names, 0)
        for record in read_lines(directory.path / name / FRAMES_FILE, lambda line: FrameRecord(**line)):
            columns.add(record)
            together.add(record)
        in_bags += found["frames_in_bag"]
        of_bag = {key: found[key] for key in ("bag", "policy", "hardware")}
        of_bag["refused_states"] = found.get("refused_states")  # None in a result of an earlier version
        context["policy"] = found["policy"]
        incomplete = why.get(name) or found["incomplete"]
        alone = summarise(columns, found["frames_in_bag"], Thresholds(), incomplete, of_bag)
        rows.append(BagRow(name, str(bag), incomplete, alone))
    refused = [f"{row.name}: {told}" for row in rows if row.summary and (told := row.summary.context["refused_states"])]
    if refused:
        context["refused_states"] = f"{len(refused)} of {len(bags)} bags have broken states, such as {refused[0]}"
    total = summarise(together or ReplayColumns((), 0), in_bags, thresholds, "", context)
    summary = BagsSummary(tuple(rows), total, tuple(left_out))
    with report_if_possible():
        write_bags_report(directory.path / REPORT_FILE, summary)
    directory.write_json(SUMMARY_FILE, summary.as_json())
    return summary


def read_frames(out: Path) -> dict[tuple[str, int, int], FrameRecord]:
    """The frames of a replay of one or many bags, by the bag's content, index and time; empty if it is not a replay."""
    found = {}
    for path in (out / FRAMES_FILE, *sorted(out.glob(f"*/{FRAMES_FILE}"))):
        settings = RunDirectory(path.parent, _COMMAND).read_json(SETTINGS_FILE) or {}
        files = settings.get("bag", {}).get("sha256")
        bag = json.dumps(files, sort_keys=True) if files else path.parent.name
        for record in read_lines(path, lambda line: FrameRecord(**line)):
            found[bag, record.frame, record.time_ns] = record
    return found


def action_names(out: Path) -> tuple[str, ...]:
    """The names of an action's values in a replay's summary; those of a tool's action if it has none."""
    for folder in (out, *sorted(path.parent for path in out.glob(f"*/{SUMMARY_FILE}"))):
        if names := (RunDirectory(folder, _COMMAND).read_json(SUMMARY_FILE) or {}).get("names"):
            return tuple(names)
    return ACTION_NAMES


def answer_bags(out: Path, bags: Sequence[Path]) -> dict[Path, Path]:
    """The bags of actions that a replay of these bags wrote, by the replayed bag; UserError if one is missing."""
    if (out / BAG_DIRECTORY).is_dir() and len(bags) == 1:
        return {bags[0]: out / BAG_DIRECTORY}
    found = {bag: out / name / BAG_DIRECTORY for name, bag in named_bags(bags).items()}
    for bag, actions in found.items():
        if not actions.is_dir():
            raise UserError(f"{out} is not a replay of bag {bag}: it lacks {actions}")
    return found
