"""A traced step of a small transformer without a GPU: hand-written rows of `ops`.

    write(tmp_path / "a", "traced")                   # a scenario of tests.synthetic that has such a step
    add_trace(writer, "cuda")                         # or into any run; KINDS has the others

Two blocks of attention (its products called in a way that autocast does not intercept), LayerNorm and a linear layer, a
head that is kept in FP32 on purpose, and the loss. `cpu` is the same step under autocast's lists for the CPU, `foreign`
its trace from a profiler, without policies and casts.
"""

from typing import Any

from amp_core.store.writer import RunWriter

KINDS = ("cuda", "cpu", "foreign")
STEP = 2

_PRODUCT = 2 * 64 * 32 * 32  # of a linear layer: 64 rows, 32 × 32 weights
_ATTENTION = 2 * 64 * 64 * 8


def op(
    name: str,
    module: str | None,
    ran: str,
    policy: str | None,
    *,
    phase: str = "forward",
    region: str | None = "float16",
    flops: int | None = None,
    hits: int = 0,
    casts: int = 0,
    shapes: str = "[]",
    inputs: str | None = None,
) -> dict[str, Any]:
    """A row of an operator that is not a cast; `ran` is the dtype of its output, and by default of its inputs."""
    return {
        "module": module,
        "op": f"aten::{name}",
        "policy": policy,
        "in_dtypes": inputs or ran,
        "out_dtype": ran,
        "count": 1,
        "cast_bytes": casts * 2048,
        "casts": casts,
        "cache_hits": hits,
        "flops": flops,
        "phase": phase,
        "autocast": region,
        "in_shapes": shapes,
        "out_bytes": 2048,
    }


def cast(module: str, way: str, by: str, phase: str = "forward", of: str = "other", **more: int) -> dict[str, Any]:
    """A row of a cast; `way` is a pair of dtypes such as `float32 float16`."""
    narrow, wide = way.split()
    return {
        "module": module,
        "op": "aten::_to_copy",
        "in_dtypes": narrow,
        "out_dtype": wide,
        "count": 1,
        "phase": phase,
        "autocast": "float16" if phase == "forward" else None,
        "out_bytes": 2048,
        "cast_by": by,
        "cast_of": of,
        "repeated": 0,
        "undone": 0,
    } | more


def _rows(half: str, norm: str | None) -> list[dict[str, Any]]:
    """The step with 16-bit dtype `half`; `norm` is the policy of LayerNorm, softmax and the loss."""
    down, up = f"float32 {half}", f"{half} float32"
    rows = [op("embedding", "tokens", "float32", "none", inputs="float32, int64")]
    shapes = "[[32], [64, 32], [32, 32]]"
    for block in ("blocks.0", "blocks.1"):
        attention = [
            op("native_layer_norm", f"{block}.norm", "float32", norm),
            cast(f"{block}.qkv", down, "autocast", of="parameter"),
            cast(f"{block}.qkv", down, "autocast", repeated=1),
            op("addmm", f"{block}.qkv", half, "lower_precision_fp", flops=_PRODUCT, casts=2, shapes=shapes),
            cast(f"{block}.attention", up, "operator"),
            op("bmm", f"{block}.attention", "float32", "not applied", flops=_ATTENTION),
            op("_safe_softmax", f"{block}.attention", "float32", "none"),
            op("gelu", block, half, "none"),
            op("addmm", f"{block}.fc", half, "lower_precision_fp", flops=_PRODUCT, hits=1, shapes=shapes),
            op("mm", f"{block}.fc", half, None, phase="backward", region=None, flops=2 * _PRODUCT),
            cast(f"{block}.fc", up, "gradient", "backward"),
        ]
        rows += attention
    rows += [
        cast("", up, "code", undone=1),
        op("mm", "head", "float32", None, region="disabled", flops=_PRODUCT),
        op("_log_softmax", None, "float32", norm),
        op("mm", "head", "float32", None, phase="backward", region=None, flops=2 * _PRODUCT),
        op("add_", None, "float32", None, phase="optimizer", region=None),
    ]
    return rows


def add_trace(writer: RunWriter, kind: str) -> None:
    """Write the traced step of one of `KINDS`, with the event that the recorder writes beside it."""
    if kind == "cpu":
        rows, device = _rows("bfloat16", "none"), "cpu"
        for row in rows:
            row["autocast"] = "bfloat16" if row["autocast"] == "float16" else row["autocast"]
    else:
        rows, device = _rows("float16", "fp32"), "cuda:0"
    if kind == "foreign":
        known = ("module", "op", "in_dtypes", "out_dtype", "count", "in_shapes")
        rows = [{k: row.get(k) for k in known} for row in rows if row.get("cast_by") is None]
    else:
        rows = [row | {"device": device} for row in rows]
        writer.event("traced", name="ops", detail=f"{len(rows)} operators", step=STEP)
    columns: dict[str, list[Any]] = {"step": [None if kind == "foreign" else STEP] * len(rows)}
    for name in dict.fromkeys(key for row in rows for key in row):
        columns[name] = [row.get(name) for row in rows]
    writer.append("ops", columns)
