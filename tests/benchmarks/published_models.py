"""The models of `published_steps.csv`, built without memory: shapes alone, as `torch.device("meta")` makes them.

>>> model, batches, loss_fn = build("vit-base", batch=192, length=224, channels_last=True)
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Triple = tuple[nn.Module, list[Any], Callable[[nn.Module, Any], torch.Tensor]]

PREDICTED = {128: 20, 512: 80}
"""Masked tokens of a sequence in BERT's pre-training, by its length (NVIDIA's data, max_predictions_per_seq)."""
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
GPT = {  # width, layers, heads (NeuSight, data/DLmodel_configs)
    "gpt2-large": (1280, 36, 20),
    "gpt3-xl": (3072, 24, 24),
    "gpt3-27": (2560, 32, 32),
}
XL = {"transformer-xl-base": (16, 512, 8, 2048), "transformer-xl-large": (18, 1024, 16, 4096)}
"""Layers, width, heads and inner width (NVIDIA/DeepLearningExamples, Transformer-XL)."""
XL_VOCABULARY = 267735
"""Words of WikiText-103."""
CS336 = {
    "cs336-small": (768, 3072, 12, 12),
    "cs336-medium": (1024, 4096, 24, 16),
    "cs336-large": (1280, 5120, 36, 20),
    "cs336-xl": (1600, 6400, 48, 25),
    "cs336-2.7b": (2560, 10240, 32, 32),
}
"""Width, inner width, layers and heads of the language models in Stanford's course CS336 (assignment 2)."""
CS336_VOCABULARY = 10_000
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet26": ("ResNet", {"depths": [2, 2, 2, 2]}),
    "vit-small-32": (
        "ViT",
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "patch_size": 32},
    ),
    "vit-base-32": ("ViT", {"patch_size": 32}),
    "poolformer-s12": ("PoolFormer", {}),
    "swin-large": (
        "Swin",
        {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48]},
    ),
    "resnet18": ("ResNet", {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet34": ("ResNet", {"layer_type": "basic", "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet50": ("ResNet", {}),
    "resnet101": ("ResNet", {"depths": [3, 4, 23, 3]}),
    "resnet152": ("ResNet", {"depths": [3, 8, 36, 3]}),
    "vit-tiny": ("ViT", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}),
    "vit-small": ("ViT", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "vit-base": ("ViT", {}),
    "vit-large": ("ViT", BERT_LARGE),
    "vit-base-384": ("ViT", {"image_size": 384}),
    "beit-base": ("Beit", {"use_relative_position_bias": True, "use_shared_relative_position_bias": False}),
    "convnext-tiny": ("ConvNext", {}),
    "convnext-small": ("ConvNext", {"depths": [3, 3, 27, 3]}),
    "convnext-large": ("ConvNext", {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]}),
    "convnext-base": ("ConvNext", {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}),
    "swin-tiny": ("Swin", {}),
    "swin-small": ("Swin", {"depths": [2, 2, 18, 2]}),
    "swin-base": ("Swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}),
    "swinv2-base": (
        "Swinv2",
        {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "window_size": 8, "image_size": 224},
    ),
    "swinv2-tiny": ("Swinv2", {"window_size": 8, "image_size": 256}),
    "swinv2-small": ("Swinv2", {"depths": [2, 2, 18, 2], "window_size": 8, "image_size": 256}),
    "mobilenetv2": ("MobileNetV2", {"tf_padding": False}),
    "poolformer-s24": ("PoolFormer", {"depths": [4, 4, 12, 4]}),
    "mobilevit-s": ("MobileViT", {}),
    "regnetx-032": (
        "RegNet",
        {"layer_type": "x", "depths": [2, 6, 15, 2], "hidden_sizes": [96, 192, 432, 1008], "groups_width": 48},
    ),
    "regnety-032": (
        "RegNet",
        {"layer_type": "y", "depths": [2, 5, 13, 1], "hidden_sizes": [72, 216, 576, 1512], "groups_width": 24},
    ),
    "regnety-128gf": (
        "RegNet",
        {"layer_type": "y", "depths": [2, 7, 17, 1], "hidden_sizes": [528, 1056, 2904, 7392], "groups_width": 264},
    ),
    "levit-256": (
        "Levit",
        {"hidden_sizes": [256, 384, 512], "num_attention_heads": [4, 6, 8], "key_dim": [32, 32, 32]},
    ),
    "efficientnet-b0": ("EfficientNet", {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}),
    "efficientnet-b4": ("EfficientNet", {"width_coefficient": 1.4, "depth_coefficient": 1.8, "hidden_dim": 1792}),
}
VGG = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
"""Convolutions of each stage, with 64, 128, 256, 512 and 512 channels."""
RESIDUAL = {  # depths, width of the 3 × 3 convolutions over their outputs', groups, squeeze and excitation
    "resnext50-32x4d": ((3, 4, 6, 3), 0.5, 32, False),
    "resnext101-32x4d": ((3, 4, 23, 3), 0.5, 32, False),
    "se-resnext101-32x4d": ((3, 4, 23, 3), 0.5, 32, True),
    "se-resnet50": ((3, 4, 6, 3), 0.25, 1, True),
    "wide-resnet50-2": ((3, 4, 6, 3), 0.5, 1, False),
}
DENSE = {
    "densenet121": (32, (6, 12, 24, 16)),
    "densenet161": (48, (6, 12, 36, 24)),
    "densenet169": (32, (6, 12, 32, 32)),
    "densenet201": (32, (6, 12, 48, 32)),
}
"""Channels that each layer adds, and the layers of each block."""


def build(name: str, batch: int, length: int, channels_last: bool) -> Triple:
    """The model, one batch, and the loss; `length` in tokens of a sequence or pixels of an edge."""
    with torch.device("meta"):
        if name.endswith("-layer"):
            return _layer(name, batch, length)
        if name == "bert-base-mlm":
            return _masked_words(batch, length)
        if name.startswith("bert"):
            return _bert(name, batch, length)
        if name in CS336:
            return _cs336(name, batch, length)
        if name in XL:
            return _transformer_xl(name, batch, length)
        if name == "ssd300":
            return _ssd(batch, channels_last)
        if name in GPT or name == "opt-13":
            return _language_model(name, batch, length)
        return _images(_image_model(name), batch, length, channels_last)


def _image_model(name: str) -> nn.Module:
    if name.startswith("vgg"):
        return _vgg(name)
    if name in DENSE:
        return _densenet(*DENSE[name])
    if name in MIXERS:
        return _Mixer(*MIXERS[name])
    return _residual(name) if name in RESIDUAL else _hugging_face(name)


def _bert(name: str, batch: int, length: int) -> Triple:
    sizes = {} if name.startswith("bert-base") else BERT_LARGE
    config = transformers.BertConfig(attn_implementation="eager", **sizes)
    tokens = torch.ones(batch, length, dtype=torch.long, device="cpu")
    ends = torch.zeros(batch, dtype=torch.long, device="cpu")
    if name.endswith("squad"):
        mask = torch.zeros(batch, 1, 1, length, device="meta")  # NVIDIA's program adds one to all scores

        def squad_loss(model: nn.Module, of: Any) -> torch.Tensor:
            tokens, ends, mask = of
            loss = model(tokens, attention_mask=mask, start_positions=ends, end_positions=ends).loss
            assert isinstance(loss, torch.Tensor)
            return loss

        return transformers.BertForQuestionAnswering(config), [(tokens, ends, mask)], squad_loss
    if name.endswith("pretraining"):
        masked = torch.zeros(batch * PREDICTED[length], dtype=torch.long, device="cpu")
        return _Pretraining(config), [(tokens, masked, ends)], lambda model, of: model(*of)
    model = transformers.BertForPreTraining(config)
    return model, [tokens], lambda model, of: _cross_entropy(model(of).prediction_logits, of)


def _masked_words(batch: int, length: int) -> Triple:
    """Transformers' own model with its loss over all tokens and PyTorch's fused attention, as milabench runs it; its
    attention's dropout is left out, for which the kernels of a CPU are not fused."""
    tokens = torch.ones(batch, length, dtype=torch.long, device="cpu")
    config = transformers.BertConfig(attn_implementation="sdpa", attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config)
    return model, [tokens], lambda model, of: model(input_ids=of, labels=of).loss


class _Pretraining(nn.Module):
    """NVIDIA's: the head gets the masked positions alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bert = transformers.BertModel(config)
        self.head = transformers.models.bert.modeling_bert.BertPreTrainingHeads(config)
        self.head.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, tokens: torch.Tensor, masked: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        out = self.bert(tokens)
        chosen = out.last_hidden_state.flatten(0, 1).index_select(0, masked)
        logits, follows = self.head(chosen, out.pooler_output)
        return F.cross_entropy(logits, masked) + F.cross_entropy(follows, following)


def _language_model(name: str, batch: int, length: int) -> Triple:
    config: Any
    if name in GPT:
        width, layers, heads = GPT[name]
        config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=length)
    else:
        config = transformers.OPTConfig(
            hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, word_embed_proj_dim=2048,
            attention_dropout=0.0,
        )  # fmt: skip
    config.use_cache, config._attn_implementation = False, "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.ones(batch, length, dtype=torch.long, device="cpu")
    return model, [tokens], lambda model, of: _cross_entropy(model(of).logits, of)


def _layer(name: str, batch: int, length: int) -> Triple:
    """One layer alone, as mli/transformers-benchmarks runs it: the loss is the sum of its outputs, and its input has no
    gradient. T5's decoder attends to its own input."""
    bert = transformers.BertConfig(attn_implementation="eager", **BERT_LARGE)
    gpt2 = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, attn_implementation="eager")
    t5 = transformers.T5Config(d_model=1024, d_ff=4096, num_heads=16, is_encoder_decoder=False, use_cache=False)
    t5.is_decoder = name == "t5-decoder-layer"
    models = transformers.models
    layer = {
        "bert-large-layer": lambda: models.bert.modeling_bert.BertLayer(bert),
        "gpt2-medium-layer": lambda: models.gpt2.modeling_gpt2.GPT2Block(gpt2, layer_idx=0),
        "t5-encoder-layer": lambda: models.t5.modeling_t5.T5Block(t5, layer_idx=0),
        "t5-decoder-layer": lambda: models.t5.modeling_t5.T5Block(t5, layer_idx=0),
    }[name]()
    given = torch.empty(batch, length, 1024, device="meta")

    def loss_fn(model: nn.Module, of: Any) -> torch.Tensor:
        out = model(of[0], encoder_hidden_states=of[0]) if t5.is_decoder else model(of[0])
        return (out[0] if isinstance(out, tuple) else out).sum()

    return layer, [(given,)], loss_fn


