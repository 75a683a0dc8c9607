"""Tests that can fail: the share of small, wrong edits of pure modules that some test notices.

A mutant is one edit of one syntax node: a changed operator, comparison, number, sign or condition. It is never written.
The tests that name a module of a package are collected once and run once without an edit, which says what each costs
and which functions it calls. Then every mutant gets a fork of that process: the edited function takes the place of the
sound one, the tests that call it run from the quickest on, and the first failure ends it.

What no fork can edit (constants of a module, defaults) and what all those tests passed is judged once more by a process
that imports the edited module from the start, first with the tests that name it, then with those that name a module
which imports it. A mutant that these pass too is a survivor, printed with its line. Those that are equivalent to the
original are counted apart: `EXPLAINED` lists them, and a count that is compared with 1.5 in place of 1 is one.
Mutants follow the seed.
`python benchmarks/mutate.py --mutants 30 --packages predict`.
"""

from __future__ import annotations

import argparse
import cProfile
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
    name_module,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analysis", "trace", "predict", "quantize", "launch/ranks", "records")
SLOW_FOLDERS = ("worker", "recipes", "cli", "test_docs")
"""Their tests start processes or execute pages: only the last judges of a survivor."""
BAR = 0.92
TEST_SECONDS = 60
"""Of processor time, so that other work on the machine makes no test seem to hang."""
WAITING_SECONDS = 600
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not ranks")
"""Of pytest."""


def list_tests(paths: list[Path]) -> list[str]:
    """The quick tests that import one of some modules."""
    names = {f"{name_module(path)} import" for path in paths}
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if any_of(names, file.read_text())]
    return [str(file) for file in files if not file.relative_to(ROOT / "tests").parts[0].startswith(SLOW_FOLDERS)]


def list_wider_tests(path: Path) -> list[str]:
    """The tests that import what imports the module, and slow ones that import it."""
    name = f"{name_module(path)} import"
    users = {name, *(f"{name_module(file)} import" for file in SOURCE.rglob("*.py") if name in file.read_text())}
    found = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if any_of(users, file.read_text())]
    return sorted({str(file) for file in found} - {*list_tests([path])})


def any_of(words: set[str], text: str) -> bool:
    return any(word in text for word in words)


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
    deadline = time.monotonic() + waiting_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def read_clock() -> float:
    """Processor time of this process and its children, so that other work on the machine changes no draw."""
    return sum(os.times()[:4])


def be_silent() -> None:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - not a file
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


