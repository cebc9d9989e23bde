"""Utilisation of this machine's GPUs, by NVML, the library of NVIDIA's driver.

Without the library, the driver or a GPU there are no figures and no error. Driver calls can hang, so `GpuMeter` makes
them in a thread that no other code waits for.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from palestra.types.gpus import GpuReading, GpuUse

log = logging.getLogger("palestra.models")
T = TypeVar("T")
VISIBLE = "CUDA_VISIBLE_DEVICES"
EVERY_SECONDS = 2.0  # between two readings
WAIT_SECONDS = 1.0  # what an answer waits for a reading
BEGIN_SECONDS = 60.0  # between two attempts to begin with the library
MISSING = "the package nvidia-ml-py is not installed"


class GpuReader:
    """Reads the GPUs of this machine. Not thread-safe."""

    def __init__(
        self,
        visible: str | None,
        library: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the reader. `visible` are GPUs as in `CUDA_VISIBLE_DEVICES`, numbered like the driver's (CUDA's too
        with `CUDA_DEVICE_ORDER=PCI_BUS_ID`, or if all are of one kind); None: all.
        """
        self._visible, self._library, self._clock = visible, library, clock
        self._nvml: Any = None  # once it has begun
        self._problem, self._begin_at = "", 0.0

    def read(self) -> GpuReading:
        """Return the present figures of the GPUs, or the reason why there are none."""
        for _ in range(2):  # a driver that was loaded again has forgotten those who had begun
            if not self._begun():
                return GpuReading((), self._problem)
            try:
                return GpuReading(tuple(self._cards()))
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_UNINITIALIZED:
                    return GpuReading((), f"NVML: {error}")
                self._nvml = None
        return GpuReading((), "NVML forgets that it was begun with")

    def _begun(self) -> bool:
        """Return whether NVML is initialised; after a failure it is retried once a minute."""
        if self._nvml is not None:
            return True
        if self._clock() < self._begin_at:
            return False
        self._begin_at = self._clock() + BEGIN_SECONDS
        try:
            nvml = self._library()
        except ImportError:
            self._problem = MISSING
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # no library of the driver, or no driver
            self._problem = f"NVML: {error}"
            return False
        self._nvml, self._begin_at = nvml, 0.0
        return True

    def _cards(self) -> Iterator[GpuUse]:
        nvml = self._nvml
        names = range(nvml.nvmlDeviceGetCount()) if self._visible is None else card_names(self._visible)
        for place, name in enumerate(names):
            index = name if isinstance(name, int) else place
            try:
                if isinstance(name, int):
                    handle = nvml.nvmlDeviceGetHandleByIndex(name)
                else:
                    handle = nvml.nvmlDeviceGetHandleByUUID(name)
                yield self._card(index, handle)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_UNINITIALIZED:
                    raise
                yield GpuUse(index=index, problem=f"NVML: {error}")

    def _card(self, index: int, handle: Any) -> GpuUse:
        """Return the figures of a GPU; None for those that it does not have."""
        nvml = self._nvml
        name = self._figure(lambda: nvml.nvmlDeviceGetName(handle))
        memory = self._figure(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._figure(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = self._figure(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        celsius = self._figure(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuUse(
            index=index,
            name=(name.decode() if isinstance(name, bytes) else name) or "",  # bytes: of early versions
            utilisation=None if use is None else use.gpu / 100,  # NVML has per cent
            memory_used_bytes=None if memory is None else memory.used,
            memory_bytes=None if memory is None else memory.total,
            power_watts=None if power is None else power / 1000,  # NVML has milliwatts
            temperature_celsius=None if celsius is None else float(celsius),
        )

    def _figure(self, ask: Callable[[], T]) -> T | None:
        """Return a figure of a GPU; None: not supported by this GPU, or not permitted."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if error.value not in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_NO_PERMISSION):
                raise
            return None


def card_names(visible: str) -> Iterator[int | str]:
    """Yield the GPUs of `CUDA_VISIBLE_DEVICES`: numbers, or ids such as GPU-… and MIG-…"""
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            yield int(name)
        elif name in ("", "-1", "NoDevFiles"):  # CUDA looks at no further one
            return
        else:
            yield name


class GpuMeter:
    """GPU figures that are at most two seconds old."""

    def __init__(self, read: Callable[[], GpuReading], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the meter. `read` asks the driver, and may hang."""
        self._read, self._clock = read, clock
        self._lock, self._done = threading.Lock(), threading.Event()
        self._known, self._said = GpuReading(), False
        self._began: float | None = None  # time of the reading that goes on
        self._due = 0.0

    def now(self) -> GpuReading:
        """Return the newest figures; wait at most `WAIT_SECONDS` for a reading. Thread-safe."""
        with self._lock:
            if self._began is None and self._clock() >= self._due:
                self._began, self._done = self._clock(), threading.Event()
                threading.Thread(target=self._look, name="palestra-gpus", daemon=True).start()
            began, done = self._began, self._done
        if began is None or done.wait(max(began + WAIT_SECONDS - self._clock(), 0.0)):
            return self._known
        return GpuReading((), f"the driver of the cards has not answered for {self._clock() - began:.0f} s")

    def _look(self) -> None:
        try:
            known = self._read()
        except Exception as error:  # noqa: BLE001 - figures are for people to look at: without them a job goes on
            known = GpuReading((), f"the cards can't be read: {type(error).__name__}: {error}")
        if known.problem and not self._said:
            self._said = True
            log.warning("there are no figures of the graphics cards: %s", known.problem)
        with self._lock:
            self._known, self._began, self._due = known, None, self._clock() + EVERY_SECONDS
            self._done.set()
