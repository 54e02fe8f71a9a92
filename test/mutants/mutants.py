# SPDX-License-Identifier: Apache-2.0
"""Changes the package in one place at a time, room by room, and counts how often a test notices.

    PYTHONPATH=test python -m mutants.mutants --out benchmarks/results/mutants.json
    PYTHONPATH=test python -m mutants.mutants --only specvla_ros/serving/ --out benchmarks/results/mutants_serving.json

cosmic-ray makes the mutants; by_hand.json adds some that it does not make. Each is tried in a copy of the tree, against
the tests that are about its module first, and, while it lives, against wider ones. What was found is kept in the
session beside the copy: a run that was killed goes on where it was.
"""

import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from mutants.operators import Skips
from mutants.rooms import CONTROL, ROOT, modules, stages

from benchmarks.harness import Out, finish, result_head

HERE = Path(__file__).parent
# How much more often than another a module's mutants are drawn.
_WEIGHTS = {f"{CONTROL}{name}": 4 for name in ("guard/", "driver.py", "follower.py", "bounded_motion.py")}
_OPTIONS = ("--hypothesis-profile=mutants",)
_PATIENCE, _MIN_TIMEOUT_S, _LONGEST_S = 4.0, 30.0, 3600.0
_BY_HAND = "by hand"
_AGAIN = " again"  # after the verdict of a mutant that lived when it was first tried
_COUNTED = {"mutants": 0, "killed": 0, "timeouts": 0, "survivors": 0, "equivalent": 0}


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    key: str  # the same in every session of these sources
    module: str
    operator: str
    line: int
    was: str  # the first line that changed, without indentation
    becomes: str
    diff: str
    source: str


class Tree:
    """A copy of the tree, and a process in it that runs tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._took_s: dict[frozenset[str], float] = {}
        _copy_tree(directory)
        environment = os.environ | {
            "PYTHONPATH": str(directory / "test"),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mutants.forked_tests"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def notices(self, mutant: Mutant, tests: Sequence[str]) -> str:
        """`failed`, `timeout` or `broken` where tests notice a mutant; `passed`: they do not."""
        timeout_s = max(_MIN_TIMEOUT_S, _PATIENCE * self._unharmed_s(tests))
        module = self.directory / mutant.module
        kept = module.read_bytes()
        for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
            compiled.unlink()
        try:
            module.write_text(mutant.source, encoding="utf-8")
            return str(self._ask(tests, timeout_s, caches=False)["outcome"])
        finally:
            module.write_bytes(kept)

    def last_words(self) -> str:
        """The end of what the last tests said."""
        return "\n".join((self.directory / "output.txt").read_text(errors="replace").splitlines()[-12:])

    def _unharmed_s(self, tests: Sequence[str]) -> float:
        """How long tests take that nothing makes fail."""
        which = frozenset(tests)
        if which not in self._took_s:
            answer = self._ask(tests, _LONGEST_S, caches=True)
            assert answer["outcome"] == "passed", f"they fail without a mutant: {tests}\n{self.last_words()}"
            self._took_s[which] = answer["took_s"]
        return self._took_s[which]

    def _ask(self, tests: Sequence[str], timeout_s: float, *, caches: bool) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        existing = [test for test in tests if (self.directory / test).exists()]
        output = str(self.directory / "output.txt")
        request = {"tests": existing, "options": _OPTIONS, "timeout_s": timeout_s, "output": output, "caches": caches}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer


def _copy_tree(directory: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def main(
    context: typer.Context,
    sample: Annotated[int, typer.Option(help="Mutants that are tried, those by hand among them; 0: all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    only: Annotated[str, typer.Option(help="Comma-separated parts of modules' names; empty: all.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Try those that live once more.")] = False,
    wider: Annotated[bool, typer.Option(help="Try those that live against wider tests.")] = True,
    work: Annotated[Path, typer.Option(help="Where the session is kept.")] = ROOT / "build" / "mutants",
    out: Out = None,
) -> None:
    """Tries the mutants one after the other."""
    head = result_head(context, None, **{"cosmic-ray": metadata.version("cosmic-ray")})
    del head["date"]  # the revision says when
    head["command"] = head["command"].replace(" --no-again", "")
    work.mkdir(parents=True, exist_ok=True)
    session = _session(work)
    items = _items(session)
    left_out = Counter(result.output for _, result in session.results if result.worker_outcome is WorkerOutcome.SKIPPED)
    parts = only.split(",")
    thought_of = [mutant for mutant in by_hand() if any(part in mutant.module for part in parts)]
    keys = [key for key in draw(items, len(items), seed) if any(part in key.partition(":")[0] for part in parts)]
    of = len(thought_of) + len(keys)
    drawn = thought_of + [_mutant(items[key]) for key in keys[: max(0, sample - len(thought_of)) if sample else None]]
    verdicts = _Verdicts(work / "verdicts.jsonl", session, items)
    try:
        _try_all(drawn, verdicts, again=again, wider=wider)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    finish(head | summary(drawn, of, verdicts, dict(left_out.most_common())), out)


def _session(work: Path) -> WorkDB:
    """cosmic-ray's session of these sources, with what cannot matter marked as skipped."""
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in modules()}
    ours = (HERE / "operators.py").read_text(encoding="utf-8")
    digest = sha256(json.dumps([sources, ours]).encode()).hexdigest()[:12]
    path = work / f"{digest}.sqlite"
    if path.exists():
        return WorkDB(str(path), WorkDB.Mode.open)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    session = WorkDB(str(part), WorkDB.Mode.create)
    init([Path(name) for name in sources], session, {})
    skips = {name: Skips(source) for name, source in sources.items()}
    reasons: dict[str, list[str]] = {}
    for item in session.work_items:
        (mutation,) = item.mutations
        if reason := skips[str(mutation.module_path)].reason(mutation):
            reasons.setdefault(reason, []).append(item.job_id)
    for reason, jobs in reasons.items():
        session.set_multiple_results(jobs, WorkResult(WorkerOutcome.SKIPPED, output=reason))
    session.close()
    part.rename(path)
    return WorkDB(str(path), WorkDB.Mode.open)


