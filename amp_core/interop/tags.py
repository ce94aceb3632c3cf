"""Tags of TensorBoard logs and the columns they correspond to, in both directions.

>>> column_of("train/grad_norm"), column_of("val/loss")
('grad_norm', None)
>>> tensor_of("gradients/head.weight")
('weight_grad', 'head.weight')
"""

import re

HEADLINES = ("loss", "loss_scale", "skipped", "grad_norm", "lr", "step_ms", "memory_peak_bytes")
"""Columns of `steps` that are exported, each as `amp/<column>`."""
EXPONENTS = "log2_magnitude"
"""Prefix of AMPscope's own histogram tags, which count exponents; other histograms count values."""

NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss", "training_loss", "total_loss", "loss_total", "lm_loss", "batch_loss"),
    "loss_scale": (
        "loss_scale", "grad_scale", "gradient_scale", "amp_scale", "scaler_scale", "scaler", "grad_scaler",
        "loss_scaler", "scale",
    ),
    "grad_norm": ("grad_norm", "gradient_norm", "global_grad_norm", "total_grad_norm", "global_norm", "total_norm"),
    "lr": ("lr", "learning_rate", "lr_0"),
}  # fmt: skip
"""Common names of each column, most common first. `scale` alone counts only after a part that qualifies it."""

_OF_THE_SCALER = frozenset({"amp", "scaler", "grad_scaler", "gradscaler", "loss_scaler"})
_HELD_OUT = re.compile(r"(val|valid|validation|eval|evaluation|test|dev|holdout)(_|$)")
_WRAPPING = frozenset({"train", "training", "step", "iteration", "batch"})
"""Parts of a tag that name the data, not the quantity, like `train` in `loss/train`."""


def column_of(tag: str) -> str | None:
    """The column of `steps` for a scalar with this tag; None if that is uncertain, and for held-out data."""
    match = _match(tag)
    return match[0] if match is not None else None


def rank_of(tag: str) -> tuple[int, int, str]:
    """Sort key for tags of one column, best match first."""
    match = _match(tag)
    return (match[1] if match is not None else 99, tag.count("/"), tag)


def _match(tag: str) -> tuple[str, int] | None:
    if tag.startswith("amp/") and tag.removeprefix("amp/") in HEADLINES:  # our own export
        return tag.removeprefix("amp/"), 0
    parts = [re.sub(r"[^a-z0-9]+", "_", part).strip("_") for part in tag.lower().split("/")]
    if any(_HELD_OUT.match(part) for part in parts) or parts[-1].startswith("epoch_") or parts[-1].endswith("_epoch"):
        return None
    while len(parts) > 1 and (parts[-1] in _WRAPPING or re.fullmatch(r"pg\d+", parts[-1])):
        parts.pop()
    name = parts[-1].removesuffix("_step")
    if re.match(r"lr-[^/]+$", tag.rpartition("/pg")[0].lower() or tag.lower()):  # Lightning's monitor: lr-AdamW/pg1
        return "lr", len(NAMES["lr"])
    if name == "scale" and not _OF_THE_SCALER & set(parts[:-1]):
        return None
    for column, names in NAMES.items():
        if name in names:
            return column, names.index(name)
    return None


_TENSORS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:.*/)?(?:weight_)?grad(?:ient)?s?[/.](?P<name>.+)", re.I), "weight_grad"),
    (re.compile(r"(?P<name>.+?)[/._](?:grad|gradient|gradients)(?:/histogram)?", re.I), "weight_grad"),
    (re.compile(r"(?:.*/)?activations?[/.](?P<name>.+)", re.I), "activation"),
    (re.compile(r"(?:.*/)?(?:param(?:eter)?s|weights)[/.](?P<name>.+)", re.I), "weight"),
    (re.compile(r"(?P<name>.+[/.](?:weight|bias|kernel|gamma|beta|embeddings))(?:_0)?(?:/histogram)?"), "weight"),
)
"""Patterns of histogram tags and the kind of tensor that they name; the first that fits counts."""


def tensor_of(tag: str) -> tuple[str, str] | None:
    """Kind and name of the tensor whose values a histogram of this tag shows; None if that is uncertain."""
    if EXPONENTS in tag.split("/"):
        return None
    for pattern, kind in _TENSORS:
        match = pattern.fullmatch(tag)
        if match is not None:
            return kind, match["name"]
    return None
