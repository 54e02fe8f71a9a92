# SPDX-License-Identifier: Apache-2.0
"""Small reports of every command that writes one, from made-up results: `python -m pages.examples build/pages`."""

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.page import page as gpu_page
from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.evaluation import calibrate, certificate, compare, qualify, stops_page
from specvla_ros.lab.evaluation.compare import FrameRun, Setting, SweepRow
from specvla_ros.lab.evaluation.deviation import Deviation
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.evaluation.replay_page import Pictures, write_bags_report, write_replay_report
from specvla_ros.lab.evaluation.replay_summary import (
    BagRow,
    BagsSummary,
    FrameRecord,
    ReplayColumns,
    ReplaySummary,
    summarise,
)
from specvla_ros.lab.evaluation.simulate_summary import Film, SimulateSummary, summarise_episodes, write_simulate_report
from specvla_ros.lab.evaluation.stops import LeftOut, Stop, Stops
from specvla_ros.lab.plans import Criterion, Limits, Thresholds
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.lab.training import fleet_draft

_RANDOM = np.random.default_rng(0)
_TALLY = DecodeTally(
    actions=40,
    forwards=130,
    tokens=230,
    accepted=Counter({(0, 3): 20, (0, 1): 20, (4, 2): 30, (2, 4): 20}),
    bins_off=Counter({(0, 0): 30, (0, 1): 8, (0, 4): 2, (1, 0): 35, (1, 2): 5}),
)
_CONTEXT = {
    "policy": {"checkpoint": "/data/checkpoints/openvla-7b-finetuned-on-the-table", "dtype": "bfloat16"},
    "date": "2026-01-02 03:04",
    "bag": {"path": "/data/bags/kitchen_with_a_rather_long_name_2026_01_02-03_04_05"},
    "command": "specvla replay --policy checkpoint --bag bag --mode spec --acceptance.rule bin_distance --out results",
    "version": "0.2.0",
}
_STAMP_NS, _PERIOD_NS = 1_000_000_000, 200_000_000


def write_all(out: Path) -> list[Path]:
    """Writes one report per command, in a folder of its name, and returns their paths."""
    pages = []
    for name, write in _REPORTS.items():
        pages.append(out / name / "report.html")
        pages[-1].parent.mkdir(parents=True, exist_ok=True)
        write(pages[-1])
    return pages


def _image(step: int) -> np.ndarray:
    image = np.full((120, 160, 3), 230, np.uint8)
    image[50:70, 20 + 3 * (step % 40) : 40 + 3 * (step % 40)] = (213, 94, 0)
    return image


def _replayed(frames: int, limits: Thresholds, pictures: Pictures) -> tuple[ReplayColumns, ReplaySummary]:
    columns = ReplayColumns(ACTION_NAMES, _STAMP_NS)
    for number in range(frames):
        time_ns, dropped = _STAMP_NS + number * _PERIOD_NS, number in (3, 4)
        values = [0.02 * np.sin(number / 5 + dimension) for dimension in range(len(ACTION_NAMES))]
        timings = {"wait_s": 0.002, "vision_s": 0.02, "prefill_s": 0.03, "decode_s": float(_RANDOM.uniform(0.05, 0.1))}
        ending: dict[str, Any] = {"drop": {"reason": "bad_image", "detail": "the image is 3 bytes short"}}
        if not dropped:
            ending = {"drop": None, "values": values, "timings": timings, "tokens": [1] * 7, "error": [0.001] * 7}
            ending["bin_distance"] = [1] * 7
        record = FrameRecord(
            frame=number,
            time_ns=time_ns,
            stamp_ns=time_ns,
            seq=None if dropped else number,
            epoch=0,
            instruction="put the red cube into the bowl",
            total_s=sum(timings.values()),
            recorded=[value + 0.001 for value in values],
            **ending,
        )
        columns.add(record)
        pictures.add(record, None if dropped else _image(number))
    columns.decode = _TALLY
    return columns, summarise(columns, frames, limits, "", _CONTEXT)


def _replay(path: Path) -> None:
    pictures = Pictures(40, _STAMP_NS)
    columns, summary = _replayed(40, Thresholds(max_p95_latency_s=0.2), pictures)
    write_replay_report(path, summary, columns, pictures)


def _bags(path: Path) -> None:
    names = [f"episode_{number:03}" for number in range(8)]
    found = {name: _replayed(20, Thresholds(), Pictures(20, _STAMP_NS))[1] for name in names}
    total = _replayed(160, Thresholds(max_p95_latency_s=0.01), Pictures(160, _STAMP_NS))[1]
    rows = tuple(BagRow(name, f"/data/bags/{name}", summary=summary) for name, summary in found.items())
    broken = BagRow("broken", "/data/bags/broken", "metadata.yaml is missing")
    write_bags_report(path, BagsSummary((*rows, broken), total, ("notes.txt",)))


