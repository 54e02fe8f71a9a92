# SPDX-License-Identifier: Apache-2.0
"""Statistics, films and report of simulated episodes."""

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import plotly.graph_objects as go
from PIL import Image, ImageDraw

from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.paired import PairedComparison, Rate
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.lab.tally import DecodeTally, percentiles


@dataclass(frozen=True)
class TaskSummary:
    """The episodes of one task."""

    instruction: str
    success: Rate
    # share in which the object moved farthest is the named one; None: unknown in this world
    listened: Rate | None
    acted_on: dict[str, int]  # episodes by the object moved farthest
    steps_to_success: float | None  # median number of actions; None without a success
    time_to_success_s: float | None  # median world time
    roughness: float  # mean over the episodes, see EpisodeResult
    failures: dict[str, int]  # early ends by reason


@dataclass(frozen=True)
class SimulateSummary:
    """Summary of all episodes of a simulation, by task and in total."""

    tasks: dict[str, TaskSummary]
    success: Rate
    listened: Rate | None  # over the tasks with a known share
    latency_s: dict[str, float]  # observation-to-action latency: p50, p95, p99, mean, max; empty without an action
    picture_age_s: float | None  # mean over the episodes, see EpisodeResult; None: lockstep, or no action
    # For each task's first episode with actions: time of each action and age of its image then, seconds.
    acted: dict[str, tuple[tuple[float, float], ...]]
    action_rate_hz: float  # actions per second of world time
    drops: dict[str, int]
    decode: DecodeTally
    context: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        tasks = {}
        for name, task in self.tasks.items():
            listened = task.listened.as_json() if task.listened else None
            tasks[name] = asdict(task) | {"success": task.success.as_json(), "listened": listened}
        return vars(self) | {
            "tasks": tasks,
            "success": self.success.as_json(),
            "listened": self.listened.as_json() if self.listened else None,
            "decode": self.decode.summary(),
        }


def summarise_episodes(episodes: Sequence[EpisodeResult], *, context: Mapping[str, Any]) -> SimulateSummary:
    """Summarises episodes; tasks are in the order of their first episodes."""
    by_task: dict[str, list[EpisodeResult]] = {}
    drops: Counter[str] = Counter()
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
        drops.update(episode.drops)
    tasks = {name: _task(name, group) for name, group in by_task.items()}
    listened = [task.listened for task in tasks.values() if task.listened is not None]
    world_s = sum(episode.time_s for episode in episodes)
    ages_s = [episode.picture_age_s for episode in episodes if episode.picture_age_s is not None]
    return SimulateSummary(
        tasks=tasks,
        success=Rate(sum(episode.succeeded for episode in episodes), len(episodes)),
        listened=Rate(sum(rate.successes for rate in listened), sum(rate.n for rate in listened)) if listened else None,
        latency_s=percentiles([seconds for episode in episodes for seconds in episode.latency_s]),
        picture_age_s=float(np.mean(ages_s)) if ages_s else None,
        acted={name: acted for name, group in by_task.items() if (acted := _acted(group))},
        action_rate_hz=sum(episode.steps for episode in episodes) / world_s if world_s else 0.0,
        drops=dict(drops),
        decode=DecodeTally.sum(DecodeTally.of_json(episode.decode) for episode in episodes if episode.decode),
        context=context,
    )


def _acted(episodes: Sequence[EpisodeResult]) -> tuple[tuple[float, float], ...]:
    first = next((episode for episode in episodes if episode.acted_s), None)
    return () if first is None else tuple(zip(first.acted_s, first.latency_s, strict=True))


def _task(name: str, episodes: Sequence[EpisodeResult]) -> TaskSummary:
    done = [episode for episode in episodes if episode.succeeded]
    named = next((known.cube for known in TASKS if known.name == name), None)
    listened = Rate(sum(episode.acted_on == named for episode in episodes), len(episodes)) if named else None
    return TaskSummary(
        instruction=episodes[0].instruction,
        success=Rate(len(done), len(episodes)),
        listened=listened,
        acted_on=dict(Counter(str(episode.acted_on or "nothing") for episode in episodes)) if named else {},
        steps_to_success=float(np.median([episode.steps for episode in done])) if done else None,
        time_to_success_s=float(np.median([episode.time_s for episode in done])) if done else None,
        roughness=float(np.mean([episode.roughness for episode in episodes])),
        failures=dict(Counter(episode.failure for episode in episodes if episode.failure)),
    )


def compare_episodes(
    first: Mapping[tuple[str, int], EpisodeResult], second: Mapping[tuple[str, int], EpisodeResult]
) -> PairedComparison:
    """Compares the episodes present in both; see `read_episodes`."""
    pairs = [(first[key].succeeded, second[key].succeeded) for key in first if key in second]
    return PairedComparison.from_pairs(pairs)


