"""What the GPUs of this box say of themselves, through NVML where it is there.

What always holds: reading never holds up the event loop, and no failure of the driver is one of the
agent: without NVML, without its Python package (``nvidia-ml-py``) or without a GPU there are no
readings.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import structlog

from transport.status import MAX_GPUS, GpuReading

READ_S: Final = 10.0
_log = structlog.get_logger()


class GpuWatch:
    """The latest ``readings``; ``run`` keeps them fresh until cancelled. ``nvml`` gives the module
    ``pynvml`` or raises ImportError."""

    def __init__(self, nvml: Callable[[], Any] | None = None, *, every_s: float = READ_S) -> None:
        self.readings: tuple[GpuReading, ...] = ()
        self._nvml = nvml or _pynvml
        self._every_s = every_s

    async def run(self) -> None:
        """Ends at once where there is nothing to read."""
        try:
            nvml = await asyncio.to_thread(_started, self._nvml)
        except Exception as error:  # noqa: BLE001 - a foreign library and its driver
            _log.debug("gpu.not_read", reason=f"{type(error).__name__}: {error}")
            return
        try:
            while True:
                self.readings = await asyncio.to_thread(read, nvml)
                await asyncio.sleep(self._every_s)
        finally:
            self.readings = ()
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def read(nvml: Any) -> tuple[GpuReading, ...]:
    """One reading of each GPU, at most ``MAX_GPUS``; blocks."""
    found: list[GpuReading] = []
    for index in range(min(MAX_GPUS, _asked(nvml.nvmlDeviceGetCount) or 0)):
        handle = _asked(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        name = _asked(nvml.nvmlDeviceGetName, handle) or ""
        milliwatts = _asked(nvml.nvmlDeviceGetPowerUsage, handle)
        memory = _asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = _asked(nvml.nvmlDeviceGetUtilizationRates, handle)
        found.append(
            GpuReading(
                name=(name.decode() if isinstance(name, bytes) else str(name))[:64],
                power_w=None if milliwatts is None else milliwatts / 1000.0,
                temperature_c=_asked(
                    nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
                ),
                used_bytes=None if memory is None else int(memory.used),
                total_bytes=None if memory is None else int(memory.total),
                busy_share=None if busy is None else busy.gpu / 100.0,
            )
        )
    return tuple(found)


def _asked(call: Callable[..., Any], *arguments: Any) -> Any:
    """None for what this GPU does not say."""
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - NVMLError is the foreign library's own
        return None


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _started(nvml: Callable[[], Any]) -> Any:
    module = nvml()
    module.nvmlInit()
    return module
