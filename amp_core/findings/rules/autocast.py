"""Rules on autocast regions: in backward, around a compiled model, in threads, the weight cache,
and layers that autocast does not reach."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis.performance.kernels import kernel_rows, on_cpu
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.steps import autocast_dtype, emulated, recipe, scaler_enabled
from amp_core.findings.model import RANGE_AND_PRECISION, SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.hardware import MIN_REPORTED_FRAC, steps_of
from amp_core.findings.signals import GEMM_LAYERS, by_framework, facts, model_name, signals
from amp_core.findings.snippets import LOOP
from amp_core.store.run import Run
from amp_core.text import formatting


@rule(
    Entry(
        code="backward-under-autocast",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=370,
        follows=("stale-autocast-cache",),
        what="backward() is called inside the autocast region.",
        signal="Autocast state when backward is called.",
        threshold="One call. The torch.amp documentation advises against backward under autocast: backward "
        "operators run in the dtypes of the forward pass anyway. Informational in Lightning's manual optimization, "
        "which does this by design.",
        advice="Backward operators without a counterpart in the forward pass are cast again, which costs time and "
        "can overflow. Close the region before backward.",
        snippet=LOOP,
        page="",
    )
)
def backward_under_autocast(run: Run) -> list[Finding]:
    """`backward-under-autocast`: backward called inside the region. A compiled model has its own code."""
    frame = signals(run, "autocast in backward")
    if frame.empty or _compiled(run):
        return []
    at = int(frame["step"].iloc[0])
    return [
        make_finding(
            "backward-under-autocast",
            f"backward is called under {frame['dtype'].iloc[0]} autocast",
            "backward",
            severity=by_framework(run, "lightning"),  # its manual optimization
            steps=(at, at),
            value=1.0,
            limit=0.0,
            unit="backward passes",
        )
    ]


@rule(
    Entry(
        code="stale-autocast-cache",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=78,
        what="The optimizer steps inside an autocast region that stays open for the next step: its forward uses the "
        "16-bit copies that autocast made of the weights before the update.",
        signal="Autocast and its cache at the optimizer's step and at the next forward, without the end of the "
        "outermost region between them.",
        threshold="One such step. Autocast casts an FP32 weight once and keeps the copy until the outermost region "
        "ends (torch/amp/autocast_mode.py, clear_autocast_cache).",
        advice="Updates have no effect as long as the region is open: with a region around the whole loop, the model "
        "never learns. Open one region for each forward, and close it before backward.",
        snippet=LOOP,
        page="",
    )
)
def stale_autocast_cache(run: Run) -> list[Finding]:
    """`stale-autocast-cache`: an autocast region that holds several steps, whose cache keeps the first weights."""
    frame = signals(run, "stale cache")
    if frame.empty:
        return []
    at = int(frame["step"].iloc[0])
    return [
        make_finding(
            "stale-autocast-cache",
            f"{frame['name'].iloc[0]} steps inside an autocast region that the next step goes on using: its forward "
            f"runs with {frame['dtype'].iloc[0]} copies of the weights from before the update",
            "torch.autocast",
            steps=(at, at),
            value=2.0,
            limit=1.0,
            unit="steps in one region",
        )
    ]


@rule(
    Entry(
        code="compile-autocast-mismatch",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=380,
        what="Autocast differs between forward and backward of a compiled model: backward runs under autocast, or a "
        "graph break leaves autocast in another state.",
        signal=(
            "In a compiled model, autocast is on at backward, or its state after forward differs from that before."
        ),
        threshold="One occurrence, with torch.compile.",
        advice="The compiled backward is traced with the autocast state at the time of the call. Call backward "
        "outside the region, and compare its gradients with those of the eager model.",
        snippet="model = torch.compile(model)\n\n" + LOOP,
        page="",
    )
)
def compile_autocast_mismatch(run: Run) -> list[Finding]:
    """`compile-autocast-mismatch`: a compiled model whose backward inherits autocast, or that leaves it changed."""
    frame = signals(run, "autocast in backward", "autocast changed")
    if frame.empty or not _compiled(run):
        return []
    row = frame.iloc[0]
    mismatch = (
        "backward inherits autocast" if row["kind"] == "autocast in backward" else "forward leaves autocast changed"
    )
    return [
        make_finding(
            "compile-autocast-mismatch",
            f"The model is compiled and {mismatch}",
            "torch.compile",
            steps=(int(row["step"]), int(row["step"])) if row["step"] == row["step"] else None,
            value=1.0,
            limit=0.0,
            unit="backward passes" if row["kind"] == "autocast in backward" else "forward passes",
        )
    ]


@rule(
    Entry(
        code="compile-elides-casts",
        severity="info",
        family=RANGE_AND_PRECISION,
        order=385,
        what="A compiled model keeps float32 between operators where eager mode rounds to 16 bits.",
        signal="torch.compile with Inductor, 16-bit compute, and Inductor's option `emulate_precision_casts`.",
        threshold="The option is off, which is the default (pytorch issues 168126, 168186, 190626): fused kernels "
        "omit casts to 16 bits and back, so compiled and eager losses differ by 16-bit rounding error.",
        advice="The compiled results are the more accurate ones, and training needs no change. To compare with an "
        "eager run bit for bit, let Inductor emulate the casts.",
        snippet="import torch._inductor.config\n"
        "\n"
        "torch._inductor.config.emulate_precision_casts = True   # before the first compiled call",
        page="compare",
    )
)
def compile_elides_casts(run: Run) -> list[Finding]:
    """`compile-elides-casts`: Inductor compiled a 16-bit model without emulating eager's casts."""
    dtype = autocast_dtype(run) or next(iter(facts(run.head.model, "dtypes").values()), None)
    if run.head.config.get("inductor_emulates_casts") is not False or dtype not in ("float16", "bfloat16"):
        return []
    return [
        make_finding(
            "compile-elides-casts",
            f"Inductor omits casts to {dtype} that eager mode performs",
            "torch.compile",
            value=0.0,
            limit=1.0,
            unit="emulate_precision_casts",
        )
    ]


