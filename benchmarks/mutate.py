"""Tests that can fail: the share of small, wrong edits of pure modules that some test notices.

A mutant is one edit of one syntax node: a changed operator, comparison, number, sign or condition. It is never written.
The tests that import a module of a package are collected once. First the files named after the modules run without an
edit, which says what each test costs and which functions with mutants it calls. Then every mutant gets a fork of that
process: the edited function takes the place of the sound one, the tests that call it run from the quickest on, and the
first failure ends it. What they pass gets the same from the other files, the most specific first.

What no fork can edit (constants of a module, defaults) and what all those tests passed is judged once more by processes
that import the edited module from the start, a few test files each: first those that name it, then those that name a
module which imports it. A test that fails there must pass without the edit. A mutant that all of them pass is a
survivor, printed with its line; so is one that passed in a fork, if the time ends before the rest. Mutants that nothing
judged in time are counted as "no time", not in the rate. Those that are equivalent to the original are counted apart:
`rigs/equivalents.py` lists them, and a count that is compared with 1.5 in place of 1 is one. Mutants follow the seed.
`python benchmarks/mutate.py --mutants 30 --packages predict`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from rigs.mutants import (
    SOURCE,
    EditedImport,
    Mutant,
    compile_mutant,
    find_function,
    is_unseen,
    list_mutants,
    mark_calls,
    name_module,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analysis", "trace", "predict", "quantize", "launch/ranks", "records")
SLOW_FOLDERS = ("worker", "recipes", "cli", "test_docs")
"""Their tests start processes or execute pages: only the last judges of a survivor."""
BAR = 0.92
TEST_SECONDS = 60
"""Of processor time, so that other work on the machine makes no test seem to hang."""
ROUNDS = ((0.2, 0.4), (0.6, 0.75))
"""Shares of the time of a package, for files named after modules and for the others: until tests have run without an
edit, and until forks end."""
NUM_FILES = 5
"""Test files that one process runs with the edited module: the next have to be imported only if these pass."""
WAITING_SECONDS = 600
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not ranks")
"""Of pytest."""


def list_tests(paths: list[Path]) -> list[str]:
    """The quick tests that import one of some modules."""
    found = list_users({name_module(path) for path in paths})
    return [str(file) for file in found if not file.relative_to(ROOT / "tests").parts[0].startswith(SLOW_FOLDERS)]


def list_wider_tests(path: Path) -> list[str]:
    """The tests that import what imports the module, and slow ones that import it."""
    name = name_module(path)
    users = {name, *(name_module(file) for file in SOURCE.rglob("*.py") if name in list_imports(file))}
    sooner = {*list_tests([path])}
    return [str(file) for file in list_users(users) if str(file) not in sooner]


def list_users(modules: set[str]) -> list[Path]:
    """Test files that import one of some modules, the most specific first: those that import the fewest of ours."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if not modules.isdisjoint(list_imports(file))]
    return sorted(files, key=lambda file: sum(one.startswith("scalelab") for one in list_imports(file)))


@functools.cache
def list_imports(file: Path) -> frozenset[str]:
    """The names that a file imports, and those that its helpers among the tests do: some import a module only there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in found if name.startswith("tests."))
    return frozenset(found).union(*(list_imports(helper) for helper in helpers if helper.exists()))


def run_child(work: Callable[[], int], seconds: int, waiting_seconds: float = WAITING_SECONDS) -> bool:
    """Whether some work in a fork failed: by its code, a signal, or because it never ended."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            code = work()
        except BaseException:  # noqa: BLE001 - the child must never return into the loop
            traceback.print_exc()
        finally:
            os._exit(code)
    looked, waited = time.monotonic(), 0.0
    while waited < waiting_seconds:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.005)
        before, looked = looked, time.monotonic()
        waited += min(looked - before, 1.0)  # both may have been stopped meanwhile
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def read_clock() -> float:
    """Processor time of this process and its children, so that other work on the machine changes no draw."""
    return sum(os.times()[:4])


class Quick:
    """A plugin of pytest: examples are found, not made smaller; the test that fails is written to a file."""

    def __init__(self, failed: Path) -> None:
        self._failed = failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings.get_profile("busy"), phases=phases, derandomize=True, database=None
        )
        settings.load_profile("mutants")


