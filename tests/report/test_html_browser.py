"""Pages as readers see them: in a browser, with every kind of chart, wide and narrow, light and dark."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.files import pack_runs
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, Trial
from scalelab.report.charts.step_times import plot_timeline
from scalelab.report.document import Chart, Document, Section, Table, render_json
from scalelab.report.findings import Caution
from scalelab.report.renderers.html import render_html
from scalelab.report.renderers.theme import LEGEND_SIGN, LETTER, apply_theme, list_names
from scalelab.runs.experiment import run_study
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.cli.commands import QUICK, answer
from tests.report.browser import Seen, start_browser
from tests.report.samples import COLUMNS, as_findings, build_strong_scaling
from tests.studies.answers import set_machine

pytestmark = pytest.mark.slow

MLP = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
LENET = Job(workload="lenet", device="cpu")
JOBS = {
    "dimensions": Job(workload="transformer", device="cpu"),
    "large-batch": LENET,
    "loader-workers": LENET,
    "quantize": LENET,
}
HOSTILE = (
    '<script>document.title = "taken"</script>',
    '"><img src=x onerror="document.title=\'taken\'">',
    "'; alert(1); //",
    "</script><!-- ${7*7} {{7*7}}",
    "שלום עולם \u202eright to left\u202c",
    "👩🏽‍🚀 🚀",
    "x" * 300,
)


@pytest.fixture(scope="module")
def browser(launcher: LocalLauncher) -> Iterator[Seen]:
    """Closed without a trace; the server of ranks, which a test here uses, is there before and after."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with start_browser() as seen:
        yield seen
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not psutil.wait_procs(left, timeout=10)[1]


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Which processes a browser has for its windows is its own affair until it is closed."""


@pytest.fixture
def seen(browser: Seen) -> Iterator[Seen]:
    """The one window, as wide as a desk's and light, with nothing to complain about afterwards."""
    browser.page.set_viewport_size({"width": 1400, "height": 900})
    browser.take_complaints()
    yield browser
    browser.page.evaluate("() => { try { localStorage.clear(); } catch { /* about:blank has none */ } }")
    browser.page.goto("about:blank")
    assert browser.take_complaints() == []


def take_seconds(trial: Trial) -> float:
    return 0.1 / trial.num_ranks + 0.01 * trial.global_batch / 32


def play_study(name: str, runs_dir: Path, **fields: Any) -> tuple[RunStore, Document]:
    """A study with its own defaults, as short as it can be, played from a formula."""
    kind = load_study(name)
    names = {one.name for one in dataclasses.fields(kind)}
    few = Sampling(rounds=3, steps=8, phase_steps=2, comm_free_steps=2)
    own: dict[str, Any] = {"sampling": few} if "sampling" in names and name != "quantize" else {}
    if name not in ("collectives", "io-formats"):
        own["job"] = JOBS.get(name, MLP)
    launcher = FakeLauncher(
        take_seconds, noise=0.02, comm_seconds=lambda trial: 0.002 * (trial.num_ranks > 1), **fields
    )
    return run_study(kind(**own), runs_dir=runs_dir, launcher=launcher)


def write_page(document: Document, directory: Path, store: RunStore | None = None) -> Path:
    file = directory / "report.html"
    archive = None if store is None else pack_runs([store.path])
    file.write_text(render_html(document, archive=archive), encoding="utf-8")
    return file


def name_shape(chart: Chart) -> frozenset[str]:
    """What a chart is drawn with: its marks and how it is divided."""
    found = set(re.findall(r'"mark": (?:\{[^{}]*?"type": )?"([a-z]+)"', json.dumps(chart.spec)))
    return frozenset(found | {part for part in ("facet", "layer", "hconcat", "vconcat") if part in chart.spec})


def collect_kinds(runs_dir: Path) -> Document:
    """A chart of every kind that a study draws, each in its section, with the tables of that."""
    known: set[frozenset[str]] = set()
    sections = []
    for name in STUDIES:
        for section in play_study(name, runs_dir)[1].sections:
            shapes = {name_shape(chart): chart for chart in section.charts if name_shape(chart) not in known}
            known |= shapes.keys()
            sections += [dataclasses.replace(section, charts=tuple(shapes.values()))] if shapes else []
    return Document(title="Every kind of chart", sections=tuple(sections))