def _compiled(run: Run) -> bool:
    warned = signals(run, "warning")["detail"].str.contains("compiled")
    return bool(run.head.config.get("compile")) or bool(warned.any())


@rule(
    Entry(
        code="autocast-cache-no-grad",
        severity="error",
        family=RANGE_AND_PRECISION,
        order=260,
        what="The model ran under no_grad and then with gradients in the same autocast region: the 16-bit weights "
        "cached by the first pass have no graph, so those weights get no gradient.",
        signal="Parameters without a gradient in a step that had a forward pass under no_grad inside autocast, or in "
        "whose forward a 16-bit copy of them without a graph is multiplied.",
        threshold="One such parameter.",
        advice="Autocast, before torch 2.10, and programs that cast weights themselves keep the copies for the next "
        "pass. Give the no_grad pass its own region, or make copies anew.",
        snippet="with torch.no_grad(), torch.autocast(device_type, dtype=dtype):\n"
        "    target = model(x)\n"
        "with torch.autocast(device_type, dtype=dtype):\n"
        "    loss = loss_fn(model(x), target)",
        page="",
    )
)
def autocast_cache_no_grad(run: Run) -> list[Finding]:
    """`autocast-cache-no-grad`: parameters without a gradient after a forward under no_grad in the same region."""
    frame = signals(run, "missing gradients")
    copies = signals(run, "graphless cast")
    copies = copies[copies["name"].isin(set(frame["name"]))]
    within = frame[(frame["detail"] == "no_grad") & (frame["count"] > 0)]
    if within.empty and len(copies):
        return [_without_graph(copies.iloc[0], frame)]
    frame = within
    if frame.empty:
        return []
    row = frame.iloc[0]
    return [
        make_finding(
            "autocast-cache-no-grad",
            f"{formatting.plural(int(row['count']), 'parameter')} without a gradient after a forward pass under "
            "no_grad in the same autocast region",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=float(row["count"]),
            limit=0.0,
            unit="parameters without a gradient",
        )
    ]


def _without_graph(copy: "pd.Series[Any]", missing: pd.DataFrame) -> Finding:
    count = int(missing["count"].max())
    more = f" and {formatting.plural(count - 1, 'more tensor')} get" if count > 1 else " gets"
    return make_finding(
        "autocast-cache-no-grad",
        f"{copy['name']}{more} no gradient: the model uses a {copy['dtype']} copy that has no graph",
        str(copy["name"]),
        steps=(int(missing["step"].min()), int(missing["step"].max())),
        value=float(count),
        limit=0.0,
        unit="parameters without a gradient",
    )


