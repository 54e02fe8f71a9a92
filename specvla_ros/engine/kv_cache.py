"""The KV store: one slot per request in flight, all layers, allocated once."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the requests in flight.

    ActionFlow's is a ring buffer; here requests finish out of order, so slots come from a free list and a request's
    rows never move.

    Args:
        layers, slots, slot_rows, kv_heads, head_dim: its shape. A slot holds the prompt, the action tokens and the
            drafted nodes of one forward.

    Attributes:
        keys: [layers, slots, slot_rows, kv_heads, head_dim], rotated.
        values: like keys.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        slot_rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, slots, slot_rows, kv_heads, head_dim)
        self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.slot_rows = slot_rows
        self._free = list(range(slots))

    @property
    def slots(self) -> int:
        """Held and free."""
        return self.keys.shape[1]

    @property
    def sink_row(self) -> int:
        """The last row of the last slot, counted through all slots.

        A forward of fixed size writes there what its surplus rows have; nobody may keep anything in it.
        """
        return self.slots * self.slot_rows - 1

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None when all are held."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Frees a slot; its rows are simply overwritten by the next request.

        Raises:
            ValueError: nobody holds it.
        """
        if slot in self._free or not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not held")
        self._free.append(slot)
