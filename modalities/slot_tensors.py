"""Lets torch read and write the bytes of slots, which lie in the host's memory or on a device.

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


def write_slot(view: SlotView, payload: torch.Tensor) -> None:
    """Writes the bytes of a slot, uint8 with shape `(nbytes,)`, from any device. When it returns, they are complete and
    may be announced: the transport that reads them knows nothing of torch's streams."""
    target = slot_tensor(view)
    target.copy_(payload)
    if target.is_cuda:
        torch.cuda.current_stream(target.device).synchronize()
