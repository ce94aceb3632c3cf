"""The 16-bit dtypes that autocast takes, as torch has them."""

import torch

from amp_core.formats import autocast_dtypes

NARROW: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in autocast_dtypes())
