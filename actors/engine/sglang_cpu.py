"""Runs the real SGLang server on a CPU: `python sglang_cpu.py FLAGS...`, in an environment that has sglang.

It is run by path, in an interpreter that need not have Sluice. SGLang starts its workers by `spawn`, which executes
this file again in each of them, so what is mended at the top is mended everywhere.
"""

from __future__ import annotations

import os
import sys

import torch

if torch.version.cuda is None:
    # torchvision's compiled part, made for CUDA, does not load beside a torch for CPUs; its Python part only needs
    # these two operators to exist, and SGLang only needs its Python part.
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if not torch.cuda.is_available():
    # /weights_checker synchronises the device whatever it is
    torch.cuda.synchronize = lambda *_, **__: None


def main(flags: list[str]) -> None:
    """Serve until a signal ends it; no worker is left then."""
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
