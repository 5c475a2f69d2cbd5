"""`python -m tests.bench.pan [EVENTS] [RUN]`: how smoothly the timeline of 100,000 events pans and zooms in a browser.

Needs what `make test-ui` needs. The page's own frames are timed, through requestAnimationFrame, while wheel events move
the view with every frame: the time from frame to frame, and how long after a frame's begin its drawing was done. What
frames take when nothing moves is the machine's and the browser's own. The server shares the machine with them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import longlog

FRAMES = 120
GESTURES = {
    "nothing, the whole run": ("whole", "rest"),
    "pan, the whole run": ("whole", "pan"),
    "zoom, the whole run": ("whole", "zoom"),
    "pan, a tenth": ("tenth", "pan"),
    "pan, spans and arrows": ("close", "pan"),
    "zoom, spans and arrows": ("close", "zoom"),
}
GESTURE = """
([start, motion, frames]) => new Promise((resolve) => {
  const canvas = document.querySelector("canvas.lanes");
  const at = { bubbles: true, cancelable: true, clientX: canvas.getBoundingClientRect().left + 700, clientY: 400 };
  const wheel = (more) => canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ...more }));
  const gaps = [];
  let [last, n] = [0, 0];
  const work = [];
  const step = (now) => {
    if (last) gaps.push(now - last);
    work.push(performance.now() - now); // the page's own drawing was asked for earlier, so it came first
    last = now;
    if (n++ === frames) { resolve({ gaps, work }); return; }
    const way = Math.floor(n / 45) % 2 ? 1 : -1;
    if (motion === "rest") 0;
    else if (motion === "pan") wheel({ deltaX: 12 * way, deltaY: 0 });
    else wheel({ deltaY: 8 * way, ctrlKey: true });
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})
"""
ZOOM = {"whole": 0, "tenth": 3, "close": 9}
"""Wheel steps of 2x into the middle, before the gesture."""


def main(events: int, folder: Path, shots: Path | None) -> None:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    if not (folder / "run.json").exists():
        longlog.write(folder, events)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "pipeline", "ui", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            assert server.stdout is not None
            address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page(
                viewport={"width": 1440, "height": 900}
            )
            page.goto(f"{address}#timeline")
            page.locator(".pill", has_text="archived").wait_for(timeout=120_000)
            for name, (start, motion) in GESTURES.items():
                show(page, start)
                if shots:
                    page.screenshot(path=shots / f"pan-{start}.png")
                found = page.evaluate(GESTURE, [start, motion, FRAMES])
                report(name, found)
        finally:
            server.terminate()


def show(page: Any, start: str) -> None:
    """The part of the run that a gesture begins with, loaded and drawn."""
    page.locator("canvas.lanes").focus()
    page.keyboard.press("0")
    for _ in range(ZOOM[start]):
        with page.expect_response(lambda response: "/api/timeline" in response.url):
            page.keyboard.press("w")
    page.wait_for_timeout(1000)


def report(name: str, found: dict[str, list[float]]) -> None:
    gaps, work = sorted(found["gaps"]), sorted(found["work"])
    middle, late, worst = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.95)], gaps[-1]
    drawn = work[len(work) // 2], work[int(len(work) * 0.95)]
    print(
        f"{name:<24} frames p50 {middle:5.1f}  p95 {late:5.1f}  longest {worst:6.1f} ms; "
        f"drawing p50 {drawn[0]:5.1f}  p95 {drawn[1]:5.1f} ms"
    )


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as held:
        chosen = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(held) / "run"
        main(number, chosen, Path(sys.argv[3]) if len(sys.argv) > 3 else None)