@rule(
    Entry(
        code="autocast-not-in-thread",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=390,
        what=(
            "Part of the model runs in another thread, which does not inherit autocast and therefore computes in "
            "float32."
        ),
        signal="Autocast state in the threads that run modules.",
        threshold="A module runs in a thread without autocast while it is on in the main thread: autocast state is "
        "thread-local.",
        advice="This part gets neither the speed nor the memory savings of 16 bits. Open autocast inside the "
        "function that the thread runs, or use DistributedDataParallel.",
        snippet="def work(x):\n    with torch.autocast(device_type, dtype=dtype):\n        return block(x)",
        page="",
    )
)
def autocast_not_in_thread(run: Run) -> list[Finding]:
    """`autocast-not-in-thread`: a thread without autocast ran a module."""
    frame = signals(run, "threaded forward")
    if frame.empty or (autocast_dtype(run) is None and not _only_in_threads(run)):
        return []
    name, at = str(frame["name"].iloc[0]), int(frame["step"].iloc[0])
    return [
        make_finding(
            "autocast-not-in-thread",
            f"Modules run in a thread without autocast, {name or model_name(run)} first",
            name or model_name(run),
            steps=(at, at),
            unit="modules",
        )
    ]


def _only_in_threads(run: Run) -> bool:
    """Whether no module of an FP32 model ran in the main thread, so that its autocast is unknown, and a region of that
    thread, or a GradScaler, says that it was on."""
    stored, config = set(map(str, facts(run.head.model, "dtypes").values())), run.head.config
    was_on = config.get("autocast_without_forward") is True or scaler_enabled(run)
    return "autocast_dtype" not in config and was_on and stored <= {"float32"}


@rule(
    Entry(
        code="autocast-inactive",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=400,
        follows=("autocast-not-in-thread",),
        what="A layer that autocast should run in 16 bits runs in float32.",
        signal="dtypes of output gradients, operators and kernels of linear layers and convolutions.",
        threshold=(
            "5 % of the weights of such layers. Below that it is informational, as a small float32 part is often "
            "intended."
        ),
        advice="The layer is inside a region where autocast is off, runs in another thread, or uses an operator "
        "that autocast does not cover. Extend the autocast region to it, or leave it if float32 is intended.",
        snippet="with torch.autocast(device_type, dtype=dtype):\n    y = layer(x)",
        page="precision-map",
    )
)
def autocast_inactive(run: Run) -> list[Finding]:
    """`autocast-inactive`: linear layers or convolutions that returned FP32 although autocast is on, or was
    requested."""
    if autocast_dtype(run) is None:
        return _not_as_requested(run)
    if emulated(run):  # emulated products are computed in FP32
        return []
    from_kernels = _wide_kernels(run)
    if from_kernels:
        return from_kernels
    if len(nothing := signals(run, "nothing cast")):
        row = nothing.iloc[0]
        if row["name"]:
            return [_outside_of_region(run, str(row["name"]), int(row["count"]), int(row["step"]))]
        return [_without_products(run, int(row["step"]))]
    if run.head.config.get("products_seen"):
        return _wide_products(run)
    layers, shapes = facts(run.head.model, "layers"), facts(run.head.model, "shapes")
    gemm_layers = [n for n, kind in layers.items() if any(k in str(kind) for k in GEMM_LAYERS)]
    sizes = {n: float(np.prod(shape)) for n in gemm_layers if isinstance(shape := shapes.get(f"{n}.weight"), list)}
    total = sum(sizes.values())
    wide = [n for n in _wide_outputs(run) if n in sizes]
    if not wide or not total:
        return []
    share = sum(sizes[n] for n in wide) / total
    where = max(wide, key=sizes.__getitem__)
    title = f"{where} and {formatting.plural(len(wide) - 1, 'more layer')} run" if len(wide) > 1 else f"{where} runs"
    return [
        make_finding(
            "autocast-inactive",
            title + f" in float32 under {autocast_dtype(run)} autocast",
            where,
            severity=None if share >= MIN_REPORTED_FRAC else "info",
            value=share,
            limit=MIN_REPORTED_FRAC,
            unit="share of matrix weights",
        )
    ]


