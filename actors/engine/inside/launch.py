"""Runs the real SGLang server: `python launch.py FLAGS...`, in an environment that has sglang.

It is run by path, in an interpreter that need not have Sluice. SGLang starts its workers by `spawn`, which executes
this file again in each of them, so what is done at the top is done everywhere: gaps of an environment without a GPU are
filled, and with SLUICE_RECEIVER=direct the process can take weights by Sluice's own receiver. Where there is no GPU,
whose contexts don't survive it, workers are forked instead: what each would import anew is most of a start.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

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
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for spawn

if os.environ.get("SLUICE_RECEIVER") == "direct" and "sluice_inside" not in sys.modules:
    _here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]  # its names are not for all
    _spec = importlib.util.spec_from_file_location(
        "sluice_inside", _here / "__init__.py", submodule_search_locations=[str(_here)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["sluice_inside"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sluice_inside"])
    importlib.import_module("sluice_inside.hooks").install()


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