class Forked(Quick):
    """A plugin of pytest that, in place of running what was collected, judges mutants in forks of this process."""

    def __init__(self, mutants: list[Mutant], seconds: float, place: Path, files: list[str]) -> None:
        super().__init__(place / "failed")
        self._mutants, self._seconds, self._place, self._files = mutants, seconds, place, files
        self._has_failed = False
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)
        self._caches: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._has_failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        paths = {str(mutant.path) for mutant in self._mutants}
        gc.unfreeze()
        for one in gc.get_objects():  # isinstance would ask some objects of torch for their class, which warns
            if type(one) is FunctionType and one.__code__.co_filename in paths:
                self._functions[one.__code__.co_filename].append(one)
            elif type(one) is functools._lru_cache_wrapper:
                self._caches.append(one)
        gc.freeze()
        items = sorted(session.items, key=lambda item: self._files.index(str(item.path)))
        named = tuple({f"test_{mutant.path.stem}" for mutant in self._mutants})
        left = set(range(len(self._mutants)))
        for is_named, shares in zip((True, False), ROUNDS, strict=True):
            chosen = [item for item in items if item.path.name.startswith(named) is is_named]
            left -= self._judge(chosen, left, *(share * self._seconds for share in shares))
        return True

    def _judge(self, items: list[Any], numbers: set[int], measured: float, judged: float) -> set[int]:
        """The mutants that these tests kill, in the time; those of the others that they call are noted as survivors."""
        killed: set[int] = set()
        mutants = {number: self._mutants[number] for number in sorted(numbers)}
        costs = self._measure(items, list(mutants.values()), measured) if mutants else {}
        for number, mutant in mutants.items():
            if read_clock() > judged:
                break
            place = f"{mutant.path}:{find_function(mutant)}"
            chosen = sorted((cost, index) for index, (cost, calls) in costs.items() if place in calls)
            if not chosen:
                continue
            seconds = 10 + int(4 * sum(cost for cost, _ in chosen))
            is_killed = run_child(functools.partial(self._try, mutant, [items[index] for _, index in chosen]), seconds)
            with (self._place / "verdicts").open("a") as file:
                file.write(f"{number} {int(is_killed)}\n")
            killed |= {number} if is_killed else set()
        return killed

    def _measure(self, items: list[Any], mutants: list[Mutant], until: float) -> dict[int, tuple[float, set[str]]]:
        """What each test costs and which functions it calls, of those that pass, seen in a process of its own."""
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            run_child(lambda: self._trace(items, mutants, until, Path(file.name)), 3600, 3600)
            return {int(index): (cost, set(calls)) for index, (cost, calls) in json.loads(file.read() or "{}").items()}

    def _trace(self, items: list[Any], mutants: list[Mutant], until: float, file: Path) -> int:
        seen: set[str] = set()
        vars(builtins)["mark_call"] = seen.add
        for path in {mutant.path for mutant in mutants}:
            self._edit(path, mark_calls(path, {find_function(one) for one in mutants if one.path == path}))
        costs: dict[int, tuple[float, list[str]]] = {}
        for index, item in enumerate(items):
            self._has_failed, began, after = False, read_clock(), items[index + 1 : index + 2]
            if began > until:
                break
            seen.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after[0] if after else None)
            if not self._has_failed:
                costs[index] = (read_clock() - began, sorted(seen))
        file.write_text(json.dumps(costs))
        return 0

    def _edit(self, path: Path, tree: ast.Module) -> None:
        """Puts the functions of an edited module in the place of the sound ones, now or when it is imported."""
        sys.meta_path.insert(0, EditedImport(path, tree))
        codes = dict(list_codes(compile(tree, str(path), "exec")))
        for function in self._functions[str(path)]:
            code = function.__code__
            function.__code__ = codes.get((code.co_qualname, code.co_firstlineno), code)

    def _try(self, mutant: Mutant, items: list[Any]) -> int:
        self._edit(mutant.path, compile_mutant(mutant))
        for cache in self._caches:
            cache.cache_clear()
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._has_failed:
                return 1
        return 0


