# SPDX-License-Identifier: Apache-2.0
"""Launches counted without a GPU."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# A number that travels with a launch; what is uploaded; memory.
_HOST = ("aten.scalar_tensor", "aten.lift_fresh", "aten.new_empty")
_VIEWS = ("aten.view", "aten.split", "aten.slice", "aten.select", "aten.unsqueeze", "aten.reshape", "aten._unsafe_view")


class Launches(TorchDispatchMode):
    """Counts what would be launches on a GPU; an operator of ours is one."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith((*_HOST, *_VIEWS, "aten.detach", "aten.unbind", "aten.alias")):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))