_CAPTION_HEIGHT = 22  # pixels
_ENLARGED = 2  # magnification of small images
_EMBEDDED_BYTES = 4 << 20  # maximum size of embedded films, so that browsers can open the report


class Film:
    """Writes an MP4 file (H.264) for browsers, and next to it the actions as JSON; complete once closed."""

    def __init__(self, path: Path, rate_hz: float) -> None:
        self._container = av.open(str(path), "w")
        self._rate, self._path = Fraction(rate_hz).limit_denominator(1000), path
        self._frames, self._names = 0, list[str]()
        self._acted: list[tuple[float, list[float]]] = []
        self._stream: av.VideoStream | None = None

    def add(self, image: np.ndarray, caption: str = "") -> None:
        """Adds an image, RGB uint8 [height, width, 3], with a line of text under it. All images have the same size."""
        picture = Image.fromarray(image)
        picture = picture.resize((picture.width * _ENLARGED, picture.height * _ENLARGED), Image.Resampling.NEAREST)
        height = picture.height + _CAPTION_HEIGHT
        framed = Image.new("RGB", (picture.width + picture.width % 2, height + picture.height % 2))
        framed.paste(picture)
        ImageDraw.Draw(framed).text((6, picture.height + 5), caption, fill=(255, 255, 255))
        if self._stream is None:
            self._stream = self._container.add_stream("libx264", rate=self._rate)
            self._stream.width, self._stream.height = framed.size
            self._stream.pix_fmt = "yuv420p"
        self._container.mux(self._stream.encode(av.VideoFrame.from_image(framed)))
        self._frames += 1

    def act(self, names: Sequence[str], values: Sequence[float] | np.ndarray) -> None:
        """Adds the action that the robot takes now, after the last image."""
        self._names = list(names)
        self._acted.append((float(self._frames / self._rate), [float(value) for value in values]))

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode())
        self._container.close()
        acted = {"frame_s": float(1 / self._rate), "names": self._names, "acted": self._acted}
        self._path.with_suffix(".json").write_text(json.dumps(acted), encoding="utf-8")


def write_simulate_report(path: Path, summary: SimulateSummary, films: Sequence[Path]) -> None:
    """Writes the page; small films (existing MP4 files) are embedded, others are linked."""
    settings = summary.context["settings"]
    listened = f"; the object moved was the named one in {summary.listened}" if summary.listened else ""
    success = f"Success {summary.success} over {summary.success.n} episodes, with the 95 % Wilson interval{listened}."
    parts = [
        page.answer("", summary.success.percent, f"of {summary.success.n} episodes succeeded", success),
        page.emulation(summary.context.get("emulation")),
        page.noticed(summary.context.get("busy")),
        _films(path, films),
        "<h2>Tasks</h2>",
        page.table(
            ("task", "instruction", "success", "episodes", "moved the right object", "steps", "time s", "roughness"),
            [_task_row(name, summary) for name in summary.tasks],
        ),
        page.plot(_success_plot(summary), 320) if summary.tasks else "",
        _acted_on(summary),
        "<h2>Latency</h2>",
        _latency(summary),
        _refused(summary.context.get("refused"), summary.context.get("refused_in_motion", {})),
        page.decoding(summary.decode),
        page.recording(summary.context.get("recording")),
        page.provenance(summary.context),
    ]
    title = f"{settings['world']}: {Path(settings['policy']).name}, {settings['engine']['mode']}, {settings['clock']}"
    page.write_page(path, title, parts)


def _task_row(name: str, summary: SimulateSummary) -> tuple[str, ...]:
    task = summary.tasks[name]
    success, listened = (str(task.success), str(task.success.n)), str(task.listened or "")
    steps, time_s = page.cell(task.steps_to_success, ".0f"), page.cell(task.time_to_success_s, ".1f")
    return name, task.instruction, *success, listened, steps, time_s, f"{task.roughness:.3f}"


def _success_plot(summary: SimulateSummary) -> go.Figure:
    drawn = go.Figure()
    rates = page.rate_trace([task.success for task in summary.tasks.values()])
    drawn.add_bar(x=list(summary.tasks), **rates, marker_color=page.BLUE)
    return drawn.update_yaxes(title_text="success rate", range=[0, 1.05])


def _acted_on(summary: SimulateSummary) -> str:
    """The object moved, by instruction."""
    tasks = {task.instruction: task.acted_on for task in summary.tasks.values() if task.acted_on}
    if not tasks:
        return ""
    things = sorted({thing for counts in tasks.values() for thing in counts})
    rows = [[counts.get(thing, 0) for thing in things] for counts in tasks.values()]
    drawn = page.heatmap(things, list(tasks), [[count / sum(row) for count in row] for row in rows], rows)
    drawn.update_yaxes(autorange="reversed", automargin=True)
    note = "Every instruction has the same seeds and scenes, so only the words identify the object to move."
    return f"<h2>Object moved, by instruction</h2><p class=note>{note}</p>" + page.plot(drawn, 120 + 40 * len(tasks))


