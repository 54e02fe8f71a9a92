# SPDX-License-Identifier: Apache-2.0
"""Nonsense in every option of every command.

A case is right where the command ends with a message in words, or runs; never with a traceback, nor by saying that it
has a bug. Each runs in a process of its own, forked from one that has the libraries; what takes minutes is left out.
"""

import importlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer.main
from attacks.bags import layouts
from attacks.tally import Tally
from PIL import Image

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.terminal import BUG, one_line_endings

_LONGEST_S, _REACHED = 60, 44
_ROBOT = Path(__file__).resolve().parents[2] / "config" / "robots" / "simulated.yaml"
# Where a command has checked all that it was given, and what takes minutes begins.
_STUBS = (
    ("specvla_ros.lab.evaluation.simulate", "run_jobs"),
    ("specvla_ros.lab.simulation.collect", "run_jobs"),
    ("specvla_ros.lab.evaluation.calibrate", "_try_on_frames"),
    ("specvla_ros.lab.planning.measure", "measure_device"),
    ("specvla_ros.lab.training.train_policy", "train_policy"),
    ("specvla_ros.lab.training.train_draft", "collect_features"),
    ("specvla_ros.lab.ros.demo.run", "start_node"),
)
_TEXTS = (
    *("", " ", "-", "--", "x", "0", "-1", "7", "1.5", "1e400", "inf", "-inf", "nan", "9" * 30, "9" * 5000, "1e-320"),
    *("[", "{", ":=", "a:=b", "decode.mode:=[", "decode.mode:={}", "decode.mode:=[[1]]", "decode.mode:=!!set {a}"),
    *("draft.nodes:=2001-99-99", f"draft.nodes:={'9' * 5000}", f"draft.nodes:={'[' * 5000}", "draft.nodes:=.nan"),
    *(
        "acceptance.bins:=[1, [2]]",
        "draft.head:=/etc",
        "draft.head:=7",
        f"draft.head:={'x' * 300}",
        "decode.mode:=spec",
    ),
    *("x" * 300, "x" * 5000, "/", ".", "..", "/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/proc/1/mem"),
    *("\udcff", "\ud800", "é中🤖", "a\nb", "\x1b[31m", "%s%n", "a/b/c", "2mm,1deg", "-5mm", "1e400mm", "0bins", "sim"),
    *("bridge_orig", "cuda:99", "orin", "1,2", "1,-1", "1," + "9" * 5000, "1" + ",1" * 5000, "[red]x[/", "table"),
)


