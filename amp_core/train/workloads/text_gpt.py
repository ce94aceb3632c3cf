"""`text-gpt`: a decoder like GPT-2 (pre-norm, GELU, tied head) over bytes.

The sizes that have GPT-2's shape have its vocabulary too, of which bytes use the first 256 entries: the product with
it is a third of the small one's work. It is padded from 50,257 to 50,304, a multiple of 64, as everybody who trains
GPT-2 on tensor cores has it. Dropout is left out.

Shapes: B batch, T time, C width, H heads.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import Workload
from amp_core.train.workloads.text import language_model

CORPUS_BYTES = 8 * 2**20


class Attention(nn.Module):
    """Self-attention over all heads at once; where it is causal, a position sees itself and those before it."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:  # noqa: N803 - the suffix is the shape
        """[B, T, C] to [B, T, C]."""
        batch, time, width = x_BTC.shape
        qkv = self.qkv(x_BTC).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, C / H]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """[B, T, C] to [B, T, C]."""
        x_BTC = x_BTC + self.attn(self.norm1(x_BTC))  # noqa: N806
        out: torch.Tensor = x_BTC + self.proj(F.gelu(self.fc(self.norm2(x_BTC)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Bytes [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):  # as GPT-2: residuals add up, so each adds less in a deeper model
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes [B, T] to logits [B, T, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names."""
    assert config.spec is not None
    return language_model(GPT(**config.spec.dims), config, CORPUS_BYTES)