def _latency(summary: SimulateSummary) -> str:
    if not summary.latency_s:
        return "<p>There was no action.</p>"
    realtime = summary.context["settings"]["clock"] == "realtime"
    usual = "Time from the image to the action, in world time" if realtime else "Decoding time per action"
    row = tuple(f"{summary.latency_s[name] * 1e3:.1f}" for name in ("p50", "p95", "p99", "mean"))
    age = summary.picture_age_s
    followed = "" if age is None else f" Mean age of the image acted on: {age * 1e3:.0f} ms."
    drops = "".join(f"; {count} × {escape(reason)}" for reason, count in summary.drops.items())
    drawn = page.plot(_age_plot(summary.acted), 280) if summary.acted else ""
    return (
        f"<p class=note>{escape(summary.context.get('latency', usual))}.</p>"
        + page.table(("p50 ms", "p95 ms", "p99 ms", "mean ms"), [row])
        + f"<p>{summary.action_rate_hz:.2f} actions per second of world time{drops}.{followed}</p>"
        + drawn
    )


def _age_plot(acted: Mapping[str, Sequence[tuple[float, float]]]) -> go.Figure:
    """The age of the image acted on, over each task's first episode."""
    drawn = go.Figure()
    for name, actions in acted.items():
        seconds, ages_s = zip(*age_over_time(actions), strict=True)
        drawn.add_scatter(x=seconds, y=[age_s * 1e3 for age_s in ages_s], mode="lines", name=name, line=dict(width=1.3))
    drawn.update_xaxes(title_text="world time in the task's first episode [s]")
    return drawn.update_yaxes(title_text="age of the image acted on [ms]", rangemode="tozero")


def age_over_time(acted: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the curve as (time, age) in seconds; the age grows until the next action arrives.

    `acted`: time of each action, ascending, and age of its image then; at least one.
    """
    corners = [acted[0]]
    for (before_s, old_s), (now_s, new_s) in pairwise(acted):
        corners += [(now_s, old_s + now_s - before_s), (now_s, new_s)]
    return corners


def _refused(refused: Mapping[str, Mapping[str, int]] | None, moving: Mapping[str, Mapping[str, int]]) -> str:
    if refused is None:
        return ""
    rows = [
        (who, kind, str(times), str(moving.get(who, {}).get(kind, 0)))
        for who, counts in refused.items()
        for kind, times in counts.items()
    ]
    note = (
        "Actions refused by the driver; commands blocked by the guard, and conditions for which it held the arm. After "
        "an episode world and arm are reset: the dead-man's switch is released, and driver and guard restart from the "
        "arm's new pose."
    )
    head = ("node", "refused", "times", "of which in motion")
    return f"<h2>Driver and guard</h2><p class=note>{note}</p>" + page.table(head, rows)


_FILMS = (
    "The actions beside each film are in the policy's units. Press ← or → to step the film under the pointer (with "
    "Shift: ten frames), or click on an action."
)


def _films(path: Path, films: Sequence[Path]) -> str:
    if not films:
        return ""
    parts, room = [f"<h2>Films</h2><p class=note>{_FILMS}</p>"], _EMBEDDED_BYTES
    for film in films:
        sidecar = film.with_suffix(".json")
        if not sidecar.exists():
            continue  # its episode was interrupted
        acted = json.loads(sidecar.read_text(encoding="utf-8"))
        size = film.stat().st_size
        source = escape(str(film.relative_to(path.parent)))
        if size <= room:
            room -= size
            source = "data:video/mp4;base64," + base64.b64encode(film.read_bytes()).decode()
        parts.append(
            f"<div class='scrubber film' data-frame='{acted['frame_s']}'><figure><video controls muted loop "
            f"playsinline src='{source}'></video><figcaption>{escape(film.stem)}</figcaption></figure>"
            f"{_action_plot(acted) if acted['acted'] else ''}</div>"
        )
    return "".join(parts)


def _action_plot(acted: Mapping[str, Any]) -> str:
    """The actions over the film's time: one plot per unit."""
    names, times_s, values = acted["names"], *zip(*acted["acted"], strict=True)
    units = list(dict.fromkeys(page.UNITS.get(name, "") for name in names))
    drawn = page.subplots(len(units), 1, shared_xaxes=True, vertical_spacing=0.06)
    for name, column in zip(names, zip(*values, strict=True), strict=True):
        row = units.index(page.UNITS.get(name, "")) + 1
        drawn.add_scatter(x=times_s, y=column, name=name, mode="lines", line=dict(shape="hv"), row=row, col=1)
    for row, unit in enumerate(units):
        drawn.update_yaxes(title_text=unit, exponentformat="power", row=row + 1)
    drawn.update_xaxes(title_text="film time [s]", row=len(units))
    return page.plot(drawn, 150 + 80 * len(units), legend=dict(orientation="h", y=-0.22, yanchor="top", x=0))
