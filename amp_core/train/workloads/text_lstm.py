"""`text-lstm`: an LSTM language model over bytes.

Its size `logistic` is the one whose gradients need a loss scale, the live counterpart of the LSTM in Micikevicius et
al. 2017 ("Mixed Precision Training", fig. 4), which failed to train in FP16 without one and matched FP32 at a scale of
128. Why is told at `text.logistic_loss`.
"""

import math

import torch
from torch import nn

from amp_core.train.config import TrainConfig
from amp_core.train.workloads import Workload
from amp_core.train.workloads.text import VOCABULARY, language_model

CORPUS_BYTES = 8 * 2**20


class PortableLSTM(nn.LSTM):
    """`nn.LSTM` that also runs under FP16 autocast on a CPU.

    There, torch hands the layer to oneDNN, which has no FP16 LSTM on most processors and raises "could not create a
    primitive descriptor for the LSTM forward propagation primitive". In that one case oneDNN is switched off for the
    call, and torch's own LSTM of matrix products runs, in FP16 as autocast says. CUDA uses cuDNN as always.
    """

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def] # noqa: A002 - nn.LSTM's own signature
        """As `nn.LSTM.forward`."""
        under_fp16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        if input.device.type != "cpu" or not under_fp16:
            return super().forward(input, hx)
        enabled_before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return super().forward(input, hx)
        finally:
            torch.backends.mkldnn.enabled = enabled_before


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
        # Each classifier begins at the probability 1/256, as Lin et al. 2017 (RetinaNet) have it: from 1/2, all of them
        # would spend the first steps on learning that most answers are no.
        nn.init.constant_(model.head.bias, -math.log(VOCABULARY - 1))
    return language_model(model, config, CORPUS_BYTES)
