"""Rules on the conversion of layers to 8 and 4 bits: which were converted, which should be, and at what cost."""

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.casts import conversion, has_casts
from amp_core.analysis.steps import emulated
from amp_core.findings.model import LOSS_SCALING, RANGE_AND_PRECISION, SPEED_AND_MEMORY, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import facts, on_gpu, signals
from amp_core.quantization import ROW, TENSOR
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_LEFT_FRAC = 0.05
MAX_SMALL_FRAC = 0.5


@rule(
    Entry(
        code="unconverted-layers",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=289,
        what="Linear layers run in the wider format although the model was converted to 8 or 4 bits.",
        signal="Linear layers without any cast beside others with casts, in the first sampled step; the first and the "
        "last layer, and layers named in the engine's `--keep-bf16`, do not count.",
        threshold="5 % of the weights of all linear layers: as much as the conversion can at most fail to speed up.",
        advice="A converter passes over layers whose sizes are no multiples of 16, layers that its filter names, and "
        "modules that use a weight without calling their linear layer (MultiheadAttention). Pad the sizes, correct the "
        "filter, or write the product as a torch.nn.Linear of its own.",
        snippet="from torchao.float8 import convert_to_float8_training\n\n"
        "convert_to_float8_training(model, module_filter_fn=lambda module, name: name != 'head')\n"
        "for name, module in model.named_modules():\n"
        "    if type(module) is torch.nn.Linear:\n"
        "        print(name, module.in_features, module.out_features)",
        page="low-bits",
    )
)
def unconverted_layers(run: Run) -> list[Finding]:
    """`unconverted-layers`: linear layers that were left out of the conversion hold a share of the weights."""
    seen = conversion(run)
    if seen is None:
        return []
    whole = signals(run, "quantized layers").iloc[0]
    kept = run.head.config.get("keep_bf16")
    kept = tuple(f"{name}." for name in kept) if isinstance(kept, list | tuple) else ()
    left = seen.left[~seen.left["name"].isin([whole["name"], whole["detail"]])]
    left = left[[not f"{name}.".startswith(kept) for name in left["name"]]] if kept else left
    share = float(left["weight_frac"].sum())
    if share <= MAX_LEFT_FRAC:
        return []
    reasons = left.groupby("reason", sort=False)["name"].agg(["size", "first"]).sort_values("size", ascending=False)
    words = "; ".join(f"{int(row['size']):,} {reason}" for reason, row in reasons.iterrows())
    row = left.iloc[int(left["weight_frac"].to_numpy().argmax())]
    return [
        make_finding(
            "unconverted-layers",
            f"{len(left):,} of {seen.layers:,} linear layers, with {formatting.percent(share)} of the weights, are not "
            f"quantized ({words})",
            str(row["name"]),
            value=share,
            limit=MAX_LEFT_FRAC,
            unit="share of the weights of linear layers",
        )
    ]


@rule(
    Entry(
        code="quantized-edge-layers",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=291,
        what="The layer that takes the model's input, or the one that gives its output, is quantized.",
        signal="Casts of the first module with parameters and of the last linear layer, in the first sampled step.",
        threshold="One such layer. torchao's example of float8 training leaves the last layer out; DeepSeek-V3 "
        "(arXiv 2412.19437, section 3.3.1) keeps embedding and output head in their original precision.",
        advice="Errors of the first layer enter everything behind it, and those of the last one the loss itself. Keep "
        "both in BF16: they hold few of the FLOPs.",
        snippet="from torchao.float8 import convert_to_float8_training\n\n"
        "first_and_last = {'embed', 'head'}\n"
        "convert_to_float8_training(model, module_filter_fn=lambda module, name: name not in first_and_last)",
        page="low-bits",
    )
)
def quantized_edge_layers(run: Run) -> list[Finding]:
    """`quantized-edge-layers`: the first or last layer of the model is quantized."""
    frame = signals(run, "quantized edge").drop_duplicates(["name", "detail"])
    if frame.empty:
        return []
    places = " and ".join(f"{row['name']} ({row['detail']} layer)" for _, row in frame.iterrows())
    return [
        make_finding(
            "quantized-edge-layers",
            f"{places} {'is' if len(frame) == 1 else 'are'} quantized",
            str(frame["name"].iloc[-1]),
            value=float(len(frame)),
            limit=0.0,
            unit="layers",
        )
    ]


def _products(run: Run) -> pd.DataFrame:
    """One row per quantized linear layer: name, block, M (rows of its input), K (inputs), N (outputs)."""
    frame = run.quantized
    frame = frame[(frame["rank"] == 0) & frame["calls"].notna()]
    frame = frame.assign(name=frame["name"].str.removesuffix(".weight"))
    frame = frame.drop_duplicates(["name", "kind"])
    sizes = frame.pivot_table(index="name", columns="kind", values="numel", sort=False)
    if not {"weight", "activation", "output_grad"} <= set(sizes.columns):
        return pd.DataFrame(columns=["name", "block", "M", "K", "N"])
    sizes = sizes.dropna()
    kn, mk, mn = (sizes[kind] for kind in ("weight", "activation", "output_grad"))
    blocks = frame[frame["kind"] == "weight"].set_index("name")["block"]
    sizes = sizes.assign(
        M=np.sqrt(mk * mn / kn).round(), K=np.sqrt(kn * mk / mn).round(), N=np.sqrt(kn * mn / mk).round()
    )
    return sizes.assign(block=blocks).reset_index()[["name", "block", "M", "K", "N"]]


