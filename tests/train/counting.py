"""Counts the values that a workload's forward pass saves for backward, on torch's meta device, without memory."""

from importlib import import_module

import torch
from torch.nn import functional as F

from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import text, text_bert
from amp_core.train.workloads.text_lstm import LSTMLanguageModel


def model_on_meta(workload: str, size: str) -> torch.nn.Module:
    """The model of a size on the meta device."""
    dims = dict(TrainConfig(workload=workload, size=size).spec.dims)
    module = import_module(f"amp_core.train.workloads.{workload.replace('-', '_')}")
    with torch.device("meta"):
        if workload == "text-lstm":
            return LSTMLanguageModel(dims["layers"], dims["width"])
        kind = {"text-gpt": "GPT", "text-bert": "BERT", "image-resnet": "ResNet", "digits-cnn": "DigitsCNN"}[workload]
        return getattr(module, kind)(**dims)


def counted(workload: str, size: str, batch_size: int = 2) -> tuple[int, int]:
    """Parameters, and the values that forward and loss save per sample, each storage counted once.

    Attention's square matrices do not count: only the meta device's implementation of attention saves them.
    """
    config = TrainConfig(workload=workload, size=size, batch_size=batch_size).resolved()
    model = model_on_meta(workload, size)
    context = config.spec.dims.get("context")
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        square = context is not None and tensor.shape[-2:] == (context, context)
        if tensor.is_floating_point() and tensor.untyped_storage()._cdata not in weights and not square:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(config, model)
    values = sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values())
    return sum(p.numel() for p in model.parameters()), values // batch_size


def loss_of(config: TrainConfig, model: torch.nn.Module) -> torch.Tensor:
    """The loss on a batch of the right shapes."""
    count, dims = config.batch_size, config.spec.dims
    if config.workload in ("image-resnet", "digits-cnn"):
        shape = (3, dims["pixels"], dims["pixels"]) if config.workload == "image-resnet" else (1, 8, 8)
        images = torch.empty(count, *shape, device="meta")
        return F.cross_entropy(model(images), torch.empty(count, dtype=torch.int64, device="meta"))
    tokens = torch.empty(count, dims["context"], dtype=torch.int64, device="meta")
    if config.workload == "text-bert":
        predicted = tokens[:, : text_bert.predicted_count(dims["context"])]
        return text_bert.loss(model, (tokens, predicted, predicted))
    return text.OBJECTIVES[config.spec.objective](model, (tokens, tokens))
