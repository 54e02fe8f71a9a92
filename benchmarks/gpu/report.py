# SPDX-License-Identifier: Apache-2.0
"""Measures everything of interest on a GPU with one command, from a bare checkout.

    python -m benchmarks.gpu.report --budget-s 540 --out report              # a GPU: OpenVLA-7B's shapes
    python -m benchmarks.gpu.report --device cpu --sizes tiny --out report   # this CPU: shows that it works

Steps run one after the other in separate processes, the most informative first, until the budget is used up. Results
are written immediately: call it again with the same --out to resume, even after it was killed. --out holds report.json,
report.html, log.txt, and a file for the current step.

Exit code: 0: every step is done; 1: a step failed; 3: nothing was measured, the reason is on stderr; 4: the budget is
used up and steps are left, call it again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import util
from pathlib import Path
from typing import Any

from benchmarks.gpu import page as gpu_page

ROOT = Path(__file__).resolve().parents[2]
DONE, FAILED, CUT = "done", "failed", "cut off"
REFUSED, LEFT = 3, 4
_NEEDED = {"torch": "torch", "numpy": "numpy", "PIL": "pillow", "safetensors": "safetensors", "yaml": "pyyaml",
           "tokenizers": "tokenizers", "typer": "typer", "rich": "rich"}  # fmt: skip
_LEAST_S = 5.0  # no step starts with less time left
_MOST_FAILURES = 2  # attempts of a failing step
_GRACE_S = 3.0


@dataclass(frozen=True)
class Step:
    """A part of the report.

    Args:
        name: as in steps.py.
        limit_s: the step is cut off after this time and resumes in the next call.
    """

    name: str
    limit_s: float


STEPS = (
    Step("environment", 60),
    Step("modes", 300),
    Step("chunks", 150),
    Step("ticks", 150),
    Step("tests", 500),
    Step("gemm", 90),
    Step("attention", 120),
    Step("operators", 180),
    Step("graphs", 150),
    Step("formats", 300),
    Step("soak", 240),
)


def main() -> int:
    """Runs the remaining steps of the report within the budget."""
    parser = arguments()
    given = parser.parse_args()
    missing = [package for module, package in _NEEDED.items() if util.find_spec(module) is None]
    if missing:
        print(f"gpu_report: packages are missing: pip install {' '.join(missing)}", file=sys.stderr)
        return REFUSED
    wanted = given.steps.split(",") if given.steps else [step.name for step in STEPS]
    unknown = set(wanted) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"unknown step {', '.join(sorted(unknown))}")
    report = Report(given.out, {"device": given.device, "sizes": given.sizes, "dry_run": given.dry_run})
    return report.run([step for step in STEPS if step.name in wanted], time.monotonic() + given.budget_s)


def arguments() -> argparse.ArgumentParser:
    """The parser of this script's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=540.0, help="time limit of this call in seconds")
    parser.add_argument("--out", type=Path, required=True, help="directory of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=("tiny", "1b", "7b"), default="7b", help="shapes of the policy")
    parser.add_argument("--steps", default="", help=f"comma-separated: {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--dry-run", action="store_true", help="simulate a GPU; nothing is computed")
    return parser


class Report:
    """The results so far, in a folder.

    Args:
        folder: created if missing.
        options: the same for all calls on a folder.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        self._options = options
        folder.mkdir(parents=True, exist_ok=True)
        self._wanted: list[str] = []
        self._file, self._log = folder / "report.json", folder / "log.txt"
        self._state: dict[str, Any] = {"options": options, "steps": {}}
        if self._file.exists():
            self._state = json.loads(self._file.read_text(encoding="utf-8"))
            if self._state["options"] != options:
                sys.exit(f"gpu_report: {folder} holds a report of {self._state['options']}: choose another --out")

    def run(self, steps: list[Step], deadline: float) -> int:
        """Runs the steps that are not done, previously failed ones last; returns the exit code."""
        self._wanted = [step.name for step in steps]
        left = [step for step in steps if not self._over(step.name)]
        for step in sorted(left, key=lambda each: self._state["steps"].get(each.name, {}).get("failures", 0)):
            if deadline - time.monotonic() < _LEAST_S:
                break
            code = self._run(step, min(step.limit_s, deadline - time.monotonic() - _GRACE_S))
            if code == REFUSED:
                return REFUSED
        states = [self._state["steps"].get(step.name, {}).get("state") for step in steps]
        print(f"gpu_report: {states.count(DONE)} of {len(steps)} steps done; {self._folder / 'report.html'}")
        if all(self._over(step.name) for step in steps):
            return 1 if FAILED in states else 0
        return LEFT

    def _over(self, name: str) -> bool:
        entry = self._state["steps"].get(name, {})
        return entry.get("state") == DONE or entry.get("failures", 0) >= _MOST_FAILURES

    def _run(self, step: Step, limit_s: float) -> int:
        entry = self._state["steps"].setdefault(step.name, {"seconds": 0.0, "failures": 0, "found": {}})
        part = self._folder / f"{step.name}.json"
        if not part.exists():  # otherwise it is newer, from a call that was killed
            part.write_text(json.dumps(entry["found"]), encoding="utf-8")
        print(f"gpu_report: {step.name}, at most {limit_s:.0f} s", flush=True)
        started = time.monotonic()
        code = self._call(step, part, limit_s)
        entry["seconds"] += time.monotonic() - started
        entry["found"] = json.loads(part.read_text(encoding="utf-8"))
        entry["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry["state"] = DONE if code == 0 else CUT if code is None else FAILED
        entry.pop("reason", None)
        if code:
            entry["failures"] += code != REFUSED  # tried again however often, once the machine is put right
            entry["reason"] = self._log.read_text(encoding="utf-8", errors="replace")[-2000:].strip().splitlines()[-1:]
        part_of_it = self._file.with_name("report.json.part")
        part_of_it.write_text(json.dumps(self._state | self._head(), indent=1), encoding="utf-8")
        os.replace(part_of_it, self._file)
        part.unlink()
        part.with_name(f"{part.name}.part").unlink(missing_ok=True)
        (self._folder / "report.html").write_text(gpu_page.page(self._state, self._wanted), encoding="utf-8")
        return code or 0

    def _head(self) -> dict[str, Any]:
        """The header that the results page shows for a report, see benchmarks/pages/gpu.py."""
        steps = self._state["steps"]
        found = steps.get("environment", {}).get("found", {}).get("environment", {})
        options = " ".join(f"--{name} {self._options[name]}" for name in ("device", "sizes"))
        head = {
            "benchmark": "gpu",
            "command": f"python -m benchmarks.gpu.report {options} --out report",
            "date": max((step.get("date", "") for step in steps.values()), default="")[:10],
        }
        return head | {name: found[name] for name in ("git_revision", "hardware", "dtype", "versions") if name in found}

    def _call(self, step: Step, part: Path, limit_s: float) -> int | None:
        """Runs a step; returns its exit code, or None if it was cut off."""
        module = "support.gpu_dry_run" if self._options["dry_run"] else "benchmarks.gpu.steps"
        command = [sys.executable, "-m", module, step.name, "--out", str(part)]
        command += ["--device", self._options["device"], "--sizes", self._options["sizes"]]
        path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "test"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
        if self._options["device"] == "cuda":
            environment.pop("TRITON_INTERPRET", None)
        with self._log.open("ab") as log:
            log.write(f"\n== {step.name}\n".encode())
            log.flush()
            # A separate process group, so that its child processes end with it.
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                _kill(process)
                log.write(f"cut off after {limit_s:.0f} s\n".encode())
                return None
            except BaseException:  # Ctrl-C does not reach its group: it would run beside the next call's steps
                _kill(process)
                raise
        if code == REFUSED:
            print(self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1], file=sys.stderr)
        return code


def _kill(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
