"""The page over the runs, looked at in a browser: list, search, a run, two runs, and a study that goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.serve.server import PageServer
from tests.report import browser
from tests.report.browser import Seen, start_browser

HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\"> עברית 😀"
LONG = "<b>" + "x" * 180
STUDY = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
PATIENCE = 30_000


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: a good one, one with a failure in hostile words, one that has a hostile name and was cut short."""
    place = tmp_path_factory.mktemp("looked-at") / "runs"
    run_study(STUDY, runs_dir=place, launcher=FakeLauncher(lambda trial: 1.0 / trial.num_ranks))
    failing = FakeLauncher(lambda trial: 1.0, failures={"ddp-2": Status.CRASHED})
    failed, _ = run_study(STUDY, runs_dir=place, launcher=failing)
    for name in failed.record.trials:
        if failed.result(name).status is Status.CRASHED:
            failed.save_result(replace(failed.result(name), reason=HOSTILE))
    cut, _ = run_study(STUDY, runs_dir=place, launcher=FakeLauncher(lambda trial: 1.1 / trial.num_ranks))
    (cut.trial_directory(cut.record.trials[-1]) / "result.json").unlink()
    cut.path.rename(place / f"{cut.name}-{LONG}")
    return place


@pytest.fixture(scope="module")
def window(server: PageServer) -> Iterator[Seen]:
    """A window that may ask this server, and nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser, "is_own", lambda url: url.startswith((server.address, "data:", "blob:", "about:")))
        with start_browser() as seen:
            yield seen


@pytest.fixture
def seen(window: Seen) -> Iterator[Seen]:
    window.take_complaints()
    yield window
    window.page.goto("about:blank")
    window.page.set_viewport_size({"width": 1400, "height": 900})


def open_list(seen: Seen, server: PageServer) -> list[str]:
    seen.page.goto(server.address)
    seen.page.wait_for_selector("tbody tr", timeout=PATIENCE)
    return list(seen.page.locator("tbody tr a").all_inner_texts())


def wait_for_report(seen: Seen, title: str) -> str:
    """The words of a report in its frame, once its charts are drawn."""
    inside = seen.page.frame_locator(f'iframe[title="{title}"]')
    inside.locator("html[data-ready=true] .plot .role-mark path").first.wait_for(state="attached", timeout=PATIENCE)
    return str(inside.locator("body").inner_text())


def check_look(seen: Seen) -> None:
    """At both widths, in both colours: nothing overflows, everything can be read."""
    for width in (400, 1400):
        seen.page.set_viewport_size({"width": width, "height": 900})
        assert seen.measure_overflow() <= 0, width
    for colours in ("dark", "light"):
        seen.page.emulate_media(color_scheme=colours)
        assert seen.page.evaluate(browser.FIND_FAINT)["faint"] == [], colours
    assert seen.take_complaints() == []


def test_runs_are_listed_newest_first_and_searched(seen: Seen, server: PageServer, runs_dir: Path) -> None:
    names = open_list(seen, server)
    assert names == [path.name for path in reversed(find_runs(runs_dir))]
    assert seen.page.inner_text("p.quiet").startswith("3 runs")
    check_look(seen)
    seen.page.set_viewport_size({"width": 400, "height": 900})
    assert seen.page.locator("tbody tr a").last.bounding_box()["height"] < 60, "a name takes at most two lines"
    seen.page.set_viewport_size({"width": 1400, "height": 900})
    seen.page.fill("input[type=search]", "strong failed")
    seen.page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1", timeout=PATIENCE)
    assert seen.page.inner_text("tbody td.failed") == "complete, 2 failed"
    seen.page.fill("input[type=search]", "nothing like this")
    seen.page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 0", timeout=PATIENCE)
    assert seen.take_complaints() == []


def test_a_hostile_name_is_text_in_the_list_and_on_its_page(seen: Seen, server: PageServer) -> None:
    name = open_list(seen, server)[0]
    assert name.endswith(LONG)
    seen.page.click("tbody tr a")
    seen.page.wait_for_selector("#progress", timeout=PATIENCE)
    assert seen.page.inner_text("#where") == name
    assert "interrupted" in seen.page.inner_text("#progress")
    assert any("have not run yet" in words for words in seen.page.locator(".caution").all_inner_texts())
    wait_for_report(seen, f"Report of {name}")
    assert "null" not in seen.page.inner_text("main")
    check_look(seen)


def test_a_failed_trial_is_told_with_its_reason_as_text(seen: Seen, server: PageServer, runs_dir: Path) -> None:
    failed = find_runs(runs_dir)[1]
    seen.page.goto(f"{server.address}run/{failed.name}")
    report = wait_for_report(seen, f"Report of {failed.name}")
    assert "<script>document.title='owned'</script>" in report
    seen.page.click("summary")
    seen.page.wait_for_selector("tbody tr", timeout=PATIENCE)
    row = seen.page.locator("tbody tr", has_text="crashed").first
    row.locator("button").click()
    seen.page.wait_for_selector("tbody a", timeout=PATIENCE)
    assert "result.json" in row.inner_text()
    assert "owned" not in seen.page.title()
    assert (
        seen.page.frame_locator("iframe")
        .locator("script, img")
        .evaluate_all("(found) => found.every((one) => !one.hasAttribute('onerror'))")
    )
    check_look(seen)


def test_two_chosen_runs_stand_side_by_side(seen: Seen, server: PageServer, runs_dir: Path) -> None:
    open_list(seen, server)
    boxes = seen.page.locator("tbody input[type=checkbox]")
    assert seen.page.is_disabled("button >> nth=0")
    boxes.nth(2).check()
    boxes.nth(1).check()
    seen.page.click("text=Compare 2 chosen")
    assert "Comparison" in wait_for_report(seen, "Comparison")
    for run in find_runs(runs_dir)[:2]:
        assert "Strong scaling" in wait_for_report(seen, f"Report of {run.name}")
    check_look(seen)


class SteppedLauncher(FakeLauncher):
    """Plays the next trial when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda trial: 1.0 / trial.num_ranks)
        self.turns = threading.Semaphore(0)

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        assert self.turns.acquire(timeout=120)
        return replace(super().launch(trial, directory), wall_seconds=7.0)