class _XLLayer(nn.Module):
    """Of Transformer-XL: attention over the segment and the one before it with relative positions, then two linear
    layers. Tensors are length × batch × width, as in NVIDIA's program."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.positions, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1, 1))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.last_norm = nn.LayerNorm(width)

    def forward(
        self, x: torch.Tensor, before: torch.Tensor, places: torch.Tensor, biases: torch.Tensor, later: torch.Tensor
    ) -> torch.Tensor:
        length, batch, width = x.shape
        queries, keys, values = self.qkv(torch.cat([before, x])).chunk(3, -1)
        queries = queries[-length:].reshape(length, batch, self.heads, -1)
        keys, values = (t.reshape(2 * length, batch, self.heads, -1) for t in (keys, values))
        relative = self.positions(places).view(2 * length, self.heads, -1)
        content = torch.einsum("ibnd,jbnd->bnij", queries + biases[0], keys)
        position = torch.einsum("ibnd,jnd->bnij", queries + biases[1], relative)
        padded = torch.cat([position.new_zeros(*position.shape[:3], 1), position], 3)
        shifted = padded.view(batch, self.heads, 2 * length + 1, length)[:, :, 1:].reshape(position.shape)
        scores = (content + shifted) * 0.125
        scores = scores.masked_fill_(later, -torch.inf)
        shares = self.attention_dropout(F.softmax(scores, 3))
        attended = torch.einsum("bnij,jbnd->ibnd", shares, values).reshape(length, batch, width)
        x = self.norm(x + self.dropout(self.out(attended)))
        out = self.last_norm(x + self.dropout(self.narrow(self.dropout(F.relu_(self.wide(x))))))
        assert isinstance(out, torch.Tensor)
        return out


class _TransformerXL(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        dropout = (0.1, 0.0) if width == 512 else (0.2, 0.2)
        self.words = nn.Embedding(XL_VOCABULARY, width)
        self.bias = nn.Parameter(torch.zeros(XL_VOCABULARY))
        self.biases = nn.Parameter(torch.zeros(2, heads, width // heads))
        self.layers = nn.ModuleList(_XLLayer(width, heads, inner, *dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout[0])

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        length = len(tokens)
        x = self.dropout(self.words(tokens) * self.words.weight.shape[1] ** 0.5)
        places = x.new_zeros(2 * length, x.shape[2])
        later = torch.triu(torch.ones(length, 2 * length, device=x.device), 1 + length).bool()
        for i, layer in enumerate(self.layers):
            x = layer(x, before[i], places, self.biases, later)
        logits = F.linear(self.dropout(x).flatten(0, 1), self.words.weight, self.bias)
        return -F.log_softmax(logits, -1).gather(1, tokens.reshape(-1, 1)).mean()


def _transformer_xl(name: str, batch: int, length: int) -> Triple:
    """As Lambda ran it: a softmax over all words, which share their weights with the embedding."""
    layers, width, heads, inner = XL[name]
    tokens = torch.zeros(length, batch, dtype=torch.long, device="cpu")
    before = torch.empty(layers, length, batch, width, device="meta")
    return _TransformerXL(layers, width, heads, inner), [(tokens, before)], lambda model, of: model(*of)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    exponential = torch.exp(x - x.amax(-1, keepdim=True))
    return exponential / exponential.sum(-1, keepdim=True)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    one, other = x[..., 0::2], x[..., 1::2]
    return torch.stack([cosine * one - sine * other, sine * one + cosine * other], -1).flatten(-2)


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


class _CS336Layer(nn.Module):
    """Causal attention with rotated queries and keys, and three linear layers (SwiGLU), both after a norm. Softmax,
    attention and norms are written in elementwise operators, as in the course's model."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.wide = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.narrow = nn.Linear(inner, width, bias=False)
        self.norms = nn.ModuleList([_RMSNorm(width), _RMSNorm(width)])

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        scores = _rotated(q, cosine, sine) @ _rotated(k, cosine, sine).transpose(-1, -2) / q.shape[-1] ** 0.5
        attended = _softmax(torch.where(earlier, scores, -torch.inf)) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        gate = self.gate(normed)
        out = x + self.narrow(gate * torch.sigmoid(gate) * self.wide(normed))
        assert isinstance(out, torch.Tensor)
        return out


