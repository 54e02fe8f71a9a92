# SPDX-License-Identifier: Apache-2.0
"""Of which modules mutants are made, and which tests are about each of them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTROL, DRIVER, GUARD = "specvla_ros/control/", "specvla_ros/ros/driver/", "specvla_ros/ros/guard/"
ENGINE, SPECULATION, SERVING = "specvla_ros/engine/", "specvla_ros/speculation/", "specvla_ros/serving/"
MODELS, CODECS, EVALUATION = "specvla_ros/models/", "specvla_ros/models/codecs/", "specvla_ros/lab/evaluation/"
_ROOMS = (CONTROL, DRIVER, GUARD, ENGINE, SPECULATION, SERVING, CODECS)
# Of the evaluation what gives verdicts, of the models what the list of mutants by hand names.
_FILES = (*(f"{EVALUATION}{name}.py" for name in ("certificate", "compare", "qualify")), f"{MODELS}generation.py")
_BY_HAND_ALONE = f"{MODELS}decoder.py"


def _of(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"test/{folder}/test_{name}.py" for name in names)


_CHUNKS = (*_of("speculation", "chunk_shift"), *_of("engine", "relaxed_chunks"))
# The tests that are about a module, by the beginning of its name: the first that fits. Of the guard those of all of it,
# which take longest, come last.
NEAR = {
    f"{CONTROL}guard/watch.py": _of("control/guard", "watch", "tool_gates", "gate", "joint_gate", "guard"),
    f"{CONTROL}guard/joint_gate.py": _of(
        "control/guard", "joint_gate", "chunk", "tool_gates", "gate", "watch", "guard"
    ),
    f"{CONTROL}guard/tool_gates.py": _of("control/guard", "tool_gates", "gate", "watch", "joint_gate", "guard"),
    f"{CONTROL}guard/velocity_gate.py": _of("control/guard", "velocity_gate", "guard"),
    f"{CONTROL}guard/chunk.py": _of("control/guard", "chunk", "guard"),
    f"{CONTROL}guard/guard.py": _of("control/guard", "guard"),
    f"{CONTROL}guard/": _of("control/guard", "gate", "tool_gates", "joint_gate", "watch", "guard"),
    f"{CONTROL}driver.py": _of("control", "driver", "clock_offset"),
    f"{CONTROL}follower.py": _of("control", "follower"),
    f"{CONTROL}action_space.py": _of("control", "follower", "driver"),
    f"{CONTROL}chunks.py": _of("control", "chunks"),
    f"{CONTROL}joint_path.py": _of("control", "joint_path"),
    f"{CONTROL}joint_parts.py": _of("messages", "state_message"),
    f"{CONTROL}joint_space.py": _of("control", "joint_space"),
    f"{CONTROL}joint_velocity.py": _of("control", "joint_velocity"),
    f"{CONTROL}gripper.py": _of("control", "gripper", "follower"),
    f"{CONTROL}bounded_motion.py": _of("control", "bounded_motion"),
    f"{CONTROL}limits.py": _of("control", "limits", "bounded_motion"),
    f"{CONTROL}pose.py": _of("control", "pose", "follower"),
    f"{CONTROL}inverse_kinematics.py": _of("control", "inverse_kinematics"),
    f"{CONTROL}convention.py": _of("control", "convention_settings"),
    f"{CONTROL}joint_order.py": _of("control", "joint_order"),
    f"{CONTROL}motor_calibration.py": _of("control", "motor_calibration"),
    f"{CONTROL}state_units.py": _of("control", "state_units"),
    f"{CONTROL}robot_model.py": _of("control", "robot_model", "inverse_kinematics"),
    f"{GUARD}black_box.py": _of("ros/guard", "black_box"),
    GUARD: _of("ros/guard", "node"),
    DRIVER: ("test/ros/driver",),
    f"{ENGINE}kv_cache.py": _of("engine", "segment", "engine"),
    f"{ENGINE}mailbox.py": _of("engine", "mailbox", "staleness", "streams", "prepared_images"),
    f"{ENGINE}prepared_images.py": _of("engine", "prepared_images"),
    f"{ENGINE}ensemble.py": _of("engine", "ensemble"),
    f"{ENGINE}executed.py": _of("engine", "executed"),
    f"{ENGINE}answer_prefix.py": _of("engine", "every_target", "thoughts"),
    f"{ENGINE}outcome.py": _of("engine", "engine"),
    f"{ENGINE}verifier.py": _of("engine", "speculation", "changing_rules"),
    f"{ENGINE}scheduler.py": _of("engine", "pipelining", "streams", "engine"),
    f"{ENGINE}cuda_graphs.py": _of("engine", "captured_decoding"),
    f"{ENGINE}pace.py": _of("engine", "pace"),
    f"{ENGINE}chooser.py": _of("engine", "pace"),
    ENGINE: _of("engine", "engine", "staleness", "pipelining", "buckets"),
    f"{SPECULATION}drafters/chains.py": _of("speculation", "self_drafter", "model_drafter"),
    f"{SPECULATION}drafters/chunk_shift.py": _of("speculation", "chunk_shift", "earlier_answers"),
    f"{SPECULATION}rules/": _of("speculation", "rules", "fly", "lvspec", "tolerances"),
    SPECULATION: _of("speculation", "sources", "seams", "reference", "tree_oracles"),
    SERVING: _of("serving", "access", "counts", "wire", "sessions", "episodes", "protocols"),
    f"{CODECS}fast": (*_of("models", "chunk_codecs", "fast"), *_CHUNKS),
    f"{CODECS}digits.py": (*_of("models", "chunk_codecs"), *_CHUNKS, *_of("models", "qwen_vl")),
    f"{CODECS}vq.py": _of("models", "chunk_codecs", "minivla"),
    CODECS: (*_of("models", "codecs"), *_of("speculation", "tolerances")),
    f"{EVALUATION}certificate.py": _of("lab/evaluation", "verdicts", "certificate"),
    f"{EVALUATION}compare.py": _of("lab/evaluation", "verdicts", "calibrate", "sweep"),
    f"{EVALUATION}qualify.py": _of("lab/evaluation", "e_process", "qualify"),
    f"{MODELS}generation.py": _of("models", "generation"),
}
WIDER = ("test/control", "test/ros/driver", "test/ros/guard")  # of what moves a robot
_WIDER = {
    ENGINE: ("test/engine", "test/speculation"),
    SPECULATION: ("test/speculation", "test/engine"),
    SERVING: ("test/serving",),
    MODELS: ("test/models", "test/engine"),
    EVALUATION: ("test/lab/evaluation",),
}


def modules() -> list[str]:
    """The modules of which mutants are made."""
    files = [file for room in _ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    return [*(str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"), *_FILES]


def stages(module: str) -> list[tuple[str, ...]]:
    """Tests to try one after the other, until some notice."""
    if module == _BY_HAND_ALONE:
        return [_of("models", "qwen3_vl_oracle"), _of("engine", "decoder")]
    near = next(tests for name, tests in NEAR.items() if module.startswith(name))
    wider = next((tests for room, tests in _WIDER.items() if module.startswith(room)), WIDER)
    return [near, *((tests,) for tests in wider if (tests,) != near)]
