"""Sections of the results page about speculation and pipelining."""

from collections.abc import Callable
from typing import Any

from results_cells import difference, ms, rate, source, table
from results_speed import SPEED_SECTIONS

_SPECULATION = """
## What speculation buys

The nano policy with the draft head that is shipped, in lockstep, {pairs} held-out starts, the same for every row
({episodes} per task). A relaxed row takes an action token within {tolerances} (x, y, z; roll, pitch, yaw) of
the target's own choice for the same prefix; the gripper is strict. *Forwards* count the prefill, so that 7 are plain
decoding, and *tokens per forward* too. *Tokens per verification* is τ as in Spec-VLA's Table 1 (there 1.59 to 2.04
strict and 2.10 to 2.94 relaxed, the target's own token counted): forwards that verified a draft, among them the prefill
where the previous action rides behind the prompt. The difference to `ar` is in points of success, paired, with a 95 %
interval (Agresti and Min). Times are means on the same frames, the settings taking turns; at this size the draft head
costs about as much as it saves: what counts here are the forwards.

"""
_RULES = """
## The acceptance rules side by side

The same starts for every row. Agreement is the share of committed tokens that are the target's own choice for the same
prefix. On the nano policy's actions, drafted by its head with 16 nodes, {nano_n} starts; `bin_distance` takes tokens
within {mm:g} mm and {rad:g} rad:

{nano}

FLy and LVSpec were made for text: on actions they have no bound in millimetres, and FLy hardly ever acts.

A policy that writes about {text_tokens:.0f} tokens of text and action per answer (`benchmarks/text_policy.py`: the nano
policy taught to say what it sees and plans; {accuracy:.0%} of held-out tokens right), {text_n} starts, drafted without
any head: by prompt lookup, and from the answer before, which is for strict acceptance. *composite* is bin_distance
for actions, strict for numbers and FLy for other words. What pays here is no loose rule but the answer before, which
loses nothing; LVSpec, as read from its paper, lets words pass that the actions hang on:

{text}

"""
_TICK = """
## What a speculative tick costs

Medians in milliseconds behind a prompt of 290 rows, the parts taking turns; random weights. *accept* is the choice of
the path with its read-back; the tick is the forward, the acceptance, the commit and the draft of {nodes} nodes.

"""
_PIPELINING = """
## What speculative pipelining buys

The nano policy's own acceptance at the stage times that OpenVLA-7B would have. **The devices are emulated**: none of
them ran; each stage counted for the time in `specvla_ros/planning/devices/`, assumed from a roofline. Trees have 16
nodes; *relaxed* is within {mm:g} mm and {degrees:g}°.

A frame always waiting, over {frames} frames of one run: latency from a frame's admission to its action, and actions per
second. *Overtaken* are frames that were begun and dropped for a newer one.

"""
_CLOSED = """
In closed loop the world moves on while the policy thinks, and a camera gives a picture every 50 ms; {starts} held-out
starts, the same for every row; the difference is to `ar`, paired. Latency runs from the picture to the action. A slow
policy is first of all late, so an episode may take {limit:g} times its task's time; *in its own time* are those that
did not need more. *ar's time / its own* is over the starts where both succeed. What counts is how old the picture is
that the arm follows, latency and period together: fewer forwards shorten the one, more frames in flight the other,
and whole prefills of other frames in between lengthen it again. An action is a displacement from where the arm was in
its picture, and the arm takes off what it has gone since (`control/displacement.py`); added up instead, late actions
overshoot.

"""


def _speculation(result: dict[str, Any]) -> str:
    rows = result["rows"]
    heads = ["", "success", "difference to ar", "forwards per action", "tokens per forward", "tokens per verification"]
    cells = [[*heads, "largest bins off", "ms"]]
    for row in rows:
        cells.append(
            [
                row["name"],
                rate(row["success"]),
                "" if row is rows[0] else difference(row["against_first"]),
                f"{row['forwards_per_action']:.2f}",
                f"{7 / row['forwards_per_action']:.2f}",
                "" if row is rows[0] else f"{row['tau']:.2f}",
                str(row["largest_bins_off"]),
                f"{row['action_s'] * 1e3:.1f}",
            ]
        )
    text = _SPECULATION.format(
        pairs=rows[0]["success"]["episodes"],
        episodes=result["episodes_per_task"],
        tolerances=" or ".join(f"{each['mm']:g} mm and {each['degrees']:g}°" for each in result["tolerances"]),
    )
    return text + table(cells) + "\n\n" + _by_place(rows) + "\n" + source(result, "speculation_nano.json")