class _CS336(nn.Module):
    def __init__(self, width: int, inner: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(CS336_VOCABULARY, width)
        self.layers = nn.ModuleList(_CS336Layer(width, inner, heads) for _ in range(layers))
        self.norm = _RMSNorm(width)
        self.head = nn.Linear(width, CS336_VOCABULARY, bias=False)
        self.half_head = width // heads // 2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        length = tokens.shape[1]
        angles = x.new_zeros(length, self.half_head)
        earlier = torch.ones(length, length, device=x.device).tril().bool()
        for layer in self.layers:
            x = layer(x, angles, angles, earlier)
        logits = self.head(self.norm(x))
        logits = logits - logits.amax(-1, keepdim=True)
        logits = logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))
        return (-logits).gather(-1, tokens.unsqueeze(-1)).mean()


def _cs336(name: str, batch: int, length: int) -> Triple:
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cpu")
    return _CS336(*CS336[name]), [tokens], lambda model, of: model(of)


def _cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _hugging_face(name: str) -> nn.Module:
    kind, changed = IMAGES[name]
    attention = {"attn_implementation": "eager"} if kind in ("ViT", "Swin", "Swinv2", "Beit") else {}
    config = getattr(transformers, f"{kind}Config")(num_labels=1000, **changed, **attention)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    assert isinstance(model, nn.Module)
    return model