@rule(
    Entry(
        code="small-quantized-layers",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=345,
        what="Most quantized layers are so small that casting their operands takes longer than FP8 saves.",
        signal="Sizes of the quantized layers, on a GPU whose products are not emulated.",
        threshold="More than half of them below torchao's own limits, measured on H100: inputs ≤ 4,096 and outputs "
        "≤ 1,024 with one scale per tensor; outputs ≤ 2,048, inputs ≤ 1,024, or inputs ≤ 2,048 and outputs ≤ 4,096 "
        "with one per row (torchao 0.18, `_auto_filter_for_recipe`).",
        advice="FP8 makes such layers slower than BF16 and their numbers worse. Convert the large layers alone, and "
        "compile the model so that casts are fused.",
        snippet="from torchao.float8 import convert_to_float8_training\n\n"
        "convert_to_float8_training(\n"
        "    model, module_filter_fn=lambda module, name: min(module.in_features, module.out_features) > 1024\n"
        ")\n"
        "model = torch.compile(model)",
        page="low-bits",
    )
)
def small_quantized_layers(run: Run) -> list[Finding]:
    """`small-quantized-layers`: most quantized products are too small to win."""
    if not on_gpu(run) or emulated(run) or not has_casts(run):
        return []
    frame = _products(run)
    frame = frame[frame["block"].isin([TENSOR, ROW])]
    if frame.empty:
        return []
    k, n, row = frame["K"], frame["N"], frame["block"] == ROW
    by_tensor = (k <= 4096) & (n <= 1024)
    by_row = (n <= 2048) | (k <= 1024) | ((n <= 4096) & (k <= 2048))
    small = frame[by_row.where(row, by_tensor)]
    share = len(small) / len(frame)
    if share <= MAX_SMALL_FRAC:
        return []
    first = small.iloc[0]
    return [
        make_finding(
            "small-quantized-layers",
            f"{len(small):,} of {len(frame):,} quantized layers are too small to gain from FP8, such as "
            f"{first['name']} ({int(first['K']):,} × {int(first['N']):,})",
            str(first["name"]),
            value=share,
            limit=MAX_SMALL_FRAC,
            unit="share of the quantized layers",
        )
    ]


@rule(
    Entry(
        code="requantized-weights",
        severity="info",
        family=SPEED_AND_MEMORY,
        order=575,
        what="Weights are quantized anew for each micro-batch, although they change once per step.",
        signal="Casts of each weight and calls of its layer within one step (table `quantized`).",
        threshold="As many casts as calls, and two calls or more, in every sampled step.",
        advice="Each cast reads the weight and writes it again, for the same result. Transformer Engine keeps the "
        "quantized weight when it is told which micro-batch is the first; with FSDP, keep the gathered FP8 weights "
        "between micro-batches.",
        snippet="# Transformer Engine: layer(x, is_first_microbatch=number == 0)\n"
        "model.set_reshard_after_forward(False)   # FSDP2: gathered FP8 weights stay until the last micro-batch",
        page="step-cost",
    )
)
def requantized_weights(run: Run) -> list[Finding]:
    """`requantized-weights`: each micro-batch casts the weights again."""
    if not has_casts(run):
        return []
    frame = run.quantized
    frame = frame[(frame["kind"] == "weight") & (frame["calls"] >= 2)]
    per_step = frame.groupby("name", sort=False)[["casts", "calls"]].min()
    again = per_step[per_step["casts"] >= per_step["calls"]]
    if again.empty:
        return []
    name, casts = str(again.index[0]), int(again["casts"].iloc[0])
    return [
        make_finding(
            "requantized-weights",
            f"{formatting.plural(len(again), 'weight')} {'is' if len(again) == 1 else 'are'} quantized {casts:,} times "
            "per step",
            name.removesuffix(".weight"),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=float(casts),
            limit=1.0,
            unit="casts per step",
        )
    ]


@rule(
    Entry(
        code="missing-quantizer-state",
        severity="warning",
        family=LOSS_SCALING,
        order=236,
        what="A training with delayed scaling was resumed without its amax history: FP8 scales start at 1 again.",
        signal="Amax histories without any value at the first step of an optimizer that has made steps before.",
        threshold="One module. Its first steps quantize with the scale 1, so that gradients become 0 and large "
        "activations saturate, until the history has filled.",
        advice="The checkpoint was saved without the modules' extra state, or loaded with strict=False. Save "
        "model.state_dict() with its `_extra_state` entries and load all of it.",
        snippet="state = torch.load(path, weights_only=True)\n"
        "missing, unexpected = model.load_state_dict(state['model'], strict=False)\n"
        "assert not [key for key in missing if key.endswith('_extra_state')], missing",
        page="loss-scale",
    )
)
def missing_quantizer_state(run: Run) -> list[Finding]:
    """`missing-quantizer-state`: resumed with empty amax histories."""
    frame = signals(run, "empty amax history")
    if frame.empty or not facts(run.head.config, "resumed").get("optimizer"):
        return []
    row = frame.iloc[0]
    return [
        make_finding(
            "missing-quantizer-state",
            f"The amax histories of {formatting.plural(int(row['count']), 'module')} are empty after a checkpoint was "
            "loaded",
            str(row["name"]),
            steps=(int(row["step"]), int(row["step"])),
            value=float(row["count"]),
            limit=0.0,
            unit="modules",
        )
    ]
