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
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("ResNet", {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet34": ("ResNet", {"layer_type": "basic", "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 256, 512]}),
    "resnet50": ("ResNet", {}),
    "resnet101": ("ResNet", {"depths": [3, 4, 23, 3]}),
    "resnet152": ("ResNet", {"depths": [3, 8, 36, 3]}),
    "vit-tiny": ("ViT", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}),
    "vit-small": ("ViT", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "vit-base": ("ViT", {}),
    "vit-large": ("ViT", BERT_LARGE),
    "convnext-tiny": ("ConvNext", {}),
    "convnext-small": ("ConvNext", {"depths": [3, 3, 27, 3]}),
    "convnext-large": ("ConvNext", {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]}),
    "convnext-base": ("ConvNext", {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}),
    "swin-tiny": ("Swin", {}),
    "swin-small": ("Swin", {"depths": [2, 2, 18, 2]}),
    "swin-base": ("Swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}),
    "mobilenetv2": ("MobileNetV2", {"tf_padding": False}),
    "efficientnet-b0": ("EfficientNet", {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}),
    "efficientnet-b4": ("EfficientNet", {"width_coefficient": 1.4, "depth_coefficient": 1.8, "hidden_dim": 1792}),
}
VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of VGG-16's convolutions; 0 for pooling."""


def build(name: str, batch: int, length: int, channels_last: bool) -> Triple:
    """The model, one batch, and the loss; `length` in tokens of a sequence or pixels of an edge."""
    with torch.device("meta"):
        if name.endswith("-layer"):
            return _layer(name, batch, length)
        if name.startswith("bert"):
            return _bert(name, batch, length)
        if name in GPT or name == "opt-13":
            return _language_model(name, batch, length)
        return _images(_image_model(name), batch, length, channels_last)


def _image_model(name: str) -> nn.Module:
    if name.startswith("vgg"):
        return _vgg(name)
    return _resnext(name) if "resnext" in name else _hugging_face(name)


def _bert(name: str, batch: int, length: int) -> Triple:
    config = transformers.BertConfig(attn_implementation="eager", **({} if name == "bert-base-squad" else BERT_LARGE))
    tokens = torch.ones(batch, length, dtype=torch.long, device="cpu")
    ends = torch.zeros(batch, dtype=torch.long, device="cpu")
    if name.endswith("squad"):
        model = transformers.BertForQuestionAnswering(config)
        return model, [(tokens, ends)], lambda model, of: model(of[0], start_positions=of[1], end_positions=of[1]).loss
    if name.endswith("pretraining"):
        masked = torch.zeros(batch * PREDICTED[length], dtype=torch.long, device="cpu")
        return _Pretraining(config), [(tokens, masked, ends)], lambda model, of: model(*of)
    model = transformers.BertForPreTraining(config)
    return model, [tokens], lambda model, of: _cross_entropy(model(of).prediction_logits, of)


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


def _cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _hugging_face(name: str) -> nn.Module:
    kind, changed = IMAGES[name]
    attention = {"attn_implementation": "eager"} if kind in ("ViT", "Swin") else {}
    config = getattr(transformers, f"{kind}Config")(num_labels=1000, **changed, **attention)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    assert isinstance(model, nn.Module)
    return model


class _Bottleneck(nn.Module):
    """Of ResNeXt: 1 × 1, 3 × 3 in groups, 1 × 1; with squeeze and excitation if `se`."""

    def __init__(self, inputs: int, outputs: int, stride: int, se: bool, groups: int = 32) -> None:
        super().__init__()
        width = outputs // 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.short = nn.Sequential(*(short if stride > 1 or inputs != outputs else ()))
        inner = outputs // 16
        squeeze = [nn.Linear(outputs, inner), nn.ReLU(inplace=True), nn.Linear(inner, outputs), nn.Sigmoid()]
        self.se = nn.Sequential(*squeeze) if se else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        if self.se is not None:
            out = out * self.se(out.mean((2, 3)))[:, :, None, None]
        return F.relu_(out + self.short(x))


def _resnext(name: str) -> nn.Module:
    """`resnext101-32x4d` and `se-resnext101-32x4d` of NVIDIA/DeepLearningExamples."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for depth, outputs in ((3, 256), (4, 512), (23, 1024), (3, 2048)):
        for i in range(depth):
            stride = 2 if i == 0 and outputs > 256 else 1
            layers.append(_Bottleneck(inputs, outputs, stride, name.startswith("se-")))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _vgg(name: str) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in VGG:
        if not outputs:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        norm = [nn.BatchNorm2d(outputs)] if name.endswith("bn") else []
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(inplace=True)]
        inputs = outputs
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


def _images(model: nn.Module, batch: int, pixels: int, channels_last: bool) -> Triple:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.empty(batch, 3, pixels, pixels, device="meta").to(memory_format=layout)
    labels = torch.zeros(batch, dtype=torch.long, device="cpu")

    def loss_fn(model: nn.Module, of: Any) -> torch.Tensor:
        out = model(of[0])
        return F.cross_entropy(getattr(out, "logits", out), of[1])

    return model, [(images, labels)], loss_fn