def test_every_kind_of_chart_is_drawn_readable_and_fits(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide and light, then narrow and dark."""
    set_machine(monkeypatch, 4)
    document = collect_kinds(tmp_path / "runs")
    charts = [chart for section in document.sections for chart in section.charts]
    assert len(charts) >= 8
    seen.open(write_page(document, tmp_path))
    assert seen.page.title().startswith(document.title)
    marks = seen.count_marks()
    assert len(marks) == len(charts)
    assert all(marks), f"charts without marks: {marks}"
    assert seen.measure_overflow() <= 0
    assert seen.find_faint() == []
    seen.page.set_viewport_size({"width": 400, "height": 900})
    assert seen.switch() == "dark"
    seen.resize(400)
    assert seen.measure_overflow() <= 0
    assert seen.find_faint() == []
    assert all(seen.count_marks())
    seen.switch()


@pytest.fixture
def scaling(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    """The report of a strong scaling, open, with a configuration that failed."""
    set_machine(monkeypatch, 4)
    store, document = play_study("strong-scaling", tmp_path, failures={"ddp-4": Status.OUT_OF_MEMORY})
    seen.open(write_page(document, tmp_path, store))
    return document


def list_rows(document: Document, chart: int) -> list[dict[str, Any]]:
    """The data of a chart, as `--json` writes them."""
    data = json.loads(render_json(document))
    spec = [one for section in data["sections"] for one in section["charts"]][chart]["spec"]
    found: list[dict[str, Any]] = []

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            found.extend(part.get("values", []) if isinstance(part.get("values"), list) else [])
            for value in part.values():
                collect(value)
        elif isinstance(part, list):
            for value in part:
                collect(value)

    collect(spec)
    return [row for row in found if isinstance(row, dict)]


def test_pointing_at_a_mark_tells_the_numbers_of_the_json(seen: Seen, scaling: Document) -> None:
    num_told = 0
    for chart in range(len(seen.count_marks())):
        rows = [row for row in list_rows(scaling, chart) if any(name.endswith("_text") for name in row)]
        for point in seen.list_points(chart)[:4]:
            told = seen.point_at(point).split("\n")
            texts = list_texts(seen.read_datum(point))
            assert texts
            assert texts <= set(told)
            assert any(list_texts(row) == texts for row in rows)
            num_told += 1
    assert num_told >= 4


def list_texts(row: dict[str, Any]) -> set[str]:
    """What a tooltip must say of a row of data."""
    return {str(text) for name, text in row.items() if name.endswith("_text")}


def test_a_click_on_the_legend_puts_a_series_away_and_brings_it_back(seen: Seen, scaling: Document) -> None:
    look = """() => {
      const marks = [...document.querySelectorAll(".plot")[0].querySelectorAll(".role-mark path")];
      const own = marks.filter((mark) => mark.__data__.datum?.series === SERIES);
      return own.filter((mark) => getComputedStyle(mark).opacity > 0).length;
    }"""
    first = seen.page.locator(".plot").nth(0)
    series = first.locator(".role-legend-label text").nth(0).text_content()
    count = look.replace("SERIES", json.dumps(series))
    before = seen.page.evaluate(count)
    assert before > 0
    first.locator(".role-legend-symbol path").nth(0).click(force=True)
    seen.page.wait_for_function(f"() => ({count})() === 0", timeout=5_000)
    first.locator(".role-legend-symbol path").nth(0).click(force=True)
    seen.page.wait_for_function(f"() => ({count})() === {before}", timeout=5_000)


def test_what_was_put_away_stays_away_in_other_colours_and_widths(seen: Seen, scaling: Document) -> None:
    first = seen.page.locator(".plot").nth(0)
    first.locator(".role-legend-symbol path").nth(0).click(force=True)
    faded = """() => [...document.querySelectorAll(".plot")[0].querySelectorAll(".role-legend-label text")]
      .map((text) => Number(getComputedStyle(text).opacity) < 1)"""
    only_first = f"() => ({faded})().every((one, place) => one === (place === 0))"
    away = "() => scalelabReport.plots[0].view.data('hidden_store').length === 1"
    for change in (lambda: None, seen.switch, lambda: seen.resize(700), seen.switch):
        change()
        seen.page.wait_for_function(away, timeout=5_000)
        seen.page.wait_for_function(only_first, timeout=5_000)
    first.locator(".role-legend-symbol path").nth(0).click(force=True)
    seen.page.wait_for_function(f"() => ({faded})().every((one) => !one)", timeout=5_000)


def test_what_was_put_away_tells_nothing(seen: Seen, scaling: Document) -> None:
    point = next(one for one in seen.list_points(0) if one["datum"].get("key"))
    assert seen.point_at(point)
    names = seen.page.locator(".plot").nth(0).locator(".role-legend-label text").all_text_contents()
    symbols = seen.page.locator(".plot").nth(0).locator(".role-legend-symbol path")
    for number in range(len(names)):
        symbols.nth(number).click(force=True)
    seen.page.mouse.move(2, 2)
    seen.page.mouse.move(point["x"], point["y"], steps=3)
    seen.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 50)))")
    assert seen.page.locator(".tip.shown").count() == 0


def test_what_is_pointed_at_stands_out_in_every_chart(seen: Seen, scaling: Document) -> None:
    point = next(one for one in seen.list_points(0) if one["datum"].get("key"))
    key = point["datum"]["key"]
    others = """(key) => scalelabReport.plots.slice(1).map((plot) =>
      [...plot.box.querySelectorAll(".role-mark path")].filter((mark) => mark.__data__.datum?.key === key)
        .map((mark) => mark.getBoundingClientRect().width + parseFloat(getComputedStyle(mark).strokeWidth || 0))
        .reduce((sum, one) => sum + one, 0))"""
    before = seen.page.evaluate(others, key)
    seen.point_at(point)
    is_larger = f"(key) => ({others})(key).some((one, i) => one > {json.dumps(before)}[i] + 0.5)"
    seen.page.wait_for_function(is_larger, arg=key, timeout=5_000)
    seen.page.mouse.move(2, 2)
    seen.page.wait_for_function(
        "() => scalelabReport.plots.every((p) => !p.hasFocus || p.view.signal('focus') === null)"
    )


def test_raw_data_and_pictures_can_be_taken_from_the_page(seen: Seen, scaling: Document, tmp_path: Path) -> None:
    taken = {}
    for link in seen.page.locator(".downloads a").all():
        with seen.page.expect_download() as waiting:
            link.click()
        taken[waiting.value.suggested_filename] = waiting.value.path().read_bytes()
    (archive,) = (content for name, content in taken.items() if name.endswith(".zip"))
    run = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert archive == pack_runs([run]).content
    assert json.loads(taken["strong-scaling.json"]) == json.loads(render_json(scaling))
    assert taken["strong-scaling.csv"].startswith(b"table,row,column")
    for kind, beginning in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with seen.page.expect_download() as waiting:
            seen.page.locator(f"button[data-format={kind}]").first.click()
        assert waiting.value.path().read_bytes().startswith(beginning)


def test_the_page_dresses_charts_as_the_other_formats_do(seen: Seen, scaling: Document) -> None:
    view = {"mark": "point", "encoding": {}}
    specs = [json.loads(json.dumps(chart.spec)) for section in scaling.sections for chart in section.charts] + [
        {"vconcat": [view, {"hconcat": [view, view]}]},
        {"facet": {"row": {"field": "a"}}, "spec": view},
        {"facet": {"field": "a"}, "columns": 3, "spec": view, "config": {"axis": {"grid": True}}},
    ]
    for spec in specs:
        entry = max((len(name) for name in list_names(spec)), default=0) * LETTER + LEGEND_SIGN
        for mode, width in (("light", 360), ("dark", 900)):
            arguments = [spec, round(entry, 1), mode, width]
            made = seen.page.evaluate("(args) => scalelabReport.applyTheme(...args)", arguments)
            assert made == json.loads(json.dumps(apply_theme(spec, is_dark=mode == "dark", width=width)))


def test_print_is_light_and_unfolded(seen: Seen, scaling: Document, tmp_path: Path) -> None:
    seen.switch()
    seen.page.evaluate(
        """() => window.addEventListener("beforeprint", async () => {
          for (let turn = 0; turn < 2000; turn += 1) await null;
          window.printed = [document.documentElement.dataset.theme, document.querySelector("details").open,
            ...scalelabReport.plots.map((plot) => plot.box.dataset.drawn)];
        })"""
    )
    assert seen.page.pdf().startswith(b"%PDF")
    seen.page.wait_for_function("() => window.printed")
    assert seen.page.evaluate("window.printed") == ["light", True, *["light"] * len(seen.count_marks())]
    seen.page.wait_for_function("() => scalelabReport.plots.every((plot) => plot.box.dataset.drawn === 'dark')")
    seen.switch()


def make_hostile() -> Document:
    """A document in which every text is what an attacker, or a bad day, would choose."""
    every = " ".join(HOSTILE)
    table = Table(
        title=every,
        columns=tuple(
            dataclasses.replace(column, header=HOSTILE[n % len(HOSTILE)], note=every)
            for n, column in enumerate(COLUMNS)
        ),
        rows=build_strong_scaling().tables[0].rows,
        notes=HOSTILE,
    )
    rows = [
        {"x": number, "y": number, "series": name, "key": name, "x_text": name} for number, name in enumerate(HOSTILE)
    ]
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": HOSTILE[0]},
        "y": {"field": "series", "type": "nominal"},
        "color": {"field": "series", "type": "nominal", "scale": {"domain": list(HOSTILE)}},
        "tooltip": [{"field": "x_text", "type": "nominal", "title": HOSTILE[1]}],
    }
    spec = {
        "height": 200,
        "data": {"values": rows},
        "mark": {"type": "point", "size": 200, "filled": True},
        "encoding": encoding,
    }
    return Document(
        title=HOSTILE[0],
        question=HOSTILE[1],
        setting=every,
        sections=(
            Section(
                heading=every,
                paragraphs=HOSTILE,
                tables=(table,),
                charts=(Chart(title=HOSTILE[3], spec=spec, caption=every),),
            ),
        ),
        findings=as_findings((every, *HOSTILE)),
        cautions=tuple(Caution(message=text, next_step=text) for text in HOSTILE),
        environment=tuple((text, text) for text in HOSTILE),
    )


def test_hostile_texts_are_shown_as_text_and_break_nothing(seen: Seen, tmp_path: Path) -> None:
    document = make_hostile()
    seen.open(write_page(document, tmp_path))
    assert seen.page.title().startswith(HOSTILE[0])
    words = seen.page.inner_text("body")
    for text in (*HOSTILE[:4], "שלום עולם", "🚀", HOSTILE[6]):
        assert text in words
    assert seen.page.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert seen.measure_overflow() <= 0
    assert all(seen.count_marks())
    point = next(one for one in seen.list_points(0) if one["datum"]["series"] == HOSTILE[0])
    assert HOSTILE[0] in seen.point_at(point)
    seen.resize(400)
    assert seen.measure_overflow() <= 0
    assert seen.find_faint() == []


def test_a_chart_that_loads_from_elsewhere_gets_nothing(seen: Seen, tmp_path: Path) -> None:
    spec = {"data": {"url": "https://example.org/data.json"}, "mark": "point", "encoding": {}}
    document = Document(title="Loads", sections=(Section(charts=(Chart(title="remote", spec=spec),)),))
    seen.open(write_page(document, tmp_path))
    assert not [one for one in seen.take_complaints() if one.startswith("request")]


def make_timeline(num_events: int) -> Document:
    """One rank that computes all the time."""
    rows = [
        {"start": number / 100, "duration": 0.008, "name": f"event {number}", "lane": "rank 0", "series": "compute"}
        for number in range(num_events)
    ]
    return Document(title="Timeline", sections=(Section(charts=(plot_timeline(title="A step", rows=rows),)),))


def test_a_timeline_is_zoomed_by_its_buttons(seen: Seen, tmp_path: Path) -> None:
    seen.open(write_page(make_timeline(100), tmp_path))
    shown = "() => { const [low, high] = scalelabReport.plots[0].view.scale('x').domain(); return high - low; }"
    whole = seen.page.evaluate(shown)
    seen.page.get_by_text("Zoom in").click()
    seen.page.wait_for_function(f"() => Math.abs(({shown})() - {whole / 2}) < 1e-6", timeout=5_000)
    seen.switch()
    seen.page.wait_for_function(f"() => Math.abs(({shown})() - {whole / 2}) < 1e-6", timeout=5_000)
    seen.page.get_by_text("All", exact=True).click()
    seen.page.wait_for_function(f"() => Math.abs(({shown})() - {whole}) < 1e-6", timeout=5_000)


def test_a_chart_of_very_many_marks_is_drawn_as_pixels(seen: Seen, tmp_path: Path) -> None:
    seen.open(write_page(make_timeline(4500), tmp_path))
    assert seen.page.locator(".plot canvas").count() == 1
    assert all(seen.count_marks())


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
def test_a_real_run_writes_a_page_that_is_drawn(seen: Seen, tmp_path: Path) -> None:
    flags = ["--ranks", "1", "2", "--rounds", "2", "--html", "report.html"]
    done = answer("run", "strong-scaling", *QUICK, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen.open(tmp_path / "report.html")
    assert len(seen.count_marks()) >= 4
    assert all(seen.count_marks())
    assert seen.measure_overflow() <= 0
    assert seen.find_faint() == []


def test_without_scripts_words_and_tables_are_there(browser: Seen, tmp_path: Path) -> None:
    file = write_page(build_strong_scaling(), tmp_path)
    context = browser.page.context.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert "1.92 ± 0.02" in page.inner_text("table")
    assert "JavaScript" in page.inner_text(".note")
    context.close()
