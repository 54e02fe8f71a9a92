"""The page of simulated episodes: success, latency, films, and how answers were decoded."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from specvla_ros.engine.tally import DecodeTally
from specvla_ros.evaluation.report.page import context_rows, figure, table, write_page
from specvla_ros.evaluation.simulate_summary import SimulateSummary

_BLUE = "#3c7fb1"


def decode_section(tally: DecodeTally) -> str:
    """Tokens per forward, accept lengths and how far relaxed tokens lie from the target's; empty for plain decoding."""
    if not any(length for _, length in tally.accepted):
        return ""
    head = ("forwards per action", "tokens per verification forward", "accept length, mean")
    accepted = sum(length * count for (_, length), count in tally.accepted.items()) / tally.accepted.total()
    row = (f"{tally.forwards_per_action:.2f}", f"{tally.tau:.2f}", f"{accepted:.2f}")
    parts = ["<h2>Decoding</h2>", table(head, [row]), figure(_strip(tally))]
    relaxed = {pair: count for pair, count in tally.bins_off.items() if pair[1]}
    if relaxed:
        parts.append("<p class=note>Tokens that are not the target's own choice, by their distance to it.</p>")
        parts.append(figure(_distance(tally)))
    return "".join(parts)


def _strip(tally: DecodeTally) -> go.Figure:
    """The acceptance heat strip: where in the answer drafts begin, and how many of their tokens are taken."""
    places = sorted({place for place, _ in tally.accepted})
    lengths = range(1 + max(length for _, length in tally.accepted))
    totals = {place: sum(n for (at, _), n in tally.accepted.items() if at == place) for place in places}
    drawn = go.Figure(
        go.Heatmap(
            x=[f"from token {place + 1}" for place in places],
            y=[f"{length} taken" for length in lengths],
            z=[[tally.accepted[place, length] / totals[place] for place in places] for length in lengths],
            text=[[tally.accepted[place, length] or "" for place in places] for length in lengths],
            texttemplate="%{text}",
            colorscale=[[0, "#ffffff"], [1, _BLUE]],
            zmin=0,
            zmax=1,
            showscale=False,
        )
    )
    height = 120 + 30 * len(lengths)
    return drawn.update_layout(height=height, template="plotly_white", margin=dict(l=80, r=20, t=20, b=40))


def _distance(tally: DecodeTally) -> go.Figure:
    drawn = go.Figure()
    for place in sorted({place for place, _ in tally.bins_off}):
        counts = {bins: n for (at, bins), n in tally.bins_off.items() if at == place}
        total = sum(counts.values())
        drawn.add_bar(x=sorted(counts), y=[counts[bins] / total for bins in sorted(counts)], name=f"token {place + 1}")
    drawn.update_xaxes(title_text="bins from the target's own choice")
    drawn.update_yaxes(title_text="share of tokens")
    return drawn.update_layout(height=300, template="plotly_white", margin=dict(l=60, r=20, t=20, b=50))


_BLUE, _GREY = "#3c7fb1", "#9aa3ad"
_EMBEDDED_BYTES = 4 << 20  # of films, so that the report stays one file that a browser opens


def write_simulate_report(path: Path, summary: SimulateSummary, films: Sequence[Path]) -> None:
    """Writes the report.

    Args:
        path: of the HTML file.
        summary: of the episodes.
        films: MP4 files that exist; small ones are put into the page, others are linked.
    """
    settings = summary.context["settings"]
    title = f"{settings['world']}: {Path(settings['policy']).name}, {settings['engine']['mode']}, {settings['clock']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _emulation(summary),
        f"<p class=verdict>Success {escape(str(summary.success))} over {summary.success.n} episodes, with the 95 % "
        f"Wilson interval{_listened(summary)}.</p>",
        "<h2>Tasks</h2>",
        table(
            ("task", "instruction", "success", "episodes", "moved what it names", "steps", "time s", "roughness"),
            [_task_row(name, summary) for name in summary.tasks],
        ),
        *([figure(_success_plot(summary))] if summary.tasks else []),
        _acted_on(summary),
        "<h2>Latency</h2>",
        _latency(summary),
        decode_section(summary.decode),
        _films(path, films),
        "<h2>Where this comes from</h2>",
        table(("", ""), context_rows(summary.context)),
    ]
    write_page(path, title, parts)