def _simulated(mode: str, failing: int, clock: str = "realtime") -> SimulateSummary:
    tasks = {"lift_red": "lift the red cube", "lift_green": "lift the green cube", "put_red": "put the red cube down"}
    episodes = [
        EpisodeResult(
            task=task,
            seed=seed,
            instruction=instruction,
            succeeded=seed % 10 >= failing,
            steps=30,
            time_s=6.0,
            latency_s=(0.12,) * 30,
            acted_s=tuple(0.2 * step + 0.12 for step in range(30)) if clock == "realtime" else (),
            picture_age_s=0.2 if clock == "realtime" else None,
            drops={"superseded": 3},
            roughness=0.05,
            acted_on=instruction.split()[2] if seed % 4 else None,
            decode=_TALLY.as_json() if mode != "ar" else DecodeTally(actions=40, forwards=280).as_json(),
        )
        for task, instruction in tasks.items()
        for seed in range(20)
    ]
    settings = {"world": "table", "policy": "/data/openvla-7b-table", "engine": {"mode": mode}, "clock": clock}
    return summarise_episodes(episodes, context=_CONTEXT | {"settings": settings})


def _films(path: Path) -> list[Path]:
    (path.parent / "films").mkdir(exist_ok=True)
    films = [path.parent / "films" / f"{name}-0.mp4" for name in ("lift_red", "lift_green", "put_red")]
    for film in films:
        with closing(Film(film, 20.0)) as writer:
            for step in range(60):
                if step % 4 == 0:
                    writer.act(ACTION_NAMES, [0.02 * np.sin(step / 9 + dimension) for dimension in range(7)])
                writer.add(_image(step), "lift the red cube  [realtime]")
    return films


def _simulate(path: Path) -> None:
    write_simulate_report(path, _simulated("spec", 2), _films(path))


def _demo(path: Path) -> None:
    summary = _simulated("specpipe", 1)
    more = {
        "refused": {"guard": {"stop": 1}, "driver": {"too_old": 3}},
        "refused_in_motion": {"driver": {"too_old": 2}},
        "emulation": {"name": "NVIDIA Jetson AGX Orin", "source": "measured on the device, see devices/orin.json"},
        "busy": "other processes used 60 % of the processors during the run, so latencies are too long",
    }
    context = {**summary.context, **more}
    write_simulate_report(path, SimulateSummary(**vars(summary) | {"context": context}), _films(path))


def _sweep(path: Path) -> None:
    rows = []
    for name, mode, failing, speed_up in (("ar", "ar", 2, 1.0), ("strict", "spec", 2, 1.4), ("r9", "spec", 3, 2.1)):
        pairs = PairedComparison.from_pairs([(number >= 12, number >= 6 * failing) for number in range(60)])
        setting = Setting(name, EngineSettings(mode))
        rows.append(SweepRow(setting, _simulated(mode, failing, "lockstep"), pairs, 0.2 / speed_up, speed_up))
    compare._write_sweep_report(path, rows)


def _calibrate(path: Path) -> None:
    plain = calibrate.Trial("plain", None, EngineSettings("ar"))
    candidates = [calibrate.Candidate(plain, 0.2, 1.0, 0.0, 7.0, Deviation())]
    for number, name in enumerate(("strict, tree of 8", "1 bin, tree of 8", "2 mm, tree of 16", "9 bins, tree of 24")):
        tolerance = calibrate.Tolerance(bins=number) if number else None
        trial = calibrate.Trial(name, tolerance, EngineSettings("spec"))
        pairs = PairedComparison.from_pairs([(True, seed != 4) for seed in range(200)]) if number == 2 else None
        refusals = ("p95 deviation 9.1 mm, the limit is 5", "not faster than strict") if number == 3 else ()
        found = Deviation(p95_mm=2.5 * number, p95_deg=0.5 * number, gripper_share=0.01 * number)
        speed_up = 1.4 + number / 5
        candidates.append(calibrate.Candidate(trial, 0.2 / speed_up, speed_up, 2.5, 3.0, found, pairs, refusals))
    chosen, refused = candidates[3], {"1 deg": "the actions have no rotation"}
    calibrate._write_report(path, calibrate.Calibration(tuple(candidates), chosen, Limits(), refused, _CONTEXT))


