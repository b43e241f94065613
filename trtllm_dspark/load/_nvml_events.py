"""Xid events of a device."""

from __future__ import annotations

from typing import Any

from trtllm_dspark.load._nvml_calls import ask, call, failure_of

# A storm of events must not hold the sampler up; the rest is read with the next sample.
_MAX_EVENTS = 64


class XidEvents:
    """The queue of critical Xid events of one device; stays empty where the driver offers none.

    Raises:
        NvmlFailure: the device or the driver failed.
    """

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        wanted = pynvml.nvmlEventTypeXidCriticalError
        supported = ask(pynvml, "nvmlDeviceGetSupportedEventTypes", handle, then=int) or 0
        self._events = call(pynvml, "nvmlEventSetCreate") if supported & wanted else None
        if self._events is not None:
            registered = ask(pynvml, "nvmlDeviceRegisterEvents", handle, wanted, self._events, then=lambda _: True)
            if registered is None:
                self.close()

    def drain(self) -> tuple[int, ...]:
        """Return the numbers of the events since the last call.

        Raises:
            NvmlFailure: the device or the driver failed.
        """
        xids: list[int] = []
        while self._events is not None and len(xids) < _MAX_EVENTS:
            try:
                event = self._pynvml.nvmlEventSetWait_v2(self._events, 0)
            except self._pynvml.NVMLError as error:
                if error.value == self._pynvml.NVML_ERROR_TIMEOUT:
                    break
                raise failure_of(error) from error
            xids.append(int(event.eventData))
        return tuple(xids)

    def close(self) -> None:
        """Free the queue; errors do not matter any more."""
        events, self._events = self._events, None
        if events is not None:
            ask(self._pynvml, "nvmlEventSetFree", events, then=lambda _: None)
