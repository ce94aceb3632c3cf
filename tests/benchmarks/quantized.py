"""Predictions for 8- and 4-bit recipes beside real quantization: `python -m tests.benchmarks.quantized [MODEL …]`.

Each model is trained in FP32 and under BF16 autocast with `watch(…, blocks=True)`; the operands of its linear layers on
the last step are kept and quantized by each recipe, along both contractions. For each recipe: the worst difference of
the shares that underflow, and of how many operands the relative error is predicted to within 0.5 dB. What recording
costs: `tests.benchmarks.block_cost`.
"""

import argparse
import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_core import load_run
from amp_core.analysis import what_if
from amp_core.quantization import OPERANDS, RECIPES
from amp_core.record import fake_quantize, watch
from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import build

STEPS = 40


def workload(name: str) -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    made = build(TrainConfig(workload=name).resolved())
    return made.model, made.loss_fn, iter(made.batches)


def gpt2() -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """The stock GPT-2 of transformers, small, on the bytes of a source file."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), lambda model, batch: model(input_ids=batch, labels=batch).loss, texts(64)


def t5() -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """The stock T5 of transformers, small, which continues the text that its encoder reads."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=256, **sizes, decoder_start_token_id=0, pad_token_id=0)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        read, continued = batch.chunk(2, dim=1)
        return model(input_ids=read, labels=continued.contiguous()).loss

    return T5ForConditionalGeneration(config), loss_fn, texts(64)


def llama() -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """The stock Llama of transformers, small: gated feed-forward layers, RMS norms, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, **sizes, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(config), lambda model, batch: model(input_ids=batch, labels=batch).loss, texts(64)


def texts(length: int) -> Any:
    """Batches of 16 pieces of a source file, as bytes."""
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    while True:
        yield torch.stack([text[i : i + length] for i in torch.randint(0, len(text) - length, (16,))])


def vit() -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """The stock ViT of transformers, small, on scikit-learn's handwritten digits."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    return ViTForImageClassification(config), lambda m, b: m(pixel_values=b[0], labels=b[1]).loss, digits(8)


def convnext() -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """The stock ConvNeXt of transformers, small, on scikit-learn's handwritten digits."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(0)
    config = ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, num_channels=1, num_labels=10)
    return ConvNextForImageClassification(config), lambda m, b: m(pixel_values=b[0], labels=b[1]).loss, digits(32)


def digits(pixels: int) -> Any:
    """Batches of 32 handwritten digits with their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images, labels = (
        images.repeat_interleave(pixels // 8, 2).repeat_interleave(pixels // 8, 3),
        torch.tensor(data.target),
    )
    while True:
        chosen = torch.randint(len(images), (32,))
        yield images[chosen], labels[chosen]


MODELS = {
    "text-gpt": lambda: workload("text-gpt"),
    "text-bert": lambda: workload("text-bert"),
    "gpt2": gpt2,
    "vit": vit,
    "t5": t5,
    "convnext": convnext,
    "llama": llama,
}


def recorded(folder: Path, model: str, bf16: bool) -> dict[tuple[str, str], torch.Tensor]:
    """Train, and return the operands of the last step by name and kind."""
    net, loss_fn, batches = MODELS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    operands: dict[tuple[str, str], torch.Tensor] = {}
    parameters = {id(p): name for name, p in net.named_parameters()}
    with watch(net, optimizer, into=folder, every=1, blocks=True):
        for step in range(STEPS):
            handles = []
            if step == STEPS - 1:
                for name, layer in net.named_modules():
                    if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
                        weight = layer.weight.detach()
                        matrix = weight if isinstance(layer, nn.Linear) else weight.T
                        operands[parameters[id(layer.weight)], "weight"] = matrix.clone()
                        handles.append(layer.register_forward_hook(keeping(operands, name)))
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = loss_fn(net, next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for handle in handles:
                handle.remove()
    return operands


def keeping(operands: dict[tuple[str, str], torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        operands[name, "activation"] = args[0].detach().flatten(0, -2).clone()
        output.register_hook(lambda grad: operands.update({(name, "output_grad"): grad.flatten(0, -2).clone()}))

    return hook


def differences(folder: Path, operands: dict[tuple[str, str], torch.Tensor]) -> dict[str, list[tuple[float, float]]]:
    """By recipe, for each operand and product: the difference of underflow, and that of the relative error in dB."""
    run = load_run(folder)
    predicted = what_if(run, tuple(RECIPES), step=STEPS - 1)
    amax = run.blocks[run.blocks["step"] < STEPS - 1].groupby(["name", "kind"])["absmax"].max()  # for delayed scaling
    rows = predicted.set_index(["name", "kind", "product", "format"])
    result = collections.defaultdict(list)
    for (name, kind), tensor in operands.items():
        values = tensor.float()
        nonzero = values != 0
        if not nonzero.any():
            continue
        for product, axis in zip(OPERANDS[kind], (-1, 0), strict=True):
            for recipe in RECIPES:
                before = float(amax[name, kind]) if RECIPES[recipe].history_steps else None
                held = fake_quantize(tensor, recipe, axis=axis, kind=kind, tensor_amax=before)
                predicted = rows.loc[(name, kind, product, recipe)]
                lost = float(((held == 0) & nonzero).sum() / nonzero.sum())
                error = 20 * np.log10(float((held - values).norm() / values.norm()))
                result[recipe].append((abs(predicted["underflow_frac"] - lost), abs(predicted["rel_error_db"] + error)))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help=", ".join(MODELS))
    torch.set_num_threads(1)
    print("| model | recorded in | recipe | operands | worst underflow difference | within 0.5 dB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in parser.parse_args().models:
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as made:
                tensors = recorded(Path(made, "blocks"), model, precision == "bf16")
                for recipe, pairs in differences(Path(made, "blocks"), tensors).items():
                    underflow, error = np.array(pairs).T
                    print(
                        f"| {model} | {precision} | {recipe} | {len(pairs)} | {underflow.max():.5f} "
                        f"| {np.mean(error < 0.5):.1%} |",
                        flush=True,
                    )