def list_codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """All code of a module, by qualified name and first line."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield (one.co_qualname, one.co_firstlineno), one
            yield from list_codes(one)


def judge_in_forks(mutants: list[Mutant], seconds: float, place: Path) -> dict[Mutant, bool]:
    """Which mutants the collected tests kill; none of those that no test calls, or for which there was no time."""
    tests = list_tests(sorted({mutant.path for mutant in mutants}))
    verdicts = place / "verdicts"
    verdicts.write_text("")
    if run_child(lambda: run_tests(tests, place, Forked(mutants, seconds, place, tests)), 7200, 7200):
        sys.exit(f"mutate: no fork judged anything; see pytest {' '.join(OPTIONS)} {' '.join(tests)}")
    pairs = (line.split() for line in verdicts.read_text().splitlines())
    return {mutants[int(number)]: bool(int(is_killed)) for number, is_killed in pairs}


def run_tests(tests: list[str], place: Path, plugin: Quick, *more: str) -> int:
    import pytest

    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - not a file
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    code = int(pytest.main([*OPTIONS, f"--basetemp={place / 'pytest'}", *more, *tests], plugins=[plugin]))
    return 0 if code in (0, 5) else 1


class Judge:
    """Judges the mutants of a package, and keeps which tests fail without an edit."""

    def __init__(self, place: Path, *, is_quick: bool) -> None:
        self._place, self._is_quick, self._failed = place, is_quick, place / "failed"
        self._sound: dict[str, bool] = {}

    def judge(self, mutants: list[Mutant], seconds: float) -> Iterator[tuple[Mutant, bool | None]]:
        """Is it killed? None: there was no time to see."""
        deadline = read_clock() + seconds
        inside = [mutant for mutant in mutants if find_function(mutant)]
        verdicts = judge_in_forks(inside, seconds, self._place) if inside else {}
        for mutant in mutants:
            is_killed = verdicts.get(mutant)
            if not is_killed and not self._is_quick and read_clock() < deadline:
                is_killed = self._judge_from_start(mutant, deadline)
            yield mutant, is_killed

    def _judge_from_start(self, mutant: Mutant, deadline: float) -> bool:
        tests = [*list_tests([mutant.path]), *list_wider_tests(mutant.path)]
        for first in range(0, len(tests), NUM_FILES):
            if self._is_killed_by(tests[first : first + NUM_FILES], mutant):
                return True
            if read_clock() > deadline:
                break
        return False

    def _is_killed_by(self, tests: list[str], mutant: Mutant) -> bool:
        """Whether a test fails with the edit, imported from the start, and passes without it."""
        while self._fail(tests, mutant):
            failed = self._failed.read_text()
            if failed not in self._sound:
                self._sound[failed] = not self._fail([failed] if failed else tests, None)
            if self._sound[failed] or not failed:
                return self._sound.pop("", True)
        return False

    def _fail(self, tests: list[str], mutant: Mutant | None) -> bool:
        self._failed.write_text("")
        unsound = [f"--deselect={test}" for test, is_sound in self._sound.items() if not is_sound]

        def run() -> int:
            if mutant:
                sys.meta_path.insert(0, EditedImport(mutant.path, compile_mutant(mutant)))
            return run_tests(tests, self._place, Quick(self._failed), *(unsound if mutant else ()))

        return run_child(run, TEST_SECONDS * (2 if mutant else 1))


def draw_mutants(package: str, only: str, seed: int) -> list[Mutant]:
    paths = [path for path in sorted((SOURCE / "scalelab" / package).rglob("*.py")) if only in str(path)]
    mutants = [one for path in paths for one in list_mutants(path)]
    random.Random(seed).shuffle(mutants)
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="of processor time, the same for every package")
    parser.add_argument("--mutants", type=int, default=60, help="at most so many of each package")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--quick", action="store_true", help="only in forks: a survivor may still be killed by others")
    parser.add_argument("--only", default="", help="part of a module's path")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
    import numpy as np  # noqa: F401 - what every test loads is loaded once
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401

    counts: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="scalelab-mutate-") as directory:
        judge = Judge(Path(directory), is_quick=args.quick)
        for package in args.packages:
            drawn = draw_mutants(package, args.only, args.seed)[: args.mutants]
            mutants = [mutant for mutant in drawn if not is_unseen(mutant)]
            counts[package] = count = [0, 0, len(drawn) - len(mutants), 0]
            for mutant, is_killed in judge.judge(mutants, args.seconds / len(args.packages)):
                count[0] += is_killed is not None
                count[1] += is_killed is True
                count[3] += is_killed is None
                if is_killed is False:
                    print(f"survived: {mutant.place}: {mutant.words}: {mutant.text}", flush=True)
            print(f"{package}: {count[1]} of {count[0]} killed after {read_clock():.0f} CPU s", flush=True)
    return conclude(counts)


def conclude(counts: dict[str, list[int]]) -> int:
    print(f"\n{'package':<14}{'judged':>8}{'killed':>8}{'rate':>8}{'equivalent':>12}{'no time':>9}")
    for name, (judged, killed, equivalent, late) in counts.items():
        print(f"{name:<14}{judged:>8}{killed:>8}{killed / max(judged, 1):>8.0%}{equivalent:>12}{late:>9}")
    judged, killed = (sum(count[part] for count in counts.values()) for part in (0, 1))
    rates = [killed / judged if judged else 0.0 for judged, killed, *_ in counts.values()]
    print(
        f"mutate: {killed / max(judged, 1):.1%} of {judged} mutants killed, {min(rates):.0%} of a package (≥ {BAR:.0%})"
    )
    return 0 if min(rates) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
