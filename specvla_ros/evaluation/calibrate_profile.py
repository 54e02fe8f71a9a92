"""The chosen setting as a ROS 2 parameter file."""

from pathlib import Path
from typing import Any

import yaml

from specvla_ros.evaluation.calibration import Calibration, Candidate


def write_profile(path: Path, calibration: Calibration) -> None:
    """Writes the file that `params_file:=` and --params-file take; the evidence is in its first lines."""
    chosen = calibration.chosen
    lines = [
        "# Chosen by specvla calibrate; the evidence is in calibration.json beside this file.",
        f"# {chosen.trial.name}: {chosen.speed_up:.2f} times as fast as plain decoding, "
        f"{chosen.forwards_per_action:.2f} forwards per action",
        f"# deviation p95: {chosen.deviation.p95_mm:.2g} mm, {chosen.deviation.p95_deg:.2g} deg, gripper "
        f"{chosen.deviation.gripper_share:.2%}",
        f"# success against plain decoding: {chosen.success or 'not tried'}",
    ]
    emulated = calibration.context.get("emulate")
    if emulated:
        lines.append(f"# times are those of an emulated {emulated['name']}: none ran")
    # Tolerances found for rounded weights hold for these alone.
    quantization = calibration.context.get("policy", {}).get("quantization", "none")
    model = {"model": {"quantization": quantization}} if quantization != "none" else {}
    text = yaml.safe_dump({"/**": {"ros__parameters": model | parameters(chosen)}}, sort_keys=False)
    path.write_text("\n".join(lines) + "\n" + text, encoding="utf-8")


def parameters(candidate: Candidate) -> dict[str, Any]:
    """The policy node's parameters, nested as in a parameter file."""
    engine = candidate.trial.engine
    named: dict[str, Any] = {"decode": {"mode": engine.mode}}
    if engine.mode != "ar":
        draft = engine.draft
        named["draft"] = {
            "top_k": draft.top_k,
            "depth": draft.depth,
            "nodes": draft.nodes,
            "children": draft.children,
            "temporal": draft.temporal,
        }
        named["draft"] |= {"head": draft.head} if draft.head else {}
    acceptance = engine.acceptance
    named["acceptance"] = {"rule": acceptance.rule}
    if acceptance.rule == "bin_distance" and any(acceptance.bins):
        named["acceptance"]["bins"] = list(acceptance.bins)
    elif acceptance.rule == "bin_distance":
        named["acceptance"] |= {
            "tolerance_m": float(acceptance.tolerance_m),
            "tolerance_rad": float(acceptance.tolerance_rad),
        }
    return named