def _not_as_requested(run: Run) -> list[Finding]:
    """A framework was configured for 16 bits and trained in FP32: some do so on a CPU without a warning."""
    requested, ran = run.head.config.get("requested_precision"), recipe(run)
    elsewhere = signals(run, "autocast elsewhere")
    if len(elsewhere) and elsewhere["detail"].iloc[0] == "off":
        return _switched_off(run, str(elsewhere["dtype"].iloc[0]))
    if len(elsewhere):
        return [_of_another_device(run, str(elsewhere["name"].iloc[0]), str(elsewhere["detail"].iloc[0]) == "disabled")]
    if requested not in ("fp16", "bf16") or ran not in ("fp32", "tf32"):
        return []
    scaler = run.head.config.get("scaler")
    scaled = isinstance(scaler, dict) and scaler.get("enabled") is True
    without = ", without a GradScaler" if requested == "fp16" and not scaled else ""
    fp16_on_cpu = requested == "fp16" and str(run.head.config.get("device") or "cpu").startswith("cpu")
    return [
        make_finding(
            "autocast-inactive",
            f"{requested} was requested, but no autocast is active: the model trains in {ran}{without}",
            model_name(run),
            value=1.0,
            limit=MIN_REPORTED_FRAC,
            unit="share of matrix weights",
            remedy=_NOT_APPLIED if fp16_on_cpu else _NOT_CALLED,
        )
    ]


_NOT_APPLIED = Remedy(
    "The framework accepts fp16 as the precision but does not apply it on a CPU, as Accelerate and the Transformers "
    "Trainer do; this run is a float32 training. Request bf16, or train on a GPU.",
    'accelerator = Accelerator(mixed_precision="bf16")',
)
_NOT_CALLED = Remedy(
    "A framework's autocast is in the forward of the model that it returned; the loop calls another one, such as the "
    "module inside of it, or what `unwrap_model` gives. Call the prepared model.",
    "model, optimizer = accelerator.prepare(model, optimizer)\n"
    "loss = loss_fn(model(x), y)   # not accelerator.unwrap_model(model)(x)",
)


def _switched_off(run: Run, dtype: str) -> list[Finding]:
    """Regions that the program disabled itself, as information: a flag may say so."""
    if recipe(run) not in ("fp32", "tf32"):
        return []
    scaler = run.head.config.get("scaler")
    disabled = isinstance(scaler, dict) and scaler.get("enabled") is False
    also = ", and so is the GradScaler" if disabled else ""
    return [
        make_finding(
            "autocast-inactive",
            f"Every autocast region to {dtype} is disabled{also}: the model trains in {recipe(run)}",
            "torch.autocast",
            severity="info",
            value=1.0,
            limit=MIN_REPORTED_FRAC,
            unit="share of matrix weights",
            remedy=Remedy(
                "A flag of the program disables them; `GradScaler()` is one for CUDA, which torch disables where there "
                "is no GPU. If mixed precision was intended, create the scaler for the model's device and enable both.",
                "scaler = torch.amp.GradScaler(device_type)\n"
                "with torch.autocast(device_type, dtype=dtype):\n"
                "    loss = loss_fn(model(x), y)",
            ),
        )
    ]


def _of_another_device(run: Run, kind: str, disabled: bool) -> Finding:
    device = str(run.head.config.get("device") or "cpu").partition(":")[0]
    return make_finding(
        "autocast-inactive",
        f"Autocast is {'disabled' if disabled else 'enabled'} for {kind}, and the model runs on {device}: "
        "nothing is cast",
        f'torch.autocast("{kind}")',
        severity="info" if disabled else None,  # perhaps by the program itself
        value=1.0,
        limit=MIN_REPORTED_FRAC,
        unit="share of matrix weights",
        remedy=Remedy(
            f"An autocast region only casts operators of its own device type. Open it for {device}, where the model "
            "is, or move the model.",
            "device_type = next(model.parameters()).device.type\n"
            "with torch.autocast(device_type, dtype=dtype):\n"
            "    loss = loss_fn(model(x), y)",
        ),
    )