def _by_place(rows: list[dict[str, Any]]) -> str:
    """Spec-VLA's tables 2 and 3: accept lengths, and where in the answer they were reached."""
    drafted = rows[1:]
    lengths = range(max(int(length) for row in drafted for length in row["share_by_accept_length"]) + 1)
    shares = [["drafts accepted in one forward", *map(str, lengths)]]
    shares += [
        [row["name"], *(f"{100 * row['share_by_accept_length'].get(str(n), 0):.0f} %" for n in lengths)]
        for row in drafted
    ]
    places = sorted({int(place) for row in drafted for place in row["accept_length_by_place"]})
    means = [["accepted, by the first drafted token", *(str(place + 1) for place in places)]]
    means += [
        [row["name"], *(_mean(row["accept_length_by_place"].get(str(place))) for place in places)] for row in drafted
    ]
    return "\n\n".join(table(each) for each in (shares, means)) + "\n"


def _mean(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rules(result: dict[str, Any]) -> str:
    card = result["text_policy"]
    text = _RULES.format(
        nano_n=result["nano"][0]["success"]["episodes"],
        mm=result["tolerance"]["metres"] * 1e3,
        rad=result["tolerance"]["radians"],
        nano=_rule_table(result["nano"]),
        text_tokens=result["text"][0]["tokens_per_action"],
        accuracy=card["held_out_token_accuracy"],
        text_n=result["text"][0]["success"]["episodes"],
        text=_rule_table(result["text"]),
    )
    return text + source(result, "acceptance_rules.json")


def _rule_table(rows: list[dict[str, Any]]) -> str:
    cells = [["", "success", "difference to ar", "forwards per answer", "τ", "agreement"]]
    for row in rows:
        first = row is rows[0]
        cells.append(
            [
                row["name"],
                rate(row["success"]),
                "" if first else difference(row["against_first"]),
                f"{row['forwards_per_action']:.2f}",
                "" if first else f"{row['tau']:.2f}",
                f"{row['agreement']:.1%}",
            ]
        )
    return table(cells)


def _tick_cost(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    first = next(iter(sizes.values()))
    cells = [["", *sizes]]
    cells += [[part, *(f"{each['seconds'][part] * 1e3:.2f}" for each in sizes.values())] for part in first["seconds"]]
    cells += [
        [f"share of a tick: {part}", *(f"{each['share_of_tick'][part]:.1%}" for each in sizes.values())]
        for part in first["share_of_tick"]
    ]
    return _TICK.format(nodes=result["tree_nodes"]) + table(cells) + "\n\n" + source(result, "tick_cost_cpu.json")


def _pipelining(result: dict[str, Any]) -> str:
    devices = result["devices"]
    text = _PIPELINING.format(**result["tolerance"], frames=result["frames"])
    heads = ("actions/s", "forwards", "overtaken")
    cells = [["", *(name for each in devices.values() for name in (f"{each['name']}: ms", *heads))]]
    for mode in next(iter(devices.values()))["frame_always_waiting"]:
        row = [mode]
        for each in devices.values():
            found = each["frame_always_waiting"][mode]
            row += [f"{found['latency_s'] * 1e3:.0f}", f"{found['actions_per_s']:.1f}"]
            row += [f"{found['forwards_per_action']:.2f}", f"{found['overtaken']:.0%}"]
        cells.append(row)
    parts = [text, table(cells), "\n"]
    for each in devices.values():
        if each["closed_loop"]:
            intro = _CLOSED.format(starts=_starts(each), limit=result["time_limit"])
            parts += ["\n" if len(parts) > 3 else intro, _closed_table(each), "\n"]
    return "".join(parts) + "\n" + source(result, "pipelining_nano.json")


def _starts(device: dict[str, Any]) -> int:
    return int(device["closed_loop"]["ar"]["success"]["episodes"])


def _closed_table(device: dict[str, Any]) -> str:
    heads = ("success", "difference to ar", "in its own time", "time to success", "ar's time / its own")
    cells = [[f"emulated {device['name']}", *heads, "latency p50 / p95, ms", "actions/s"]]
    for mode, row in device["closed_loop"].items():
        cells.append(
            [
                mode,
                rate(row["success"]),
                "" if mode == "ar" else difference(row["against_ar"]),
                f"{row['in_time'] / row['success']['episodes']:.0%}",
                _or_none(row["time_to_success_s"], "{:.1f} s"),
                _or_none(row["plain_time_over_own"], "{:.2f}"),
                f"{ms(row, 'p50')} / {ms(row, 'p95')}",
                f"{row['action_rate_hz']:.1f}",
            ]
        )
    return table(cells)


def _or_none(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "speculation_nano.json": _speculation,
    "acceptance_rules.json": _rules,
    "tick_cost_cpu.json": _tick_cost,
    "pipelining_nano.json": _pipelining,
    **SPEED_SECTIONS,
}
