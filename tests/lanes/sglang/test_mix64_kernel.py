"""Triton's kernel for checksums, in its interpreter, which the environment of SGLang has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNEL = """
import torch
from actors.engine.inside import mix64
assert mix64.has_kernel()
whole = torch.arange(20000, dtype=torch.int64)
rows = torch.randn(9, 64)
tensors = [whole, rows, rows[3:7], torch.randn(33).bfloat16(), torch.empty(0)]
pieces = [mix64.whole(tensor) for tensor in tensors] + [mix64.Piece(rows[:, 8:32], 8, (64, 1))]
mixer = mix64.Mixer(pieces)
assert mixer._table is not None
quick = mixer.run()
mix64._kernel = lambda: None
assert quick == mix64.Mixer(pieces).run(), quick
"""


def test_the_kernel_computes_what_torch_does(sglang_python: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sglang_python, "-c", KERNEL], env=env, check=True, timeout=120)