def _certify(path: Path) -> None:
    found: dict[str, Any] = {"frames": 40, "actions": 38, "tokens": 266, "differing": 1, "ties": 1, "near_ties": 3}
    found |= {
        "closest": 0.0012,
        "digest": "0123456789abcdef" * 4,
        "lost": {},
        "unanswered": {"bad_image": 2},
        "gained": 0,
    }
    deviation = {"p95_mm": 0.1, "largest_mm": 0.4, "p95_deg": 0.02, "gripper_share": 0.0}
    difference = {"bag": "episode_000", "frame": 1_767_323_045_123_456_789, "place": 3, "margin": 0.0011}
    content = {
        **_CONTEXT,
        "strict": True,
        "settings": {"mode": "spec", "draft.head": "/data/heads/table"},
        "bags": {f"episode_{number:03}": found for number in range(3)},
        "not_compared": {"episode_002": "2 images are skipped, the first: no 'wrist' sample was received"},
        "result": {**found, "deviation": deviation, "differences": [difference]},
    }
    certificate._write_page(path, content, ())


def _qualify(path: Path) -> None:
    def judged(name: str, n: int, lost: int) -> qualify.Judgement:
        pairs = [qualify.Pair(f"task_{seed % 3}", seed, seed % 10 > 0, seed % 10 > lost) for seed in range(n)]
        return qualify.Judgement(name, tuple(pairs), Criterion())

    candidates = {"lockstep": {"policy": "/data/openvla-7b-table"}}
    context = {"candidates": candidates, "criterion": vars(Criterion()), "command": _CONTEXT["command"]}
    qualify._write_report(path, [judged("rtx5090", 160, 0), judged("l4", 120, 5), judged("orin", 0, 0)], context)


def _fleet_draft(path: Path) -> None:
    runs = {
        name: FrameRun(seconds=[seconds] * 40, tally=DecodeTally(40, forwards, 250, Counter({(0, 3): 100})))
        for name, forwards, seconds in (("plain decoding", 280, 0.2), ("in use", 140, 0.12), ("new", 110, 0.1))
    }
    context = {**_CONTEXT, "frames": 40}
    verdict = fleet_draft.FleetDraft((), runs, Path("/data/heads/table"), None, "2 mm, tree of 16", context)
    fleet_draft._write_report(path, verdict)


def _stops(path: Path) -> None:
    stops = []
    for number in range(24):
        speed = 0.05 + 0.01 * number
        what = ("pose", ("stop", "stale", "workspace")[number % 3], "the message on ~/stop")
        figures = (speed, 0.3 + 0.01 * number, 0.05 + speed, speed, speed**2 / 2)
        stops.append(Stop(f"/home/robot/.ros/black_box/2026-01-02_{number:02}.mcap", *what, *figures))
    found = Stops(tuple(stops), (LeftOut("/home/robot/.ros/black_box/standing.mcap", "the robot stood still"),), 0.6)
    stops_page._write_page(path, found, stops_page.tabulate(found, 0.3))


def _gpu(path: Path) -> None:
    def mode(rate: float, **more: Any) -> dict[str, Any]:
        latency = {"mean": 1 / rate, "p95": 1.1 / rate}
        return {"action_rate_hz": rate, "latency_s": latency, "image_age_s": 1.5 / rate, "same_tokens": True} | more

    found: dict[str, Any] = {
        "modes": {
            "ar": mode(4.1, peak_bytes=15 << 30, cuda_graphs="7 captured"),
            "spec": mode(7.9, forwards_per_action=3.1),
            "transformers": mode(3.2),
            "transformers, compiled": {"skipped": "accelerate is not installed"},
        },
        "ticks": {"ar": {"tick_s": 0.02, "stages_s": {"vision": 0.005, "decode": 0.014}, "host_gap_s": 0.001}},
        "gemm": {"a": {"matrix": "gate_up", "shape": [22016, 4096], "rows": 8, "seconds": {"torch": 1e-4}}},
        "tests": {
            "kernels": {"failures": 1, "errors": 0, "tests": 9, "skipped": 2, "seconds": 4, "failed": {"a": "b"}}
        },
        "environment": {"environment": {"hardware": "NVIDIA H200", "torch": "2.13.0", "driver": {"version": "580.1"}}},
    }
    steps: dict[str, Any] = {name: {"state": "done", "seconds": 12.0, "found": each} for name, each in found.items()}
    steps["soak"] = {"state": "failed", "seconds": 3.0, "found": {}, "reason": ["RuntimeError: out of memory"]}
    path.write_text(gpu_page({"options": {"device": "cuda", "sizes": "7b"}, "steps": steps}), encoding="utf-8")


_REPORTS = {
    "replay": _replay,
    "replay-bags": _bags,
    "simulate": _simulate,
    "demo": _demo,
    "sweep": _sweep,
    "calibrate": _calibrate,
    "certify": _certify,
    "qualify": _qualify,
    "fleet-draft": _fleet_draft,
    "stops": _stops,
    "gpu": _gpu,
}

if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