def _outside_of_region(run: Run, name: str, count: int, step: int) -> Finding:
    """The region holds the loss alone, or nothing that is computed: the model is called outside of it."""
    rest = f" and {formatting.plural(count - 1, 'more module')} compute" if count > 1 else " computes"
    return make_finding(
        "autocast-inactive",
        f"Nothing runs in 16 bits: {name}{rest} in float32, outside of the {autocast_dtype(run)} autocast region",
        name,
        steps=(step, step),
        value=1.0,
        limit=MIN_REPORTED_FRAC,
        unit="share of matrix weights",
        remedy=Remedy(
            "Autocast acts on what is called within its region, and finds nothing to cast there. Put the call of the "
            "model into the region, beside the loss.",
            "with torch.autocast(device_type, dtype=dtype):\n    loss = loss_fn(model(x), y)\nloss.backward()",
        ),
    )


def _without_products(run: Run, step: int) -> Finding:
    layers, shapes = facts(run.head.model, "layers"), facts(run.head.model, "shapes")
    matrices = [name for name, shape in shapes.items() if isinstance(shape, list) and len(shape) > 1]
    multiplies = any("Embedding" not in str(layers.get(name.rpartition(".")[0], "")) for name in matrices)
    return make_finding(
        "autocast-inactive",
        f"No operator runs in 16 bits under {autocast_dtype(run)} autocast",
        "torch.autocast",
        severity=None if multiplies else "info",  # a model without products has nothing to cast
        steps=(step, step),
        value=1.0,
        limit=MIN_REPORTED_FRAC,
        unit="share of matrix weights",
        remedy=Remedy(
            "Autocast casts for the operators it knows, such as linear layers, convolutions, matmul and einsum; a "
            "product written as a multiplication and a sum, or as a custom operator, stays in float32. Write it as "
            "matmul or einsum, or train without autocast and scaler.",
            "y = torch.einsum('bi,oi->bo', x, weight)   # not (x[:, None] * weight).sum(-1)",
        ),
    )


def _wide_products(run: Run) -> list[Finding]:
    """`autocast-inactive` from the operators of the first step, which show what was multiplied in FP32."""
    frame = signals(run, "wide product")
    if frame.empty:
        return []
    share = float(frame["value"].sum())
    where = str(frame["name"].iloc[0]) or model_name(run)
    return [
        make_finding(
            "autocast-inactive",
            f"{100 * share:.0f} % of multiply-adds run in float32 under {autocast_dtype(run)} autocast, most of them "
            f"in {where}",
            where,
            severity=None if share >= MIN_REPORTED_FRAC else "info",
            steps=(int(frame["step"].iloc[0]), int(frame["step"].iloc[0])),
            value=share,
            limit=MIN_REPORTED_FRAC,
            unit="share of multiplications",
        )
    ]


def _wide_kernels(run: Run) -> list[Finding]:
    """`autocast-inactive` from a profile: FP32 matrix kernels in an autocast run on a GPU."""
    rows = kernel_rows(run)
    if rows.empty or on_cpu(rows):
        return []
    matrix = rows[is_matrix(rows)]
    wide = matrix[matrix["precision"].isin(["fp32", "tf32"])]
    total = float(matrix["total_us"].sum())
    share = float(wide["total_us"].sum()) / total if total else 0.0
    if share < MIN_REPORTED_FRAC:
        return []
    longest = wide.iloc[int(wide["total_us"].to_numpy().argmax())]
    return [
        make_finding(
            "autocast-inactive",
            f"{100 * share:.0f} % of GEMM/conv kernel time is spent in float32 under autocast",
            str(longest["module"]) or str(longest["op"]) or str(longest["name"]) or model_name(run),
            steps=steps_of(wide),
            value=share,
            limit=MIN_REPORTED_FRAC,
            unit="share of matrix time",
        )
    ]


def _wide_outputs(run: Run) -> list[str]:
    """Modules whose output gradient was FP32 at the first sampled step, none of them 16-bit there."""
    table = run.table("tensors").select(["step", "name", "kind", "dtype"])
    table = table.filter(pc.equal(table.column("kind"), "output_grad"))
    table = table.filter(pc.equal(table.column("step"), pc.min(table.column("step"))))
    wide: set[str] = set()
    narrow: set[str] = set()
    for name, dtype in zip(table.column("name").to_pylist(), table.column("dtype").to_pylist(), strict=True):
        (wide if dtype == "float32" else narrow).add(name)
    return sorted(wide - narrow)
