"""How answers were decoded, as a part of a report."""

import plotly.graph_objects as go

from specvla_ros.engine.decode_tally import DecodeTally
from specvla_ros.evaluation.report_page import figure, table

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
