"""`text-bert`: an encoder like BERT (post-norm, GELU, tied head) that fills in masked bytes.

Of each window 15 % of the bytes are asked for: 8 in 10 of those are masked, 1 in 10 replaced by a random byte, 1 in 10
left as they are (Devlin et al. 2018, section 3.1). The head sees the asked positions only. What BERT has besides is
left out: the second segment, the question whether one sentence follows the other, and dropout.

Shapes: B batch, T time, C width, K asked positions of a window.
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
"""Tokens [B, T], asked positions [B, K], and the bytes that stood there [B, K]."""


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
    """Tokens [B, T] and asked positions [B, K] to logits [B, K, vocabulary]."""

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

    def forward(self, tokens: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] and asked positions [B, K] to logits [B, K, vocabulary]."""
        x = self.norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, asked[:, :, None].expand(-1, -1, x.shape[-1]))
        logits: torch.Tensor = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return logits


def asked_of(context: int) -> int:
    """How many bytes of a window are asked for: 15 %, at least one."""
    return max(1, round(0.15 * context))


def masked(text: torch.Tensor, starts: torch.Tensor, context: int, seed: int) -> Batch:
    """Windows that begin at `starts`. What is asked of a window follows from `seed` and its place in the text alone."""
    answers = windows(text, starts, context)[0]
    count = asked_of(context)
    hidden, wrong = round(0.8 * count), round(0.1 * count)
    tokens = answers.clone()
    asked = torch.empty((len(starts), count), dtype=torch.int64)
    for row, start in enumerate(starts.tolist()):
        draw = torch.Generator().manual_seed((seed * 1_000_003 + start) % 2**63)
        asked[row] = torch.randperm(context, generator=draw)[:count]
        tokens[row, asked[row, :hidden]] = MASK
        tokens[row, asked[row, hidden : hidden + wrong]] = torch.randint(VOCABULARY, (wrong,), generator=draw)
    return tokens, asked, answers.gather(1, asked)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the bytes that are asked for, in nats."""
    tokens, asked, answers = batch
    return F.cross_entropy(model(tokens, asked).flatten(0, 1), answers.flatten())


def accuracy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Share of the asked bytes guessed right."""
    tokens, asked, answers = batch
    right: torch.Tensor = model(tokens, asked).argmax(-1) == answers
    return right.float().mean()


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names."""
    assert config.spec is not None
    context = config.spec.dims["context"]
    return text_workload(
        BERT(**config.spec.dims),
        config,
        CORPUS_BYTES,
        batch_of=lambda text, starts, seed: masked(text, starts, context, seed),
        loss_fn=loss,
        accuracy_fn=accuracy,
    )
