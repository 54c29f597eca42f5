"""torch's own check for NaN in backward passes, left out where we look for one: it raises before that can be told."""

from __future__ import annotations

import torch


class AnomalyCheck:
    """Leaves out the check of ``torch.autograd.set_detect_anomaly(True)`` from ``leave_out`` to ``put_back``.

    It names the autograd function alone, and the node whose result is NaN is left before any hook on it is called.
    What anomaly mode records of the forward stays on.
    """

    def __init__(self) -> None:
        self._is_out = False

    def leave_out(self) -> None:
        """Turn the check off, if it is on at this moment; to be called again, for a program may turn it on later."""
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            torch.set_anomaly_enabled(True, False)
            self._is_out = True

    def put_back(self) -> None:
        """Turn it on again, where anomaly mode is on."""
        if self._is_out and torch.is_anomaly_enabled():
            torch.set_anomaly_enabled(True, True)
        self._is_out = False
