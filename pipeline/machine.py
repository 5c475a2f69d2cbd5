"""What this machine has, found without loading torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
DEVICES = Path("/dev")


def gpus() -> int:
    """NVIDIA GPUs that a process started here can use: those of the driver, less what CUDA_VISIBLE_DEVICES hides."""
    there = _counted_by_driver()
    if there is None:  # its library is not where programs look for it
        there = len(list(DEVICES.glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    listed = [name.strip() for name in visible.split(",") if name.strip()]
    return min(there, next((n for n, name in enumerate(listed) if name == "-1"), len(listed)))


def _counted_by_driver() -> int | None:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if driver.nvmlInit_v2() != 0:
        return None
    count = ctypes.c_uint(0)
    status = driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
    driver.nvmlShutdown()
    return count.value if status == 0 else None
