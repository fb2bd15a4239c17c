"""Shows torch the bytes of slots, which lie in the host's memory or on a device, without a copy.

It knows nothing of models or of what a feature means.
"""

from __future__ import annotations

import torch

from fabric.transport import DeviceView, SlotView


def slot_tensor(view: SlotView) -> torch.Tensor:
    """Returns the bytes of a slot as uint8 with shape `(nbytes,)`, on the device where they lie. The tensor keeps the
    memory alive, but not the slot: it is valid as long as the view is."""
    if isinstance(view, DeviceView):
        return torch.as_tensor(view, device=torch.device("cuda", view.place.device_id))
    return torch.from_numpy(view)
