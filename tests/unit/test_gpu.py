"""Readings of GPUs; the module ``pynvml`` is played, as no GPU is here."""

import asyncio
from types import SimpleNamespace

import pytest

from edge_agent.gpu import GpuWatch, read
from transport.status import MAX_GPUS, GpuReading


class Nvml:
    """What ``pynvml`` offers of what is used; ``broken`` calls raise as its NVMLError does."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus: int = 1, broken: tuple[str, ...] = ()) -> None:
        self.gpus = gpus
        self.broken = broken
        self.ended = False

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            return self._fails
        return object.__getattribute__(self, name)

    def _fails(self, *arguments):
        raise RuntimeError("Not Supported")

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.ended = True

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 320_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=10, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=75)


def test_what_a_gpu_says():
    assert read(Nvml()) == (
        GpuReading(
            name="NVIDIA H200",
            power_w=320.5,
            temperature_c=61,
            used_bytes=10,
            total_bytes=100,
            busy_share=0.75,
        ),
    )
    assert len(read(Nvml(gpus=50))) == MAX_GPUS


@pytest.mark.parametrize(
    "broken",
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetMemoryInfo", "used_bytes"),
        ("nvmlDeviceGetUtilizationRates", "busy_share"),
    ],
    ids=lambda pair: pair[1],
)
def test_what_a_gpu_does_not_say_is_left_out(broken):
    (reading,) = read(Nvml(broken=(broken[0],)))
    assert getattr(reading, broken[1]) is None
    assert reading.temperature_c == 61


@pytest.mark.asyncio
async def test_without_a_driver_there_are_no_readings_and_nothing_goes_on():
    def missing():
        raise ImportError("no pynvml")

    watch = GpuWatch(missing)
    await asyncio.wait_for(watch.run(), 5)
    await asyncio.wait_for(GpuWatch(lambda: Nvml(broken=("nvmlInit",))).run(), 5)
    assert watch.readings == ()


@pytest.mark.asyncio
async def test_readings_are_there_while_it_runs():
    nvml = Nvml()
    watch = GpuWatch(lambda: nvml, every_s=0.01)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(5):
        while not watch.readings:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (watch.readings, nvml.ended) == ((), True)