def _items(session: WorkDB) -> dict[str, WorkItem]:
    """Those that are not skipped, by their keys."""
    skipped = {job for job, result in session.results if result.worker_outcome is WorkerOutcome.SKIPPED}
    return {_key(item.mutations[0]): item for item in session.work_items if item.job_id not in skipped}


def _key(mutation: MutationSpec) -> str:
    return f"{mutation.module_path}:{mutation.operator_name.rpartition('/')[2]}:{mutation.occurrence}"


def _mutant(item: WorkItem) -> Mutant:
    (mutation,) = item.mutations
    source = (ROOT / mutation.module_path).read_text(encoding="utf-8")
    mutated = mutate_code(source, get_operator(mutation.operator_name)(), mutation.occurrence)
    assert mutated is not None
    operator = mutation.operator_name.rpartition("/")[2]
    return _changed(_key(mutation), str(mutation.module_path), operator, source, mutated)


def by_hand() -> list[Mutant]:
    """Mutants that people thought of."""
    made = []
    for each in json.loads((HERE / "by_hand.json").read_text(encoding="utf-8")):
        source = (ROOT / each["module"]).read_text(encoding="utf-8")
        assert source.count(each["was"]) == 1, f"by_hand.json: '{each['name']}' is no longer in {each['module']}"
        mutated = source.replace(each["was"], each["becomes"])
        name = f"{_BY_HAND}: {each['name']}"
        made.append(_changed(name, each["module"], name, source, mutated))
    return made


def _changed(key: str, module: str, operator: str, source: str, mutated: str) -> Mutant:
    lines = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), module, module, n=1, lineterm=""))
    was = [line[1:].strip() for line in lines[2:] if line.startswith("-")] or [""]
    becomes = [line[1:].strip() for line in lines[2:] if line.startswith("+")] or [""]
    pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
    line = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), 0)
    return Mutant(key, module, operator, line, was[0], becomes[0], "\n".join(lines[2:]), mutated)


def draw(keys: Iterable[str], count: int, seed: int) -> list[str]:
    """A seeded sample by weight (Efraimidis and Spirakis 2006); a smaller one is the beginning of a larger one."""
    chances = random.Random(seed)

    def luck(key: str) -> float:
        weight: int = next((each for name, each in _WEIGHTS.items() if key.startswith(name)), 1)
        return float(chances.random() ** (1 / weight))

    lucky = sorted(((luck(key), key) for key in sorted(keys)), reverse=True)
    return [key for _, key in lucky[: max(0, count)]]