class _Bottleneck(nn.Module):
    """1 × 1, 3 × 3 in groups, 1 × 1; with squeeze and excitation if `se`."""

    def __init__(self, inputs: int, outputs: int, stride: int, width: int, groups: int, se: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        other = stride > 1 or inputs != outputs
        short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.short = nn.Sequential(*(short if other else ()))
        inner = outputs // 16
        squeeze = [nn.Linear(outputs, inner), nn.ReLU(inplace=True), nn.Linear(inner, outputs), nn.Sigmoid()]
        self.se = nn.Sequential(*squeeze) if se else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        if self.se is not None:
            out = out * self.se(out.mean((2, 3)))[:, :, None, None]
        return F.relu_(out + self.short(x))


def _bottlenecks(depths: tuple[int, ...], width: float, groups: int, se: bool, strides: tuple[int, ...]) -> nn.Module:
    """The stem and stages of a residual network, whose 3 × 3 convolutions have `width` of its outputs' channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, depth in enumerate(depths):
        outputs = 256 << stage
        for i in range(depth):
            stride = strides[stage] if i == 0 else 1
            layers.append(_Bottleneck(inputs, outputs, stride, round(outputs * width), groups, se))
            inputs = outputs
    return nn.Sequential(*layers)


def _residual(name: str) -> nn.Module:
    """`resnext101-32x4d` and `se-resnext101-32x4d` of NVIDIA/DeepLearningExamples, and timm's models."""
    body = _bottlenecks(*RESIDUAL[name], strides=(1, 2, 2, 2))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class _SSD(nn.Module):
    """SSD300 of NVIDIA/DeepLearningExamples (PyTorch/Detection/SSD): ResNet-50's first three stages, and six heads."""

    def __init__(self) -> None:
        super().__init__()
        widths, inner = (1024, 512, 512, 256, 256, 256), (256, 256, 128, 128, 128)
        self.stages = nn.ModuleList([_bottlenecks((3, 4, 6), 0.25, 1, False, strides=(1, 2, 1))])
        for i, (inputs, outputs, width) in enumerate(zip(widths, widths[1:], inner, strict=False)):
            second = nn.Conv2d(width, outputs, 3, 2 if i < 3 else 1, 1 if i < 3 else 0, bias=False)
            layers = [nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            layers += [second, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            self.stages.append(nn.Sequential(*layers))
        boxes = (4, 6, 6, 6, 4, 4)
        self.places = nn.ModuleList(nn.Conv2d(w, n * 4, 3, padding=1) for w, n in zip(widths, boxes, strict=True))
        self.classes = nn.ModuleList(nn.Conv2d(w, n * 81, 3, padding=1) for w, n in zip(widths, boxes, strict=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places, classes = [], []
        for stage, place, kind in zip(self.stages, self.places, self.classes, strict=True):
            x = stage(x)
            places.append(place(x).reshape(len(x), 4, -1))
            classes.append(kind(x).reshape(len(x), 81, -1))
        return torch.cat(places, 2), torch.cat(classes, 2)


def _ssd(batch: int, channels_last: bool) -> Triple:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.empty(batch, 3, 300, 300).to(memory_format=layout)
    kinds = torch.zeros(batch, 8732, dtype=torch.long, device="cpu")
    boxes = torch.empty(batch, 4, 8732)

    def loss_fn(model: nn.Module, of: Any) -> torch.Tensor:
        places, classes = model(of[0])
        wrong = F.cross_entropy(classes, of[1], reduction="none")
        return (F.smooth_l1_loss(places, of[2], reduction="none").sum(1) + wrong).sum(1).mean()

    model = _SSD().to(memory_format=layout)  # type: ignore[call-overload]
    return model, [(images, kinds, boxes)], loss_fn


MIXERS = {"mixer-base": (16, 768, 12), "mixer-base-32": (32, 768, 12), "mixer-small": (16, 512, 8)}
"""Edge of a patch, width and layers."""


class _Mixing(nn.Module):
    """A layer of MLP-Mixer: over the patches, then over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches, self.over_channels = (
            nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size))
            for size, inner in ((patches, width // 2), (width, 4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out = x + self.over_channels(self.norms[1](x))
        assert isinstance(out, torch.Tensor)
        return out


class _Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, edge: int, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, edge, edge)
        patches = (224 // edge) ** 2
        self.body = nn.Sequential(*(_Mixing(patches, width) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.body(self.stem(x).flatten(2).transpose(1, 2)).mean(1))
        assert isinstance(out, torch.Tensor)
        return out


def _vgg(name: str) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for depth, outputs in zip(VGG[name.removesuffix("-bn")], (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            norm = [nn.BatchNorm2d(outputs)] if name.endswith("bn") else []
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class _DenseLayer(nn.Module):
    """Of DenseNet: normalized, 1 × 1, normalized, 3 × 3; its channels are joined to its inputs."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, *earlier: torch.Tensor) -> torch.Tensor:
        out = self.body(torch.cat(earlier, 1))
        assert isinstance(out, torch.Tensor)
        return out


class _DenseBlock(nn.Module):
    def __init__(self, inputs: int, depth: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DenseLayer(inputs + growth * i, growth) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(*outputs))
        return torch.cat(outputs, 1)


def _densenet(growth: int, depths: tuple[int, ...]) -> nn.Module:
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    for stage, depth in enumerate(depths):
        layers += [_DenseBlock(channels, depth, growth), nn.BatchNorm2d(channels + growth * depth)]
        layers.append(nn.ReLU(inplace=True))
        channels += growth * depth
        if stage < len(depths) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def _images(model: nn.Module, batch: int, pixels: int, channels_last: bool) -> Triple:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.empty(batch, 3, pixels, pixels, device="meta").to(memory_format=layout)
    labels = torch.zeros(batch, dtype=torch.long, device="cpu")

    def loss_fn(model: nn.Module, of: Any) -> torch.Tensor:
        out = model(of[0])
        return F.cross_entropy(getattr(out, "logits", out), of[1])

    return model, [(images, labels)], loss_fn
