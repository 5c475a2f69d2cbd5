"""The quickstart's bars: seeds 0, 1, 2 reach a mean reward of 0.85 in at most 240 s, and how sync compares.

Prints one line a run and the ratio of the times; exit code 1 if a seed misses. Times run from the start of the command
to the step at which the mean of three steps reached the bar, by the clock of the metrics.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

PIPELINE = Path(sys.executable).parent / "pipeline"
BAR, WINDOW, LIMIT_S = 0.85, 3, 240.0


def run(folder: Path, *words: str) -> tuple[float | None, list[float], float]:
    """(seconds to the bar, rewards by step, seconds to the first step) of one run."""
    started = time.time()
    subprocess.run([PIPELINE, "up", "quickstart", f"run_dir={folder}", *words], capture_output=True, check=False)
    rows = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/train"] for row in rows]
    at = [row["wall"] - started for row in rows]
    means = (sum(rewards[n - WINDOW : n]) / WINDOW for n in range(WINDOW, len(rewards) + 1))
    reached = next((n + WINDOW - 1 for n, mean in enumerate(means) if mean >= BAR), None)
    return None if reached is None else at[reached], rewards, at[0]


def main() -> int:
    """Run everything."""
    missed = 0
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, words in {
            "seed=0": ("seed=0",),
            "seed=1": ("seed=1",),
            "seed=2": ("seed=2",),
            "seed=0 sync": ("seed=0", "sync=true"),
        }.items():
            seconds, rewards, first = run(Path(scratch) / name.replace(" ", "-").replace("=", ""), *words)
            ok = seconds is not None and seconds <= LIMIT_S and rewards[0] < 0.3
            missed += not ok
            times[name] = seconds or float("inf")
            took = "never" if seconds is None else f"{seconds:.0f} s"
            print(
                f"{name:12} first step {first:.1f} s, reward {rewards[0]:.2f} -> {BAR} in {took}, "
                f"{len(rewards)} steps, last {rewards[-1]:.2f}: {'ok' if ok else 'MISSED'}",
                flush=True,
            )
    print(f"sync / async time to {BAR}: {times['seed=0 sync'] / times['seed=0']:.2f}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