class Quick:
    """A plugin of pytest: examples are found, not made smaller; directories of tests are in one place."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings.get_profile("busy"), phases=phases, derandomize=True, database=None
        )
        settings.load_profile("mutants")


class Forked(Quick):
    """A plugin of pytest that, in place of running what was collected, judges mutants in forks of this process."""

    def __init__(self, mutants: list[Mutant], seconds: float, tell: Callable[[int, bool], None]) -> None:
        self._mutants, self._seconds, self._tell = mutants, seconds, tell
        self._paths = {str(mutant.path) for mutant in mutants}
        self._has_failed = False
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)
        self._caches: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._has_failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        costs = self._measure(session.items)
        gc.unfreeze()
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in self._paths:
                self._functions[one.__code__.co_filename].append(one)
            elif isinstance(one, functools._lru_cache_wrapper):
                self._caches.append(one)
        gc.freeze()
        for number, mutant in enumerate(self._mutants):
            if read_clock() > self._seconds:
                break
            place = f"{mutant.path}:{find_function(mutant)}"
            chosen = [(cost, index) for index, (cost, calls) in costs.items() if place in calls]
            items = [session.items[index] for _, index in sorted(chosen)]
            seconds = 10 + int(4 * sum(cost for cost, _ in chosen))
            self._tell(number, bool(items) and run_child(lambda m=mutant, i=items: self._try(m, i), seconds))  # type: ignore[misc]
        return True

    def _measure(self, items: list[Any]) -> dict[int, tuple[float, set[str]]]:
        """What each test costs and which functions it calls, of those that pass, seen in a process of its own."""
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            run_child(lambda: self._trace(items, Path(file.name)), 3600, 3600)
            return {int(index): (cost, set(calls)) for index, (cost, calls) in json.load(file).items()}

    def _trace(self, items: list[Any], file: Path) -> int:
        costs: dict[int, tuple[float, list[str]]] = {}
        for index, item in enumerate(items):
            self._has_failed, began, after = False, time.process_time(), items[index + 1 : index + 2]
            watch = cProfile.Profile(builtins=False)
            watch.enable()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after[0] if after else None)
            watch.disable()
            if not self._has_failed:
                codes = [one.code for one in watch.getstats()]
                places = {f"{code.co_filename}:{code.co_firstlineno}" for code in codes if isinstance(code, CodeType)}
                costs[index] = (time.process_time() - began, sorted(place for place in places if self._is_ours(place)))
        file.write_text(json.dumps(costs))
        return 0

    def _is_ours(self, place: str) -> bool:
        return place.rpartition(":")[0] in self._paths

    def _try(self, mutant: Mutant, items: list[Any]) -> int:
        be_silent()
        sys.meta_path.insert(0, EditedImport(name_module(mutant.path), mutant))
        codes = dict(list_codes(compile(compile_mutant(mutant), str(mutant.path), "exec")))
        for function in self._functions[str(mutant.path)]:
            code = function.__code__
            function.__code__ = codes.get((code.co_qualname, code.co_firstlineno), code)
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


def judge_in_forks(mutants: list[Mutant], seconds: float, place: Path) -> dict[int, bool]:
    """Which mutants the collected tests kill, by number; none of those for which there was no time."""
    tests = list_tests(sorted({mutant.path for mutant in mutants}))
    verdicts = place / "verdicts"
    verdicts.write_text("")

    def collect() -> int:
        import pytest

        def tell(number: int, is_killed: bool) -> None:
            with verdicts.open("a") as file:
                file.write(f"{number} {int(is_killed)}\n")

        be_silent()
        plugin = Forked(mutants, seconds, tell)
        return int(pytest.main([*OPTIONS, f"--basetemp={place / 'pytest'}", *tests], plugins=[plugin]))

    run_child(collect, 7200, 7200)
    pairs = (line.split() for line in verdicts.read_text().splitlines())
    return {int(number): bool(int(is_killed)) for number, is_killed in pairs}


def judge_by_import(mutant: Mutant | None, tests: list[str], place: Path) -> bool:
    """Whether a test fails with the edit, imported from the start; None: without one."""

    def run() -> int:
        import pytest

        be_silent()
        if mutant:
            sys.meta_path.insert(0, EditedImport(name_module(mutant.path), mutant))
        code = int(pytest.main([*OPTIONS, f"--basetemp={place / 'pytest'}", *tests], plugins=[Quick()]))
        return 0 if code in (0, 5) else 1

    return run_child(run, TEST_SECONDS * (2 if mutant else 1))


class Judge:
    """Judges the mutants of a package, and keeps whether tests pass without an edit."""

    def __init__(self, place: Path, *, is_quick: bool) -> None:
        self._place, self._is_quick = place, is_quick
        self._sound: dict[tuple[str, ...], bool] = {}

    def judge(self, mutants: list[Mutant], seconds: float) -> Iterator[tuple[Mutant, bool]]:
        """As many as there is time for, with the verdict: is it killed?"""
        deadline = read_clock() + seconds
        inside = [mutant for mutant in mutants if find_function(mutant)]
        mutants = inside if self._is_quick else mutants
        verdicts = judge_in_forks(inside, seconds * (1.0 if self._is_quick else 0.5), self._place)
        killed = {inside[number] for number, is_killed in verdicts.items() if is_killed}
        yield from ((mutant, True) for mutant in mutants if mutant in killed)
        skipped = {mutant for number, mutant in enumerate(inside) if number not in verdicts}
        for mutant in mutants:
            if mutant not in killed and mutant not in skipped and read_clock() < deadline:
                yield mutant, not self._is_quick and self._judge_from_start(mutant)

    def _judge_from_start(self, mutant: Mutant) -> bool:
        return any(
            self._pass_without_edit(tests) and judge_by_import(mutant, tests, self._place)
            for tests in (list_tests([mutant.path]), list_wider_tests(mutant.path))
            if tests
        )

    def _pass_without_edit(self, tests: list[str]) -> bool:
        if tuple(tests) not in self._sound:
            self._sound[tuple(tests)] = not judge_by_import(None, tests, self._place)
        return self._sound[tuple(tests)]


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
            counts[package] = count = [0, 0, len(drawn) - len(mutants)]
            for mutant, is_killed in judge.judge(mutants, args.seconds / len(args.packages)):
                count[0] += 1
                count[1] += is_killed
                if not is_killed:
                    print(f"survived: {mutant.place}: {mutant.words}: {mutant.text}", flush=True)
            print(f"{package}: {count[1]} of {count[0]} killed after {read_clock():.0f} CPU s", flush=True)
    return conclude(counts)


def conclude(counts: dict[str, list[int]]) -> int:
    print(f"\n{'package':<14}{'judged':>8}{'killed':>8}{'rate':>8}{'equivalent':>12}")
    for name, (judged, killed, equivalent) in counts.items():
        print(f"{name:<14}{judged:>8}{killed:>8}{killed / max(judged, 1):>8.0%}{equivalent:>12}")
    judged, killed = (sum(count[part] for count in counts.values()) for part in (0, 1))
    rates = [killed / judged if judged else 0.0 for judged, killed, _ in counts.values()]
    print(
        f"mutate: {killed / max(judged, 1):.1%} of {judged} mutants killed, {min(rates):.0%} of a package (≥ {BAR:.0%})"
    )
    return 0 if min(rates) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