class _Verdicts:
    """What was found of each mutant, kept as it is found: in cosmic-ray's session, or, of those by hand, beside it."""

    def __init__(self, path: Path, session: WorkDB, items: dict[str, WorkItem]) -> None:
        self._path, self._session, self._items = path, session, items
        self._found: dict[str, str] = {}
        by_job = {item.job_id: key for key, item in items.items()}
        for job, result in session.results:
            if job in by_job:
                self._found[by_job[job]] = result.output or ""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._found |= dict(map(json.loads, lines))

    def of(self, mutant: Mutant) -> str:
        """`failed`, `timeout`, `broken`, `passed` by all tests, `lives` after the near ones; empty: not tried.

        `_AGAIN` follows where it lived at first.
        """
        return self._found.get(self._name(mutant), "")

    def keep(self, mutant: Mutant, verdict: str) -> None:
        name = self._name(mutant)
        self._found[name] = verdict
        if mutant.key in self._items:
            lives = verdict in ("passed", "lives")
            outcome = TestOutcome.SURVIVED if lives else TestOutcome.KILLED
            result = WorkResult(WorkerOutcome.NORMAL, output=verdict, test_outcome=outcome, diff=mutant.diff)
            self._session.set_result(self._items[mutant.key].job_id, result)
        else:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, verdict]) + "\n")

    def _name(self, mutant: Mutant) -> str:
        """Of those by hand with what they change: the list is edited."""
        changed = sha256(mutant.source.encode()).hexdigest()[:12]
        return mutant.key if mutant.key in self._items else f"{mutant.key}:{changed}"


def _try_all(drawn: Sequence[Mutant], verdicts: _Verdicts, *, again: bool, wider: bool) -> None:
    known = equivalent()
    tried = {"", "lives"} if wider else {""}
    tried |= {"passed", "lives"} if again else set()
    waiting = [each for each in drawn if verdicts.of(each) in tried and not reason_of(each, known)]
    if not waiting:
        return
    with tempfile.TemporaryDirectory(prefix="specvla_mutants_") as name:
        tree = Tree(Path(name))
        try:
            for count, mutant in enumerate(waiting, 1):
                verdict = _verdict(mutant, tree, wider=wider)
                if verdicts.of(mutant) == "passed" != verdict:
                    verdict += _AGAIN
                verdicts.keep(mutant, verdict)
                print(f"{count}/{len(waiting)} {verdict}: {mutant.key}", file=sys.stderr, flush=True)
        finally:
            tree.close()


def _verdict(mutant: Mutant, tree: Tree, *, wider: bool) -> str:
    for tests in stages(mutant.module) if wider else stages(mutant.module)[:1]:
        noticed = tree.notices(mutant, tests)
        if noticed != "passed":
            return noticed
    return "passed" if wider else "lives"


def equivalent() -> list[dict[str, str]]:
    """Mutants that do what the original does, or the same for all that matters, with the reason."""
    found: list[dict[str, str]] = json.loads((HERE / "equivalent.json").read_text(encoding="utf-8"))
    return found


def reason_of(mutant: Mutant, known: Sequence[dict[str, str]]) -> str:
    """Why a mutant is equivalent; empty: it is not known to be."""
    for each in known:
        if (each["module"], each["was"], each["becomes"]) == (mutant.module, mutant.was, mutant.becomes):
            return each["reason"]
    return ""


def summary(drawn: Sequence[Mutant], of: int, verdicts: _Verdicts, left_out: dict[str, int]) -> dict[str, Any]:
    """The figures, by module, and what lives."""
    known, by_module = equivalent(), dict[str, Counter[str]]()
    survivors, equal, drawn_at_random = [], [], Counter(mutants=0, noticed=0, noticed_at_first=0)
    for mutant in drawn:
        counts = by_module.setdefault(mutant.module, Counter(_COUNTED))
        counts["mutants"] += 1
        reason, verdict = reason_of(mutant, known), verdicts.of(mutant)
        told = {"module": mutant.module, "line": mutant.line, "operator": mutant.operator, "diff": mutant.diff}
        if reason:
            counts["equivalent"] += 1
            equal.append(told | {"reason": reason})
        elif verdict in ("passed", "lives", ""):
            counts["survivors"] += 1
            survivors.append(told)
        else:
            counts["timeouts" if verdict.removesuffix(_AGAIN) == "timeout" else "killed"] += 1
        if not (reason or mutant.key.startswith(_BY_HAND)):
            lives = verdict in ("passed", "lives", "")
            at_first = not (lives or verdict.endswith(_AGAIN))
            drawn_at_random.update(mutants=1, noticed=not lives, noticed_at_first=at_first)
    return {
        "drawn": len(drawn),
        "of": of,
        "at_random": dict(drawn_at_random),  # without those by hand and those that are equivalent
        "left_out": left_out,
        "modules": {module: dict(counts) for module, counts in sorted(by_module.items())},
        "survivors": survivors,
        "equivalent": equal,
    }


if __name__ == "__main__":
    typer.run(main)
