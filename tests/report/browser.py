"""Debian's Chromium, without a window, and what is looked at in a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--renderer-process-limit=1",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache,ProcessPerSiteUpToMainFrameThreshold",
)

FIND_FAINT = """
() => {
  const parse = (text) => {
    const found = text.match(/rgba?\\(([^)]*)\\)/);
    if (!found) return null;
    const [red, green, blue, alpha] = found[1].split(/[ ,\\/]+/).filter(Boolean).map(Number);
    return { rgb: [red, green, blue], alpha: alpha === undefined ? 1 : alpha };
  };
  const over = (top, alpha, under) => top.map((one, i) => alpha * one + (1 - alpha) * under[i]);
  const shine = (rgb) => {
    const [r, g, b] = rgb.map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour && colour.alpha > 0) layers.push(colour);
      if (colour && colour.alpha === 1) break;
    }
    return layers.reverse().reduce((under, one) => over(one.rgb, one.alpha, under), [255, 255, 255]);
  };
  const faint = [];
  let counted = 0;
  const judge = (text, colour, ground, size, weight) => {
    counted += 1;
    const seen = over(colour.rgb, colour.alpha, ground);
    const [low, high] = [shine(seen), shine(ground)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    const isLarge = size >= 24 || (size >= 18.66 && weight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)}: ${text.slice(0, 60)}`);
  };
  for (const element of document.querySelectorAll("body *:not(script):not(style):not(noscript)")) {
    if (element.closest("svg") || !element.checkVisibility()) continue;
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(element);
    if (!own || style.visibility === "hidden") continue;
    const [size, weight] = [parseFloat(style.fontSize), Number(style.fontWeight)];
    judge(element.textContent.trim(), parse(style.color), behind(element), size, weight);
  }
  for (const svg of document.querySelectorAll(".plot svg")) {
    const ground = behind(svg);
    const shapes = [...svg.querySelectorAll("path, rect, text")].map((shape) => {
      const style = getComputedStyle(shape);
      const isText = shape.tagName === "text";
      const colour = parse(isText ? style.stroke : style.fill);
      const alpha = Number(style.opacity) * Number(isText ? style.strokeOpacity : style.fillOpacity);
      return { shape, box: shape.getBoundingClientRect(), colour, alpha };
    }).filter((one) => one.colour && one.colour.alpha * one.alpha > 0.02);
    const parts = [...svg.querySelectorAll("text")];
    for (const part of parts) {
      const style = getComputedStyle(part);
      const colour = parse(style.fill);
      const alpha = Number(style.opacity) * Number(style.fillOpacity);
      if (!part.textContent.trim() || !colour || alpha < 0.02) continue;
      const box = part.getBoundingClientRect();
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      const below = shapes.filter((one) =>
        part.compareDocumentPosition(one.shape) & Node.DOCUMENT_POSITION_PRECEDING && !one.shape.contains(part)
        && one.box.left <= x && x <= one.box.right && one.box.top <= y && y <= one.box.bottom);
      if (parse(style.stroke)) continue;
      const seen = below.reduce((under, one) => over(one.colour.rgb, one.colour.alpha * one.alpha, under), ground);
      judge(part.textContent, { rgb: colour.rgb, alpha: alpha * colour.alpha }, seen, parseFloat(style.fontSize), 400);
    }
  }
  return { faint, counted };
}
"""
"""Texts whose contrast with what is behind them is less than level AA asks for, in the page and in its figures."""

COUNT_MARKS = """
() => [...document.querySelectorAll(".plot")].map((box) => {
  const canvas = box.querySelector("canvas");
  if (canvas) {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size - 1;
  }
  return [...box.querySelectorAll(".role-mark path, .role-mark text, .role-mark line")].filter((mark) => {
    const { width, height } = mark.getBoundingClientRect();
    return width + height > 0;
  }).length;
})
"""

LIST_POINTS = """
(number) => {
  const box = document.querySelectorAll(".plot")[number];
  box.scrollIntoView({ block: "center", behavior: "instant" });
  return [...box.querySelectorAll(".role-mark path, .role-mark line, .role-mark rect")].flatMap((mark) => {
    const item = mark.__data__;
    const { x, y, width, height } = mark.getBoundingClientRect();
    if (!item || !item.datum || item.tooltip === undefined || item.tooltip === null || width * height === 0) return [];
    const own = Object.fromEntries(Object.entries(item.datum).filter(([, value]) => typeof value !== "object"));
    const middle = [x + width / 2, y + height / 2];
    const isOnTop = document.elementFromPoint(...middle) === mark;
    return isOnTop ? [{ datum: own, x: middle[0], y: middle[1] }] : [];
  });
}
"""
"""The marks of a figure that can be pointed at, with their data and their middles."""


@dataclass
class Seen:
    """A page, and what went wrong in it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings in the console, and requests for anything but the file itself."""

    def open(self, file: Path) -> None:
        """Show a file and wait until all its charts are drawn."""
        self.page.goto(file.as_uri())
        self.wait()

    def wait(self) -> None:
        self.page.wait_for_selector("html[data-ready=true]", timeout=30_000)

    def switch(self) -> str:
        """Press the button of the colours; gives those that are worn now."""
        self.page.evaluate("delete document.documentElement.dataset.ready")
        self.page.click("#mode")
        self.wait()
        return str(self.page.evaluate("document.documentElement.dataset.theme"))

    def resize(self, width: int) -> None:
        """Another width of the window; waits until every chart has been drawn for it."""
        self.page.set_viewport_size({"width": width, "height": 900})
        fits = (
            "() => scalelabReport.plots.every((plot) => plot.width === plot.box.clientWidth && plot.box.dataset.drawn)"
        )
        self.page.wait_for_function(fits, timeout=30_000)

    def find_faint(self) -> list[str]:
        found = self.page.evaluate(FIND_FAINT)
        assert found["counted"] > 5
        return list(found["faint"])

    def count_marks(self) -> list[int]:
        """How many marks every chart has drawn."""
        return list(self.page.evaluate(COUNT_MARKS))

    def list_points(self, chart: int) -> list[dict[str, Any]]:
        return list(self.page.evaluate(LIST_POINTS, chart))

    def point_at(self, point: dict[str, Any]) -> str:
        """What pointing there tells, once marks have grown that do so when they are pointed at."""
        for away in (0.6, 0.3, 0.0):
            self.page.mouse.move(point["x"] + away, point["y"])
            self.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 20)))")
        self.page.wait_for_selector(".tip.shown", timeout=5_000)
        return str(self.page.inner_text(".tip"))

    def read_datum(self, point: dict[str, Any]) -> dict[str, Any]:
        """The data of the mark that lies there now: what is stressed may have grown over its neighbour."""
        look = "(at) => ({ ...document.elementFromPoint(at.x, at.y).__data__.datum })"
        return dict(self.page.evaluate(look, {"x": point["x"], "y": point["y"]}))

    def measure_overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def take_complaints(self) -> list[str]:
        taken, self.complaints[:] = list(self.complaints), []
        return taken


@contextmanager
def start_browser() -> Iterator[Seen]:
    """One window; skips the test where there is no browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="looking at pages needs playwright")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("looking at pages needs Debian's chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(SWITCHES))
        context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
        seen = Seen(page=context.new_page())
        seen.page.on("console", lambda message: note_message(seen, message.type, message.text))
        seen.page.on("pageerror", lambda error: seen.complaints.append(f"error: {error}"))
        context.on("request", lambda request: note_request(seen, request.url))
        context.route("**/*", lambda route: route.continue_() if is_own(route.request.url) else route.abort())
        yield seen
        context.close()
        browser.close()


def is_own(url: str) -> bool:
    return url.startswith(("file:", "blob:", "data:"))


def note_message(seen: Seen, kind: str, text: str) -> None:
    """Errors, and what Vega-Lite warns of: a specification that it had to guess the meaning of."""
    if kind in ("error", "warning"):
        seen.complaints.append(f"{kind}: {text}")


def note_request(seen: Seen, url: str) -> None:
    if not is_own(url):
        seen.complaints.append(f"request: {url}")
