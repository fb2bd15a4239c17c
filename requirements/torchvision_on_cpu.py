"""Lets torchvision be imported beside a CPU build of torch.

The torchvision of PyPI is built for CUDA. Beside a CPU build of torch its compiled operators can't be loaded, and its
import then fails where it describes two of them. transformers imports it for the resizing of pictures alone, which is
plain torch. `make install-vllm` copies this file into the environment, with a `.pth` file that imports it in each
process: it declares the two operators right before torchvision is imported.
"""

import sys


class OperatorDeclarer:
    """Is a finder of modules that finds nothing, and declares the operators when torchvision is looked for."""

    def __init__(self):
        self.libraries = []

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.libraries.append(library)  # The operators are gone with the object that has declared them.
        return None


DECLARER = OperatorDeclarer()
"""Stays as long as the process, and the operators with it."""
sys.meta_path.insert(0, DECLARER)
