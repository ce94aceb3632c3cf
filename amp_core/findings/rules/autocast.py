"""Rules on autocast regions: in backward, around a compiled model, in threads, the weight cache,
and layers that autocast does not reach."""

import numpy as np
import pyarrow.compute as pc

from amp_core.analysis.performance.kernels import is_matrix, kernel_rows, on_cpu
from amp_core.analysis.steps import emulated, recipe
from amp_core.findings.model import RANGE_AND_PRECISION, SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.hardware import MIN_REPORTED_FRAC, steps_of
from amp_core.findings.signals import GEMM_LAYERS, autocast_dtype, by_framework, facts, model_name, signals
from amp_core.findings.snippets import LOOP
from amp_core.store.run import Run
from amp_core.text import formatting


@rule(
    Entry(
        code="backward-under-autocast",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=370,
        what="backward() is called inside the autocast region.",
        signal="Autocast at the call of backward.",
        threshold="Once. torch.amp: backward under autocast is not recommended; operators run in the dtypes of "
        "forward anyway. A remark in Lightning's manual optimization, which does so by design.",
        advice="Operators of backward that have no counterpart in forward are cast again, which costs time and can "
        "overflow. Close the region before backward.",
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
        code="compile-autocast-mismatch",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=380,
        what="A compiled model and autocast disagree: backward inherits autocast, or a graph break leaves it in "
        "another state.",
        signal="A compiled model with autocast on at backward, or other after forward than before.",
        threshold="Once, with torch.compile.",
        advice="The compiled backward is traced under the autocast that is on when it is called. Call backward "
        "outside of the region, and compare its gradients with those of the eager model.",
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
        what="A compiled model keeps float32 between operators where the eager one rounds to 16 bits.",
        signal="torch.compile with Inductor, 16-bit compute, and its switch `emulate_precision_casts`.",
        threshold="The switch is off, as by default (pytorch issues 168126, 168186, 190626): fused kernels leave "
        "out pairs of casts, so compiled and eager losses differ in the last bits of 16.",
        advice="The compiled numbers are the more exact ones, and nothing needs to change for training. To compare "
        "with an eager run bit for bit, let Inductor emulate the casts.",
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
            f"Inductor leaves out casts to {dtype} that the eager model makes",
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
        what="The model ran without gradients and then with, in one autocast region: the cached 16-bit weights of the "
        "first run have no graph, so these weights get no gradient.",
        signal="Parameters without a gradient in a step that had a forward under no_grad inside autocast.",
        threshold="One such parameter.",
        advice="Autocast keeps the cast weights of the first run to the end of its region. Give the run without "
        "gradients its own region.",
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
    frame = frame[(frame["detail"] == "no_grad") & (frame["count"] > 0)]
    if frame.empty:
        return []
    row = frame.iloc[0]
    return [
        make_finding(
            "autocast-cache-no-grad",
            f"{formatting.plural(int(row['count']), 'parameter')} without a gradient after a forward under no_grad in "
            "the same autocast region",
            str(row["name"]),
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=float(row["count"]),
            limit=0.0,
            unit="parameters without a gradient",
        )
    ]


@rule(
    Entry(
        code="autocast-not-in-thread",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=390,
        what="A part of the model runs in another thread, which does not inherit autocast and so computes in float32.",
        signal="Autocast in the threads in which modules run.",
        threshold="A module run by another thread without autocast while it is on in the main one: autocast is a "
        "thread-local state.",
        advice="This part is neither faster nor smaller than in float32. Open autocast inside the function that the "
        "thread runs, or use DistributedDataParallel.",
        snippet="def work(x):\n    with torch.autocast(device_type, dtype=dtype):\n        return block(x)",
        page="",
    )
)
def autocast_not_in_thread(run: Run) -> list[Finding]:
    """`autocast-not-in-thread`: a thread without autocast ran a module."""
    frame = signals(run, "threaded forward")
    if frame.empty or autocast_dtype(run) is None:
        return []
    name, at = str(frame["name"].iloc[0]), int(frame["step"].iloc[0])
    return [
        make_finding(
            "autocast-not-in-thread",
            f"{name or model_name(run)} is run by a thread that has no autocast",
            name or model_name(run),
            steps=(at, at),
            value=1.0,
            limit=0.0,
            unit="modules",
        )
    ]


@rule(
    Entry(
        code="autocast-inactive",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=400,
        follows=("autocast-not-in-thread",),
        what="A layer that autocast should run in 16 bits runs in float32.",
        signal="dtypes of output gradients, operators and kernels of linear layers and convolutions.",
        threshold="5 % of the weights of such layers; below that a remark, as a small float32 part is often intended.",
        advice="The layer lies in a region where autocast is off, in another thread, or behind an operator that "
        "autocast does not know. Open the region around it, or leave it if float32 is intended.",
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
    if len(elsewhere):
        return [_of_another_device(run, str(elsewhere["name"].iloc[0]))]
    if requested not in ("fp16", "bf16") or ran not in ("fp32", "tf32"):
        return []
    scaler = run.head.config.get("scaler")
    scaled = isinstance(scaler, dict) and scaler.get("enabled") is True
    without = ", without a GradScaler" if requested == "fp16" and not scaled else ""
    return [
        make_finding(
            "autocast-inactive",
            f"{requested} was asked for, but no autocast is active: the training runs in {ran}{without}",
            model_name(run),
            value=1.0,
            limit=MIN_REPORTED_FRAC,
            unit="share of matrix weights",
            advice=f"The framework took {requested} as its precision and does not use it here: Accelerate and the "
            "Transformers Trainer do so for fp16 on a CPU. What is measured here is a training in float32. Ask for "
            "bf16, or train on a GPU.",
        )
    ]


def _of_another_device(run: Run, kind: str) -> Finding:
    device = str(run.head.config.get("device") or "cpu").partition(":")[0]
    return make_finding(
        "autocast-inactive",
        f"Autocast is opened for {kind}, and the model runs on {device}: nothing is cast",
        f'torch.autocast("{kind}")',
        value=1.0,
        limit=MIN_REPORTED_FRAC,
        unit="share of matrix weights",
        remedy=Remedy(
            f"An autocast region casts operators of its own device type alone. Open it for {device}, the device of the "
            "model, or move the model.",
            "device_type = next(model.parameters()).device.type\n"
            "with torch.autocast(device_type, dtype=dtype):\n"
            "    loss = loss_fn(model(x), y)",
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
            f"{100 * share:.0f} % of the multiplications are in float32 under {autocast_dtype(run)} autocast, most in "
            f"{where}",
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
            f"{100 * share:.0f} % of the time of matrix kernels runs in float32 under autocast",
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
