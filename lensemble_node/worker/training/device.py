"""Where tensors of training live: on the processor, or on an accelerator if there is one."""

import torch

from lensemble.errors import ConfigError


def choose(name: str) -> torch.device:
    """The device that ``worker.device`` names: ``auto`` takes an accelerator if there is one.

    Raises:
        ConfigError: ``cuda``, and this machine or this build of torch has none.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError(
            'worker.device is "cuda" and torch finds no such device here',
            'Use "auto" or "cpu", or install the driver and a build of torch for it.',
        )
    return torch.device("cuda" if there and name != "cpu" else "cpu")
