"""torchtitan settles on a device when it is imported: on a CPU the choice has to be made for it, before any test is."""

import torch

from training.device import prepare_device

prepare_device()
# Tensors here are tiny, and ranks have processes of their own: a second thread only waits, on a core that is busy.
torch.set_num_threads(1)
