"""What this machine has, found without loading torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
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


def free_memory(numbers: Iterable[int]) -> dict[int, int]:
    """Bytes that are free on these GPUs, as a process started here numbers them; of those that can be asked."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return {}
    if driver.nvmlInit_v2() != 0:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    found = {}
    for number in numbers:
        name = str(number) if names is None else names[number] if number < len(names) else ""
        handle, memory = ctypes.c_void_p(), _Memory()
        if not name.isdigit() or driver.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)) != 0:
            continue
        if driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            found[number] = memory.free
    driver.nvmlShutdown()
    return found


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    total: int
    free: int
    used: int
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


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
