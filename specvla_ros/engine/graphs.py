"""The CUDA graphs of an engine: all that it captures, or none."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.graph_capture import Capturable, capture_on

_log = logging.getLogger(__name__)


class Graphs:
    """Captures an engine's work and says how that went.

    Args:
        store: of keys or values, on the device.
        parts: of a tick that are captured; if one fails, none runs captured.

    Attributes:
        status: for diagnostics; empty where there is no GPU.
        warm: whether it was warmed up, with whatever result.
    """

    def __init__(self, store: Tensor, parts: Sequence[Capturable]) -> None:
        self._store = store
        self._parts = parts
        self.status = "off: not warmed up" if store.is_cuda else ""
        self.warm = False

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every part and compares it with the same work without capture.

        No request may be in flight: every slot is written to. Whatever goes wrong is logged and said in `status`, and
        everything then runs without capture.
        """
        self.warm = True
        self._release()
        try:
            capture = capture_on(self._store)
            if capture is None:
                return
            self.status = f"{sum(each.capture(capture) for each in self._parts)} captured"
        except Exception as error:  # the policy runs without graphs too, only slower
            self._release()
            reason = _reason(error)
            self.status = f"off: {reason}"
            _log.warning("decoding without CUDA graphs, so that launches may limit it: %s", reason)

    def _release(self) -> None:
        for each in self._parts:
            each.release()


def _reason(error: BaseException) -> str:
    """What came first, since an error while capturing makes the end of the capture fail too; in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]