def test_a_running_study_is_watched_to_its_end(seen: Seen, server: PageServer, runs_dir: Path) -> None:
    launcher = SteppedLauncher()
    study = threading.Thread(
        target=run_study, args=(STUDY,), kwargs={"runs_dir": runs_dir, "launcher": launcher}, daemon=True
    )
    known = set(find_runs(runs_dir))
    study.start()
    try:
        while not (new := set(find_runs(runs_dir)) - known):
            study.join(0.05)
        (path,) = new
        trials = RunStore.open(path).record.trials
        seen.page.goto(f"{server.address}run/{quote(path.name)}")
        wait_for_progress(seen, f"0 of {len(trials)} trials · running · now {trials[0]}")
        assert "about – left" in seen.page.inner_text("#progress")
        launcher.turns.release(3)
        wait_for_progress(seen, f"3 of {len(trials)} trials · running · now {trials[3]}")
        assert f"about {7 * (len(trials) - 3)} s left" in seen.page.inner_text("#progress")
        launcher.turns.release(len(trials))
        wait_for_progress(seen, f"{len(trials)} of {len(trials)} trials · complete")
        assert "2.00" in seen.page.inner_text(".finding")
        inside = seen.page.frame_locator("iframe")
        inside.locator("html[data-ready=true] body", has_text="ddp × 2").wait_for(timeout=PATIENCE)
        assert "have not run yet" not in inside.locator("body").inner_text()
        assert seen.take_complaints() == []
    finally:
        launcher.turns.release(1000)
        study.join(60)


def wait_for_progress(seen: Seen, words: str) -> None:
    look = "(words) => (document.querySelector('#progress') || {}).textContent?.startsWith(words)"
    seen.page.wait_for_function(look, arg=words, timeout=PATIENCE)
