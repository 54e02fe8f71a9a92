"""`specvla simulate`: a policy acts in simulated worlds, and is judged by what happens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from specvla_ros.drafting.drafter import DRAFT_FOLDER
from specvla_ros.errors import UserError
from specvla_ros.evaluation.provenance import file_hashes, hardware, software
from specvla_ros.evaluation.simulate_episode import TABLE, EpisodeJob, SimulateSettings, run_job
from specvla_ros.evaluation.simulate_report import write_simulate_report
from specvla_ros.evaluation.simulate_summary import SimulateSummary, summarise_episodes
from specvla_ros.models.config import read_config
from specvla_ros.simulation.device_pace import read_device
from specvla_ros.simulation.episode_pool import run_episodes
from specvla_ros.simulation.rollout import EpisodeResult

EPISODES_FILE, SETTINGS_FILE, SUMMARY_FILE, REPORT_FILE = (
    "episodes.jsonl",
    "settings.json",
    "summary.json",
    "report.html",
)
FILMS = "films"


@dataclass(frozen=True)
class SimulatePlan:
    """Which episodes to run, and how.

    Args:
        tasks: names; none: all of the world.
        episodes: per task.
        first_seed: of the starts; the same seeds make two settings comparable pair by pair.
        films: episodes per task that are filmed.
        workers: processes; 0: this one.
        ray: on a Ray cluster.
    """

    tasks: tuple[str, ...] = ()
    episodes: int = 20
    first_seed: int = 0
    films: int = 1
    workers: int = 0
    ray: bool = False


def simulate(
    settings: SimulateSettings,
    plan: SimulatePlan,
    out: Path,
    on_episode: Callable[[EpisodeResult, int, int], None] | None = None,
) -> SimulateSummary:
    """Runs episodes and writes episodes.jsonl, summary.json, report.html and films.

    Called again with the same settings it runs what is missing: each episode is written when it ends.

    Args:
        settings: what to simulate.
        plan: which episodes.
        out: directory of the results.
        on_episode: called with each new episode, the episodes finished and those wanted.

    Raises:
        UserError: something given is wrong, or the disk is full; finished episodes are kept.
    """
    read_config(settings.policy)
    if settings.emulate:
        read_device(settings.emulate)
    tasks = tasks_of(settings.world, plan.tasks)
    done = _begin(settings, out)
    wanted = [(task, plan.first_seed + i) for i in range(plan.episodes) for task in tasks]
    jobs = [
        EpisodeJob(settings, task, seed, _film(out, task, seed) if seed - plan.first_seed < plan.films else None)
        for task, seed in wanted
        if (task, seed) not in done
    ]
    try:
        with (out / EPISODES_FILE).open("a", encoding="utf-8") as lines:
            for _, result in run_episodes(run_job, jobs, workers=plan.workers, ray=plan.ray):
                lines.write(json.dumps(asdict(result), allow_nan=False) + "\n")
                lines.flush()
                done[result.task, result.seed] = result
                if on_episode is not None:
                    on_episode(result, sum(key in done for key in wanted), len(wanted))
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}; the episodes so far are kept, and the same command goes on"
        ) from None
    finally:
        summary = summarise_episodes([done[key] for key in wanted if key in done], context=_context(settings, plan))
        _write(out, summary)
    return summary


def read_episodes(out: Path) -> dict[tuple[str, int], EpisodeResult]:
    """The finished episodes of a results directory, by task and seed.

    A last line that is cut off, as a killed process leaves it, is ignored: that episode is run again.

    Raises:
        UserError: a damaged line elsewhere.
    """
    path = out / EPISODES_FILE
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    results: dict[tuple[str, int], EpisodeResult] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            raw = json.loads(line)
            result = EpisodeResult(**raw | {"latency_s": tuple(raw["latency_s"])})
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is damaged ({error}); remove the line or the directory") from None
        results[result.task, result.seed] = result
    return results


def _begin(settings: SimulateSettings, out: Path) -> dict[tuple[str, int], EpisodeResult]:
    path = out / SETTINGS_FILE
    draft = settings.engine.draft.head
    head = Path(draft).expanduser() if draft else settings.policy / DRAFT_FOLDER  # `none` is no folder: no files
    described = settings.as_json() | {
        "policy_files": file_hashes(_files(settings.policy)),
        "draft_files": file_hashes(_files(head)) if settings.engine.mode != "ar" else {},
    }
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != described:
            raise UserError(f"{out} holds results of other settings (see {path}); choose another --out")
        done = read_episodes(out)
        # Written anew, so that a cut-off line does not spoil the next one.
        lines = [json.dumps(asdict(result), allow_nan=False) + "\n" for result in done.values()]
        (out / EPISODES_FILE).write_text("".join(lines), encoding="utf-8")
        return done
    try:
        (out / FILMS).mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    return {}


def _files(folder: Path) -> list[Path]:
    """What decides the tokens: weights and settings."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in files if path.suffix in (".json", ".safetensors")]


def tasks_of(world: str, names: Sequence[str]) -> list[str]:
    """The tasks of a world: those named, or all.

    Raises:
        UserError: a task that the world has not, or LIBERO is not installed.
    """
    if world == TABLE:
        from specvla_ros.simulation.tasks import choose_tasks

        return [task.name for task in choose_tasks(list(names))]
    from specvla_ros.simulation.libero import suite_tasks
    from specvla_ros.simulation.libero_install import require_libero

    known = suite_tasks(world)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"there is no task '{unknown[0]}'; the tasks of {world} are: {', '.join(known)}")
    require_libero()
    return list(names) or list(known)


def _film(out: Path, task: str, seed: int) -> Path:
    return out / FILMS / f"{task.replace('/', '_')}-{seed}.mp4"


def _context(settings: SimulateSettings, plan: SimulatePlan) -> dict[str, object]:
    emulated = asdict(read_device(settings.emulate)) if settings.emulate else None
    return {
        "settings": settings.as_json(),
        "plan": asdict(plan),
        "emulation": emulated,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": software(),
        "hardware": hardware(),
    }


def _write(out: Path, summary: SimulateSummary) -> None:
    text = json.dumps(summary.as_json(), indent=2, allow_nan=False)
    (out / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
    write_simulate_report(out / REPORT_FILE, summary, sorted((out / FILMS).glob("*.mp4")))
