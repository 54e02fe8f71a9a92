"""What LIBERO needs around it: its packages, its assets, its configuration, its files of initial states."""

import hashlib
import importlib.util
import json
import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.simulation.gl import require_gl

HINT = "LIBERO has an environment of its own, see docs/libero.md"
_ASSET_FOLDERS = ("scenes", "articulated_objects", "stable_hope_objects", "stable_scanned_objects")


def read_initial_states(path: Path) -> np.ndarray:
    """The fixed starts of a task, from its `.pruned_init` file.

    Returns:
        float64 [states, 1 + positions + velocities]: time and MuJoCo's state.

    Raises:
        UserError: the file is missing or holds something else.
    """
    import torch

    # The file is a pickled array. Only what an array is made of may be called, so that a file cannot run code.
    rebuild = np.empty(0).__reduce__()[0]
    allowed: list[Any] = [np.ndarray, np.dtype, np.dtypes.Float64DType]
    allowed += [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # NumPy 1 and 2
    try:
        with torch.serialization.safe_globals(allowed):
            states = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch raise their own kinds
        raise UserError(f"{path}, LIBERO's initial states, cannot be read ({error}); {HINT}") from None
    if not (isinstance(states, np.ndarray) and states.ndim == 2 and np.isfinite(states).all()):
        raise UserError(f"{path} does not hold LIBERO's initial states; {HINT}")
    return states


def require_libero(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Makes sure that LIBERO can be imported without it asking questions or downloading anything.

    Returns:
        The folder of LIBERO's package with its task files and assets.

    Raises:
        UserError: LIBERO, its assets or an OpenGL library is missing.
    """
    for name, wanted in (("hf-libero", ""), ("robosuite", "1.4.0")):
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UserError(f"{name} is not installed here; {HINT}") from None
        if wanted and found != wanted:
            raise UserError(f"LIBERO needs {name} {wanted}, but {found} is installed here; {HINT}")
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"hf-libero is installed without its package 'libero'; {HINT}")
    root = Path(next(iter(spec.submodule_search_locations))) / "libero"
    # Where this folder is missing, LIBERO would ask a model hub for it.
    missing = [folder for folder in _ASSET_FOLDERS if not (root / "assets" / folder).is_dir()]
    if missing:
        raise UserError(f"LIBERO's assets are missing: there is no {root / 'assets' / missing[0]}; {HINT}")
    require_gl()
    _write_config(root, environ)
    return root


def _write_config(root: Path, environ: MutableMapping[str, str]) -> None:
    """Gives LIBERO its config.yaml: without one its import asks questions on the terminal."""
    if not environ.get("LIBERO_CONFIG_PATH"):
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = hashlib.sha256(str(root).encode()).hexdigest()[:8]
        environ["LIBERO_CONFIG_PATH"] = str(cache / "specvla_ros" / f"libero-{digest}")
    config = Path(environ["LIBERO_CONFIG_PATH"]) / "config.yaml"
    if config.exists():
        return
    folders = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files"}
    folders |= {"datasets": "../datasets", "assets": "assets"}
    text = json.dumps({key: str(root / folder) for key, folder in folders.items()}, ensure_ascii=False)  # YAML, too
    try:
        config.parent.mkdir(parents=True, exist_ok=True)
        # In one go, since several workers may begin together.
        unfinished = config.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(config)
    except OSError as error:
        raise UserError(
            f"{config} cannot be written ({error.strerror}); set LIBERO_CONFIG_PATH to a directory of yours"
        ) from None
