"""`text-bert`: an encoder like BERT (post-norm, GELU, tied head) that fills in masked bytes.

Of each window 15 % of the bytes are predicted: 8 in 10 of those are masked, 1 in 10 replaced by a random byte, 1 in 10
unchanged (Devlin et al. 2018, section 3.1). The head gets the predicted positions only. BERT's second segment, its
next-sentence prediction and dropout are left out.

Shapes: B batch, T time, C width, K predicted positions of a window.
"""

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import Workload
from amp_core.train.workloads.text import VOCABULARY, text_workload, windows
from amp_core.train.workloads.text_gpt import Attention

CORPUS_BYTES = 8 * 2**20
MASK = VOCABULARY
"""The token after the 256 byte values."""
INIT_STD = 0.02

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens [B, T], predicted positions [B, K], and the original bytes there [B, K]."""


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide, each in a residual with a layer norm after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads, causal=False)
        self.norm1 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:  # noqa: N803 - the suffix is the shape
        """[B, T, C] to [B, T, C]."""
        x_BTC = self.norm1(x_BTC + self.attn(x_BTC))  # noqa: N806
        out: torch.Tensor = self.norm2(x_BTC + self.proj(F.gelu(self.fc(x_BTC))))
        return out


class BERT(nn.Module):
    """Tokens [B, T] and predicted positions [B, K] to logits [B, K, vocabulary]."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] and predicted positions [B, K] to logits [B, K, vocabulary]."""
        x = self.norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, predicted[:, :, None].expand(-1, -1, x.shape[-1]))
        logits: torch.Tensor = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return logits


def predicted_count(context: int) -> int:
    """How many bytes of a window are predicted: 15 %, at least one."""
    return max(1, round(0.15 * context))


def masked_batch(text: torch.Tensor, starts: torch.Tensor, context: int, seed: int) -> Batch:
    """Windows that begin at `starts`. The predicted positions depend on `seed` and the window's start alone."""
    answers = windows(text, starts, context)[0]
    count = predicted_count(context)
    hidden, wrong = round(0.8 * count), round(0.1 * count)
    tokens = answers.clone()
    predicted = torch.empty((len(starts), count), dtype=torch.int64)
    for row, start in enumerate(starts.tolist()):
        draw = torch.Generator().manual_seed((seed * 1_000_003 + start) % 2**63)
        predicted[row] = torch.randperm(context, generator=draw)[:count]
        tokens[row, predicted[row, :hidden]] = MASK
        tokens[row, predicted[row, hidden : hidden + wrong]] = torch.randint(VOCABULARY, (wrong,), generator=draw)
    return tokens, predicted, answers.gather(1, predicted)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the predicted bytes, in nats."""
    tokens, predicted, answers = batch
    return F.cross_entropy(model(tokens, predicted).flatten(0, 1), answers.flatten())


def accuracy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Share of the bytes predicted correctly."""
    tokens, predicted, answers = batch
    right: torch.Tensor = model(tokens, predicted).argmax(-1) == answers
    return right.float().mean()


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names."""
    assert config.spec is not None
    context = config.spec.dims["context"]
    return text_workload(
        BERT(**config.spec.dims),
        config,
        CORPUS_BYTES,
        batch_of=lambda text, starts, seed: masked_batch(text, starts, context, seed),
        loss_fn=loss,
        accuracy_fn=accuracy,
    )
