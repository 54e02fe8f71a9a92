# SPDX-License-Identifier: Apache-2.0
"""The parts that OpenVLA-OFT adds to OpenVLA, see `oft.py`: an MLP that gives actions, and one that reads the state."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.pickled_weights import copy_weights, read_pickled, tensors_in

_EPS = 1e-8
_PARTS = ("weight", "bias")
_OF_HEAD = {
    "norm_in": "model.layer_norm1",
    "fc_in": "model.fc1",
    "norm_out": "model.layer_norm2",
    "fc_out": "model.fc2",
}


class L1Head(nn.Module):
    """An MLP over the hidden states of each action's placeholders (L1RegressionActionHead).

    Args:
        bounds: of the actions; what the mask leaves out is used as it is.
        hidden: width of a hidden state.
        blocks: with a residual.
    """

    def __init__(self, bounds: ActionStatistics, hidden: int, width: int, blocks: int) -> None:
        super().__init__()
        dims = len(bounds.low)
        self.dims = dims
        self.norm_in, self.fc_in = nn.LayerNorm(dims * hidden), nn.Linear(dims * hidden, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(blocks))
        self.norm_out, self.fc_out = nn.LayerNorm(width), nn.Linear(width, dims)
        self._bounds = bounds

    def normalised(self, hidden: Tensor) -> Tensor:
        """Hidden states [horizon * dims, hidden] to normalised actions [horizon, dims], not clipped."""
        x = F.relu(self.fc_in(self.norm_in(hidden.reshape(-1, self.dims * hidden.shape[-1]))))
        for block in self.blocks:
            x = x + F.relu(block(x))
        out: Tensor = self.fc_out(self.norm_out(x))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """The same in the robot's units, float64."""
        values = self.normalised(hidden).double()
        low, high = (torch.from_numpy(each).to(values.device) for each in (self._bounds.low, self._bounds.high))
        scaled = 0.5 * (values + 1) * (high - low + _EPS) + low
        return torch.where(torch.from_numpy(self._bounds.mask).to(values.device), scaled, values)


class ProprioProjector(nn.Module):
    """The robot's state as one row of the prompt."""

    def __init__(self, bounds: ActionStatistics, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(len(bounds.low), hidden), nn.Linear(hidden, hidden)
        self._bounds = bounds

    def normalised(self, state: np.ndarray) -> np.ndarray:
        """Float [dims] in the robot's units to float64 from -1 to 1."""
        low, high = self._bounds.low, self._bounds.high
        scaled = np.clip(2 * (state - low) / (high - low + _EPS) - 1, -1.0, 1.0)
        values: np.ndarray = np.where(self._bounds.mask, scaled, state)
        return values

    def forward(self, state: Tensor) -> Tensor:
        """Normalised state [dims] to [1, hidden]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(state)))[None]
        return out


def read_head(path: Path, bounds: ActionStatistics, hidden: int) -> L1Head:
    """The head in a file.

    Args:
        path: of the file.
        bounds: of the actions.
        hidden: width of a hidden state.

    Raises:
        UserError: it is of another kind, or damaged.
    """
    saved = _module(path)
    blocks = len({name.split(".")[2] for name in saved if name.startswith("model.mlp_resnet_blocks.")})
    first = saved.get("model.fc1.weight")
    if first is None or first.dim() != 2:
        raise UserError(f"{path} holds no L1 head (model.fc1.weight); only those are supported")
    head = L1Head(bounds, hidden, first.shape[0], blocks)
    names = {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in _OF_HEAD.items() for part in _PARTS}
    for i in range(blocks):
        for layer in (0, 1):
            theirs = f"model.mlp_resnet_blocks.{i}.ffn.{layer}"
            names |= {f"blocks.{i}.{layer}.{part}": f"{theirs}.{part}" for part in _PARTS}
    _fill(head, path, names)
    return head


def read_proprio(path: Path, bounds: ActionStatistics, hidden: int) -> ProprioProjector:
    """The projector in a file, likewise; the bounds are the state's."""
    proprio = ProprioProjector(bounds, hidden)
    _fill(proprio, path, {name: name for name, _ in proprio.named_parameters()})
    return proprio


def _module(path: Path) -> dict[str, Tensor]:
    """A file's tensors, without the prefix that training on several GPUs leaves."""
    return {name.removeprefix("module."): each for name, each in tensors_in(read_pickled(path), path).items()}


@torch.no_grad()
def _fill(module: nn.Module, path: Path, names: dict[str, str]) -> None:
    wanted = {names[ours]: parameter.detach() for ours, parameter in module.named_parameters()}
    for _ in copy_weights(_module(path), wanted, path):
        pass  # it yields after each tensor, for progress