def _emulation(summary: SimulateSummary) -> str:
    device = summary.context.get("emulation")
    if not device:
        return ""
    return (
        f"<p class='verdict emulated'><b>Emulation</b> of {escape(device['name'])}: no such device ran. Each stage of "
        f"the engine counted for the time in its table ({escape(device['source'])}).</p>"
    )


def _listened(summary: SimulateSummary) -> str:
    if summary.listened is None:
        return ""
    return f"; the named thing was the one moved in {escape(str(summary.listened))}"


def _task_row(name: str, summary: SimulateSummary) -> tuple[str, ...]:
    task = summary.tasks[name]
    return (
        name,
        task.instruction,
        str(task.success),
        str(task.success.n),
        str(task.listened) if task.listened else "",
        f"{task.steps_to_success:.0f}" if task.steps_to_success is not None else "",
        f"{task.time_to_success_s:.1f}" if task.time_to_success_s is not None else "",
        f"{task.roughness:.3f}",
    )


def _success_plot(summary: SimulateSummary) -> go.Figure:
    rates = [task.success.as_json() for task in summary.tasks.values()]
    drawn = go.Figure()
    drawn.add_bar(
        x=list(summary.tasks),
        y=[rate["rate"] for rate in rates],
        marker_color=_BLUE,
        error_y=dict(
            type="data",
            symmetric=False,
            array=[rate["high"] - rate["rate"] for rate in rates],
            arrayminus=[rate["rate"] - rate["low"] for rate in rates],
        ),
    )
    drawn.update_yaxes(title_text="success rate", range=[0, 1.05])
    return drawn.update_layout(height=320, template="plotly_white", margin=dict(l=60, r=20, t=20, b=50))


def _acted_on(summary: SimulateSummary) -> str:
    """Which thing was moved under which instruction: what the policy listens to."""
    tasks = {task.instruction: task.acted_on for task in summary.tasks.values() if task.acted_on}
    if not tasks:
        return ""
    things = sorted({thing for counts in tasks.values() for thing in counts})
    drawn = go.Figure(
        go.Heatmap(
            x=things,
            y=list(tasks),
            z=[[counts.get(thing, 0) / sum(counts.values()) for thing in things] for counts in tasks.values()],
            text=[[counts.get(thing, 0) for thing in things] for counts in tasks.values()],
            texttemplate="%{text}",
            colorscale=[[0, "#ffffff"], [1, _BLUE]],
            zmin=0,
            zmax=1,
            showscale=False,
        )
    )
    drawn.update_yaxes(autorange="reversed")
    drawn.update_layout(height=120 + 40 * len(tasks), template="plotly_white", margin=dict(l=280, r=20, t=20, b=40))
    note = "The same seeds show every instruction the same scenes: only the words can tell the policy what to move."
    return f"<h2>What was moved, by instruction</h2><p class=note>{note}</p>" + figure(drawn)


def _latency(summary: SimulateSummary) -> str:
    if not summary.latency_s:
        return "<p>No action was decided.</p>"
    usual = "from the picture to the action, in world time" if _realtime(summary) else "that the policy needed"
    what = escape(summary.context.get("latency", usual))
    row = tuple(f"{summary.latency_s[name] * 1e3:.1f}" for name in ("p50", "p95", "p99", "mean"))
    drops = "".join(f"; {count} × {escape(reason)}" for reason, count in summary.drops.items())
    return (
        f"<p class=note>Time {what}.</p>"
        + table(("p50 ms", "p95 ms", "p99 ms", "mean ms"), [row])
        + f"<p>{summary.action_rate_hz:.2f} actions per second of world time{drops}.</p>"
    )


def _realtime(summary: SimulateSummary) -> bool:
    return bool(summary.context["settings"]["clock"] == "realtime")


def _films(path: Path, films: Sequence[Path]) -> str:
    if not films:
        return ""
    parts, room = [], _EMBEDDED_BYTES
    for film in films:
        size = film.stat().st_size
        source = escape(str(film.relative_to(path.parent)))
        if size <= room:
            room -= size
            source = "data:video/mp4;base64," + base64.b64encode(film.read_bytes()).decode()
        parts.append(
            f"<figure><video controls muted loop src='{source}'></video><figcaption>{escape(film.stem)}</figcaption>"
            "</figure>"
        )
    return "<h2>Films</h2>" + "".join(parts)
