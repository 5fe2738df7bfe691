"""torchtitan settles on a device when it is imported: on a CPU the choice has to be made for it, before any test is."""

from training.device import prepare_device

prepare_device()