def attack_commands(scratch: Path, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Each option of each command with each nasty value, beside options that are right.

    Args:
        scratch: directory for files.
        limit: number of cases, drawn at random; None: all.
        seed: of the drawing.
    """
    files = _files(scratch)
    cases = [
        [*command.split(), *_base(command, files, option), *given]
        for command, option, flag in options()
        for value in [*_TEXTS, *map(str, files.values())]
        for given in ([flag, value] if flag else [value],)
    ]
    if limit is not None:
        cases = random.Random(seed).sample(cases, min(limit, len(cases)))
    for module, _ in _STUBS:
        importlib.import_module(module)
    tally = Tally(slow_s=2 * _LONGEST_S)  # each begins by loading a policy
    for number, arguments in enumerate(cases):
        tally.judge(" ".join(f"{each:.60}" for each in arguments), partial(_run, arguments, scratch / str(number)))
    return tally


def options(group: Any = None, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Command, name and flag of every option that takes a value; the flag of an argument is empty.

    `group`: the commands, those of specvla if None; `prefix`: its words, before a command's own.
    """
    whole: Any = group or typer.main.get_command(app)
    for name, command in whole.commands.items():
        if hasattr(command, "commands"):
            yield from options(command, f"{prefix}{name} ")
            continue
        for parameter in command.params:
            if not getattr(parameter, "is_flag", False) and parameter.name != "help":
                flag = parameter.opts[-1] if parameter.opts[0].startswith("-") else ""
                yield f"{prefix}{name}", parameter.name, flag


def _base(command: str, files: dict[str, Path], option: str) -> list[str]:
    """What the command needs beside the option."""
    needed: dict[str, list[str]] = {
        "predict": ["--device", "cpu", "--image", str(files["picture"]), "--instruction", "lift the red cube"],
        "replay": ["--device", "cpu", "--no-progress", "--instruction", "lift the red cube", "--out", "out"],
        "simulate": ["--device", "cpu", "--out", "out", "--episodes", "1"],
        "demo": ["--device", "cpu", "--out", "out", "--episodes", "1"],
        "collect": ["--out", "out", "--episodes", "1"],
        "train-policy": ["--data", str(files["bag"]), "--out", "out", "--steps", "1"],
        "train-draft": ["--data", "sim", "--out", "out", "--frames", "300"],
        "sweep": ["--device", "cpu", "--out", "out", "--episodes", "1"],
        "calibrate": ["--device", "cpu", "--out", "out", "--data", "sim", "--frames", "1", "--world", "none"],
        "robot-model": ["--robot", "panda", "--out", "panda.xml"],
        "plan": ["--device", "orin"],
        "bench": ["--measure"],
        "robot check": [str(files["robot.yaml"])] if option != "file" else [],
        "robot stops": [str(files["bag"])] if option != "black_boxes" else [],
    }
    base = needed.get(command, [])
    if command == "replay" and option != "bag":
        base = [str(files["bag"]), *base]
    if command == "compare" and option == "second":
        base = [str(files["bag"])]
    if command == "predict" and option == "prompt_ids":
        base = base[:-2]
    flag = f"--{option.replace('_', '-')}"
    return [each for i, each in enumerate(base) if each != flag and (not i or base[i - 1] != flag)]


def _files(scratch: Path) -> dict[str, Path]:
    """Files of every kind, right and wrong."""
    scratch.mkdir(parents=True, exist_ok=True)
    found = {"bag": layouts(scratch / "bags")["zstd"], "policy": scratch / "policy"}
    shutil.copytree(nano_policy(), found["policy"])  # some commands write results into it
    Image.new("RGB", (64, 48)).save(scratch / "picture.png")
    Image.new("1", (13000, 13000)).save(scratch / "bomb.png")
    found |= {"picture": scratch / "picture.png", "bomb": scratch / "bomb.png"}
    contents = {
        "empty.json": "",
        "deep.json": "[" * 10**5 + "]" * 10**5,
        "dates.yaml": "/**: {ros__parameters: {draft: {nodes: 2001-99-99}}}",
        "right.yaml": "/**: {ros__parameters: {draft: {nodes: 8}}}",
        "strange.yaml": "/**: {ros__parameters: {1: 2, draft: [1], decode: {mode: {a: b}}, ~: ~}}",
        "laughs.yaml": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
        + "/**: {ros__parameters: {draft: {nodes: *i}}}",
        "lfs": "version https://git-lfs.github.com/spec/v1\n",
        "device.json": json.dumps({"name": 7, "kind": "measured", "dtype": [], "bandwidth_gb_s": 1e400, "sources": {}}),
        "robot.yaml": _ROBOT.read_text(encoding="utf-8"),
        "text.eps": "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }
    for name, content in contents.items():
        (scratch / name).write_text(content)
        found[name] = scratch / name
    return found


def _run(arguments: list[str], directory: Path) -> str:
    """Runs a command in a process of its own and says how it ended."""
    directory.mkdir()
    child = os.fork()
    if not child:
        _be_the_command(arguments, directory)
    _, status = os.waitpid(child, 0)
    said = (directory / ".output").read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return f"still ran after {_LONGEST_S} s"
    if code == BUG or code < 0 or "Traceback" in said:
        raise RuntimeError(f"exit code {code}: {said[-600:]}")
    return {0: "ran", 1: "ran, broke a limit", _REACHED: "ran up to the work"}.get(code, "refused")


def _be_the_command(arguments: list[str], directory: Path) -> None:
    code = 70
    try:
        signal.alarm(_LONGEST_S)
        os.chdir(directory)
        output = os.open(".output", os.O_WRONLY | os.O_CREAT)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDONLY) if not stream else output, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
        for module, name in _STUBS:
            setattr(sys.modules[module], name, _reached)
        try:
            with one_line_endings():
                app(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _reached(*_: Any, **__: Any) -> Any:
    sys.exit(_REACHED)
