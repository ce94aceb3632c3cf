"""`text-lstm`: an LSTM language model over bytes.

Its size `logistic` is the one whose gradients need a loss scale, the live counterpart of the LSTM in Micikevicius et
al. 2017 ("Mixed Precision Training", fig. 4), which failed to train in FP16 without one and matched FP32 at a scale of
128. `text.logistic_loss` explains why.
"""

import math

import torch
from torch import nn

from amp_core.settings.training import TrainConfig
from amp_core.train.cpu_layers import PortableLSTM
from amp_core.train.workloads import Workload
from amp_core.train.workloads.text import VOCABULARY, language_model

__all__ = ["LSTMLanguageModel", "PortableLSTM", "build"]

CORPUS_BYTES = 8 * 2**20


class LSTMLanguageModel(nn.Module):
    """Bytes [B, T] to logits [B, T, 256]."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.lstm = PortableLSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes [B, T] to logits [B, T, 256]."""
        hidden, _ = self.lstm(self.tokens(tokens))
        logits: torch.Tensor = self.head(hidden)
        return logits


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names."""
    assert config.spec is not None
    dims = config.spec.dims
    model = LSTMLanguageModel(dims["layers"], dims["width"])
    if config.spec.objective == "logistic":
        # Each classifier starts at the probability 1/256, as in Lin et al. 2017 (RetinaNet). From 1/2, the first steps
        # would only teach that most answers are negative.
        nn.init.constant_(model.head.bias, -math.log(VOCABULARY - 1))
    return language_model(model, config, CORPUS_BYTES)
