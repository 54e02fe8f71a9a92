"""Sections of the results page about speed on a device: the modes end to end, what they depend on, and a soak."""

from collections.abc import Callable
from typing import Any

from results_cells import source, table

ON_GPU = ("gpu", "h200")  # ends of the names of files that hold a GPU's figures
_MODES = """
## Every mode end to end, beside transformers' generate

Measured in one run, contestants taking turns, same weights: {tokens} tokens behind a prompt of {rows} rows, vision
{vision}. Ours is the real engine with a frame always waiting. **Acceptance is trace-driven**: weights are random, and
each tree is accepted to the next length of a named trace, here *{trace}* (mean {mean:.2f} drafted tokens), with trees
of {nodes} nodes. Latency runs from the moment a frame is taken to its action; ratios are of action rates; *overtaken*
are frames that were begun and dropped for a newer one. {memory}

"""
_QUANTIZED = """
On quantised weights, {trace} and {nodes} nodes as above, all taking turns in one run (a second one); ratios are to
plain decoding (`ar`) on weights as they are. *MiB* are those of the decoder's layers.

"""
_SENSITIVITY = """
## What the time per action depends on

Milliseconds per action (and latency) over the tokens of an action and the rows of the prompt, as in ActionFlow's
figure 5; vision left out, a frame always waiting. **Acceptance is trace-driven**, as above: *{trace}*, trees of {nodes}
nodes. In `specpipe` many of the requests in flight are overtaken when answers are long: *in order* overtakes none.

"""
_LAYOUTS = """
## What not moving keys and values saves

One tick of a full plain pipeline of {stages} stages, a prompt of {rows} rows, the same packed forward and the same
tokens. *naive* gathers the frames' keys and values in front of every forward, *shift* (ActionFlow) copies each stage's
to the next one's place, in *slots* (ours) nothing moves. Medians, taking turns.

"""
_KERNELS = """
## Kernels and stages against the roofline

The bound of each is its bytes over the bandwidth, or its operations over the matrix rate, whichever takes longer; both
were measured in the same run, with large buffers and large products. Operands lie in memory, not in a cache: a buffer
larger than the caches is overwritten before each call. A stage's bytes are weights, keys and values; its activations
are left out. Medians in microseconds, and in brackets the share of the bound that is reached; {calls}

"""
_SOAK = """
## A soak

{ticks} ticks in each mode and of switching between them, frames and new instructions at random, on a small random
checkpoint: **{verdict}**. Every action is compared with the plain decoder's for its frame, and may differ only where
the two best logits are within {margin:g}; every frame must end once, no slot may leak, and memory may not grow by more
than {resident:g} MiB (on the GPU {gpu:g} MiB) over the second half.

"""


def _made_with(result: dict[str, Any]) -> str:
    return f"{result['hardware']}, {result['dtype']}, torch {result['versions']['torch']}"


def _modes(result: dict[str, Any], file: str) -> str:
    on_gpu = "cuda" in result["command"]
    text = _MODES.format(
        tokens=result["tokens"],
        rows=result["prompt_rows"],
        vision="included" if result["vision"] else "left out",
        trace=result["acceptance"]["name"],
        mean=result["acceptance"]["mean_accepted"],
        nodes=result["tree_nodes"],
        memory="Memory is the peak on the GPU, weights included." if on_gpu else "Memory is the KV cache's.",
    )
    parts = [text]
    for name, size in result["sizes"].items():
        cells = [[name, "actions/s", "× ar", "× transformers", "latency mean / p50 / p95, ms"]]
        cells[0] += ["forwards", "overtaken", "MiB"]
        cells += [[mode, *_mode_cells(row)] for mode, row in size["modes"].items()]
        parts += [table(cells), "\n"]
        if "quantized" in size:
            parts += [_QUANTIZED.format(trace=result["acceptance"]["name"], nodes=result["tree_nodes"])]
            parts += [_quantized_table(name, size["quantized"]), "\n"]
        parts += ["\n"]
    return "".join(parts) + _made_with(result) + ". " + source(result, file)


def _quantized_table(size: str, formats: dict[str, Any]) -> str:
    cells = [[f"{size}: weights", "mode", "actions/s", "× ar", "latency mean, ms", "latency × ar", "MiB"]]
    for name, found in formats.items():
        if "skipped" in found:
            cells.append([name, f"skipped: {found['skipped']}", *[""] * 5])
            continue
        for mode, row in found["modes"].items():
            rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar")]
            latency = [f"{row['latency_s']['mean'] * 1e3:.1f}", f"{row['latency_over_ar']:.2f}"]
            cells.append([name, mode, *rates, *latency, f"{found['layer_bytes'] / 2**20:.1f}"])
    return table(cells)


def _mode_cells(row: dict[str, Any]) -> list[str]:
    if "skipped" in row:
        return [f"skipped: {row['skipped']}", *[""] * 6]
    rates = [f"{row[key]:.2f}" for key in ("action_rate_hz", "rate_over_ar", "rate_over_transformers")]
    latency = " / ".join(f"{row['latency_s'][name] * 1e3:.1f}" for name in ("mean", "p50", "p95"))
    counts = [f"{row['forwards_per_action']:.2f}", f"{row['overtaken']:.0%}"] if "overtaken" in row else ["", ""]
    return [*rates, latency, *counts, "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"]


def _sensitivity(result: dict[str, Any], file: str) -> str:
    parts = [_SENSITIVITY.format(trace=result["acceptance"]["name"], nodes=result["tree_nodes"])]
    for name, size in result["sizes"].items():
        cells = [[f"{name}: tokens", "prompt", *size["points"][0]["modes"]]]
        for point in size["points"]:
            times = [
                f"{row['seconds_per_action'] * 1e3:.1f} ({row['latency_s']['mean'] * 1e3:.1f})"
                for row in point["modes"].values()
            ]
            cells.append([str(point["tokens"]), str(point["prompt_rows"]), *times])
        parts += [table(cells), "\n\n"]
    return "".join(parts) + _made_with(result) + ". " + source(result, file)


def _layouts(result: dict[str, Any], file: str) -> str:
    parts = [_LAYOUTS.format(stages=result["stages"], rows=result["prompt_rows"])]
    for name, size in result["sizes"].items():
        cells = [[name, "MB copied per tick", "copying alone, ms", "tick, ms", "tick / slots'"]]
        for layout, row in size["layouts"].items():
            seconds = [f"{row[key] * 1e3:.2f}" for key in ("move_s", "tick_s")]
            cells.append([layout, f"{row['moved_bytes'] / 1e6:.1f}", *seconds, f"{row['tick_over_slots']:.2f}"])
        parts += [table(cells), "\n\n"]
    return "".join(parts) + _made_with(result) + ". " + source(result, file)


def _kernels(result: dict[str, Any], file: str) -> str:
    on_gpu = "cuda" in result["command"]
    calls = (
        f"calls are replayed from a CUDA graph, and one that does nothing takes {result['launch_s'] * 1e6:.1f} µs."
        if on_gpu
        else "**the kernels run on GPUs only, these are their PyTorch references**."
    )
    parts = [_KERNELS.format(calls=calls)]
    for name, size in result["sizes"].items():
        limits = size["limits"]
        rates = f"{limits['dense_tflops']:.4g} TFLOP/s, int8 {limits['int8_tops']:.4g} TOP/s"
        parts += [f"*{name}*: {limits['bandwidth_gb_s']:.4g} GB/s, {rates}.\n\n"]
        for kind in ("kernel", "stage"):
            parts += [table(_kernel_cells(kind, [row for row in size["rows"] if row["kind"] == kind])), "\n\n"]
    return "".join(parts) + _made_with(result) + ". " + source(result, file)


def _kernel_cells(kind: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Contestants that ran nowhere get no column."""
    ran = (name for row in rows for name, each in row["contestants"].items() if "seconds" in each)
    contestants = list(dict.fromkeys(ran))
    cells = [[kind, "on", "MB", "MFLOP", "bound, µs", "by", *contestants]]
    for row in rows:
        counts = [f"{row['bytes'] / 1e6:.3g}", f"{row['operations'] / 1e6:.3g}", f"{row['bound_s'] * 1e6:.1f}"]
        times = [_share_of_bound(row["contestants"].get(name)) for name in contestants]
        cells.append([row["name"], row["batch"], *counts, row["bound_by"], *times])
    return cells


def _share_of_bound(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "skipped" in found:
        return str(found["skipped"])
    share = f" ({found['share_of_bound']:.0%})" if "share_of_bound" in found else ""
    return f"{found['seconds'] * 1e6:.1f}{share}"


def _soak(result: dict[str, Any], file: str) -> str:
    bounds = result["bounds"]
    text = _SOAK.format(
        ticks=result["ticks"],
        verdict="passed" if result["passed"] else "failed",
        margin=bounds["margin"],
        resident=bounds["resident_growth"] / 2**20,
        gpu=bounds["gpu_growth"] / 2**20,
    )
    cells = [["", "frames", "actions", "forwards per action", "different actions", "grown by, MiB", "failures"]]
    for name, phase in result["phases"].items():
        different = f"{phase['different_actions']} ({phase['difference_rate']:.2%})"
        grown = " / ".join(f"{phase[key] / 2**20:.2f}" for key in ("resident_growth", "gpu_growth"))
        counts = [str(phase["submitted"]), str(phase["actions"]), f"{phase['forwards_per_action']:.2f}"]
        cells.append([name, *counts, different, grown, "; ".join(phase["failures"]) or "none"])
    return text + table(cells) + "\n\n" + _made_with(result) + ". " + source(result, file)


def _of_files(benchmark: str, section: Callable[[dict[str, Any], str], str]) -> dict[str, Any]:
    """The section for each device that a benchmark may have been run on."""

    def of(file: str) -> Callable[[dict[str, Any]], str]:
        return lambda result: section(result, file)

    return {file: of(file) for file in (f"{benchmark}_{device}.json" for device in ("cpu", *ON_GPU))}


SPEED_SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    **_of_files("decode_modes", _modes),
    **_of_files("sensitivity", _sensitivity),
    **_of_files("kv_layouts", _layouts),
    **_of_files("kernels", _kernels),
    **_of_files("soak", _soak),
}
