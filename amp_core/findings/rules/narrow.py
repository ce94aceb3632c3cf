"""Rules on operators of forward and loss that lose too much in 16 bits, from those of the first step.

The limits against what 98 healthy small trainings do, most of them in FP16 or BF16: those of
tests/findings/other_forms, further ones of the same kind (transformers, masks, diffusion, GAN, reinforcement learning,
flows), and two steps of every workload at its smallest size. Measured with all limits set to 2; "none" means that no
operator of the kind had 16-bit input and output.

| measured in 16 bits | trainings that have it | largest | limit |
|---|---:|---:|---:|
| classes of a log-softmax or logsumexp | 0 | none | 8,192 |
| terms of a sum | 3 | 32 | 4,096 |
| terms of a mean | 2 | 2 | 65,536 |
| terms of a cumulative sum, per bin, in a chain of additions | 0 | none | 256, 256, 64 |
| routers, statistics of norms, rounded integers | 0 | none | 1 |

Small models cannot show how large harmless sums get: the limits follow from the formats, as each entry says.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding, Remedy, Severity
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import model_name, signals
from amp_core.store.run import Run
from amp_core.text import formatting

MIN_TIED_FRAC = 0.05
"""At this share of rows, ties between float32 scores of 16-bit logits change the routing."""
_AUTOCAST_OFF = "with torch.autocast(x.device.type, enabled=False):\n"


def _from_signal(
    run: Run, kind: str, unit: str | Mapping[str, str], title: Callable[["pd.Series[Any]"], str]
) -> list[Finding]:
    """One finding on these events, in the place of the largest value, whose unit may depend on the operator."""
    frame = signals(run, kind)
    if frame.empty:
        return []
    row = frame.iloc[int(frame["value"].fillna(0.0).to_numpy().argmax())]
    where = str(row["name"]) or model_name(run)
    row = row.where(row.index != "name", where)
    more = frame["name"].nunique() - 1
    also = f", and {formatting.plural(more, 'more module')} {'does' if more == 1 else 'do'}" if more else ""
    value, limit = (float(str(row[c])) if row[c] == row[c] else None for c in ("value", "limit"))
    return [
        make_finding(
            _CODES[kind],
            _capitalised(title(row)) + also,
            where,
            steps=(int(frame["step"].min()), int(frame["step"].max())),
            value=value,
            limit=limit,
            unit=unit if isinstance(unit, str) else unit.get(str(row["op"]), "values"),
        )
    ]


def _capitalised(title: str) -> str:
    """A title that begins with "the loop" in place of a module's name, which keeps its spelling."""
    return title.replace("the loop", "The loop", 1) if title.startswith("the loop") else title


_CODES = {
    "narrow classes": "half-logits",
    "narrow ratio": "half-logits",
    "coarse logits": "half-logits",
    "coarse predictions": "half-logits",
    "rounded probabilities": "rounded-probabilities",
    "narrow router": "half-router",
    "rounded logits": "half-router",
    "narrow statistics": "half-statistics",
    "narrow variance": "half-statistics",
    "narrow distance": "half-statistics",
    "narrow sum": "half-sum",
    "rounded positions": "rounded-positions",
}


_COARSE_ADVICE = (
    "A softmax takes differences of logits, so rounding changes probabilities by the factor e and more. Compute the "
    "product that makes the logits, and what scales them, in float32 with autocast off."
)
_COARSE = _AUTOCAST_OFF + "    logits = (x.float() @ y.float().T) / temperature"
_PREDICTIONS_ADVICE = (
    "The model's output is rounded more coarsely than its targets differ, so the error cannot fall below that. Compute "
    "the last layer in float32 with autocast off, or subtract the mean from the targets and divide by their spread."
)
_PREDICTIONS = _AUTOCAST_OFF + "    y = head(x.float())"
_RATIO_ADVICE = (
    "From a log-probability of -2 on, bfloat16 has steps of 2^-6, so ratios are off by percents, and the "
    "clipping of the policy decides on rounding. Compute both log-probabilities in float32, in the rollout too, and "
    "keep them so."
)
_RATIO = (
    "log_probs = torch.nn.functional.log_softmax(logits.float(), -1).gather(-1, actions)\n"
    "ratio = (log_probs - old_log_probs).exp()   # both in float32"
)


@rule(
    Entry(
        code="half-logits",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=281,
        follows_in_place=("half-output-policy",),
        what="A log-softmax over many classes is computed in 16 bits, or a ratio of probabilities from 16-bit "
        "logarithms; or large logits, or predictions far from zero, were rounded to 16 bits.",
        signal="Operators in the first step with 16-bit input and output, the largest logit of most rows, and the "
        "spread of targets. In its loss, the exponential of a difference of which one part has a gradient and either "
        "has 16 bits.",
        threshold="8,192 classes: log-probabilities start near -9, where the spacing of bfloat16 is 2^-4, so the "
        "loss of a token has two significant digits (torchtitan issue 700 on losses in bfloat16). Largest logits above "
        "256 (bfloat16) or 2,048 (float16), where the spacing is 2. Targets whose standard deviation is below the "
        "spacing of the predictions' dtype at their mean. One such ratio: a policy is clipped where it changes by 10 "
        "or 20 % (arXiv 2510.26788 on rollouts in bfloat16).",
        advice="On a GPU, autocast runs softmax and log_softmax in float32, but not within cross_entropy, which asks "
        "for the dtype of the logits; nor on a CPU, under FSDP with 16-bit outputs, or in 16-bit models. Cast the "
        "logits to float32 before the loss.",
        snippet="loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())",
        page="number-ranges",
    )
)
def half_logits(run: Run) -> list[Finding]:
    """`half-logits`: a log-softmax or logsumexp over a large vocabulary in 16 bits, or of large logits, or a ratio of
    probabilities."""
    return (
        _from_signal(
            run,
            "narrow classes",
            "classes",
            lambda row: f"{row['op']} over {int(float(str(row['value']))):,} classes is computed in {row['dtype']}",
        )
        or [
            replace(finding, advice=_COARSE_ADVICE, snippet=_COARSE)
            for finding in _from_signal(
                run,
                "coarse logits",
                "largest logit",
                lambda row: (
                    f"Logits of up to {formatting.number(float(str(row['value'])))} were rounded to {row['dtype']}, "
                    f"which has steps of 2 and more beyond {formatting.number(float(str(row['limit'])))}"
                ),
            )
        ]
        or [
            replace(finding, advice=_PREDICTIONS_ADVICE, snippet=_PREDICTIONS)
            for finding in _from_signal(
                run,
                "coarse predictions",
                "spacings per standard deviation",
                lambda row: (
                    f"The targets of {row['op']} differ by less than the spacing of their {row['dtype']} predictions"
                ),
            )
        ]
        or [
            replace(finding, advice=_RATIO_ADVICE, snippet=_RATIO)
            for finding in _from_signal(
                run,
                "narrow ratio",
                "ratios",
                lambda row: f"A ratio of probabilities is computed from logarithms in {row['dtype']}",
            )
        ]
        or _ratio_of_two_forwards(run)
    )


def _ratio_of_two_forwards(run: Run) -> list[Finding]:
    """A policy's ratio compares log-probabilities of a rollout in another dtype than that of the training."""
    ratio, other = signals(run, "ratio"), signals(run, "other forward")
    if ratio.empty or other.empty:
        return []
    row = other.iloc[0]
    name, dtype = model_name(run), row["dtype"]
    first, second = ("float32", dtype) if row["detail"] == "training" else (dtype, "float32")
    return [
        make_finding(
            "half-logits",
            f"A ratio of probabilities compares those of a forward without gradients in {first} with those of one in "
            f"{second}",
            name,
            steps=(int(row["step"]), int(row["step"])),
            value=float(ratio["value"].iloc[0]),
            limit=0.0,
            unit="ratios",
            remedy=Remedy(
                f"Rounding alone makes the two differ before any update, so that ratios are off by percents and "
                f"clipping decides on rounding. Run {name} in the same precision in the rollout and in the update.",
                "with torch.autocast(device_type, dtype=dtype):   # around both, or around neither\n"
                "    log_probs = policy(states).log_softmax(-1).gather(-1, actions)",
            ),
        )
    ]


@rule(
    Entry(
        code="rounded-probabilities",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=278,
        follows=("bce-banned",),
        what="A binary cross-entropy is computed from probabilities that were rounded to 16 bits.",
        signal="Operators in the first step: a sigmoid or softmax in 16 bits, or cast to it, and then "
        "binary_cross_entropy or a logarithm of 1 - p, in any dtype.",
        threshold="One such loss. Below 1, the spacing of bfloat16 is 2^-8 and that of float16 2^-11: a logit of 6.2 "
        "or 8.3 is a probability of exactly 1, for which torch refuses binary_cross_entropy under CUDA autocast.",
        advice="Confident errors give a loss of -log(0), or of eps, and their gradient is zero or NaN, so the model "
        "never corrects them. Leave out the sigmoid and use a loss that takes logits.",
        snippet="loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), targets)",
        page="number-ranges",
    )
)
def rounded_probabilities(run: Run) -> list[Finding]:
    """`rounded-probabilities`: a loss takes 1 - p of probabilities that 16 bits cannot tell from 1."""
    return _from_signal(
        run,
        "rounded probabilities",
        "logit",
        lambda row: (
            f"{row['op']} takes probabilities that were rounded to {row['dtype']}, where a logit of "
            f"{formatting.number(float(str(row['value'])))} is a probability of 1"
        ),
    )


@rule(
    Entry(
        code="half-router",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=282,
        what="A router selects experts, or a policy its actions, by 16-bit scores, which are often equal.",
        signal="top-k or maximum of 16-bit scores, or of float32 scores that were 16-bit before, next to a softmax "
        "over as many, in the first step.",
        threshold="One such selection (Switch Transformers, section 2.4: the router in float32, as bfloat16 "
        "training diverges). If only the logits are 16-bit and the softmax is float32, an info, and a warning if ties "
        "decide 5 % of the rows.",
        advice="Scores have 8 significant bits in bfloat16 and 11 in float16, so they tie, and rounding, which differs "
        "between kernels, decides what is chosen. Compute the logits and their softmax in float32.",
        snippet=_AUTOCAST_OFF
        + "    scores = torch.nn.functional.linear(x.float(), router.weight.float()).softmax(-1)\n"
        "weights, experts = scores.topk(k, dim=-1)",
        page="layer-detail",
    )
)
def half_router(run: Run) -> list[Finding]:
    """`half-router`: experts are chosen by scores in 16 bits, or by FP32 scores of 16-bit logits."""

    def title(row: "pd.Series[Any]") -> str:
        tied = int(float(str(row["value"])))
        ties = f"; {formatting.plural(tied, 'row')} had a tie at the cutoff" if tied else ""
        return f"{row['name']} selects among {int(float(str(row['limit'])))} scores in {row['dtype']}{ties}"

    chosen = _from_signal(run, "narrow router", "rows with a tie", title)
    return [replace(finding, limit=0.0) for finding in chosen] or [
        replace(finding, limit=MIN_TIED_FRAC, severity=_severity_of_ties(finding))
        for finding in _from_signal(
            run,
            "rounded logits",
            "share of rows with a tie",
            lambda row: (
                f"{row['name']} selects among {int(float(str(row['limit'])))} scores whose logits are "
                f"{row['dtype']}{_ties(float(str(row['value'])))}"
            ),
        )
    ]


def _ties(frac: float) -> str:
    return f"; {formatting.percent(frac)} of the rows had a tie at the cutoff" if frac else ""


def _severity_of_ties(finding: Finding) -> Severity:
    return "warning" if (finding.value or 0.0) >= MIN_TIED_FRAC else "info"


_DISTANCE_ADVICE = (
    "The distances are small beside the vectors' squares, whose rounding decides which vector is nearest. Compute them "
    "in float32, from differences, or with `torch.cdist`."
)
_DISTANCES = _AUTOCAST_OFF + "    distances = torch.cdist(x.float(), codes.float())\nnearest = distances.argmin(-1)"


@rule(
    Entry(
        code="half-statistics",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=283,
        what="A normalization layer computes or stores its mean or variance in 16 bits, or any code computes variances "
        "or squared distances in 16 bits as a difference of nearly equal numbers.",
        signal="Mean or variance and root, or norms of rows before a learned gain, with 16-bit input and output in one "
        "module, in the first step; 16-bit running statistics that the first steps update; the square of a mean that "
        "is subtracted from a mean of squares, or products of vectors from their squares.",
        threshold="One such layer, or half of such differences within four spacings of what they are taken from. "
        "torch's own norms accumulate in float32 whatever their input; a bfloat16 mean of "
        "squares is off by up to 2^-9, which scales the whole row (transformers casts to float32 in LlamaRMSNorm).",
        advice="In float16, squares of values above 255 overflow and the layer returns zeros; in bfloat16, a running "
        "average stops changing once the change is below 2^-9 of it, and a variance loses its digits to cancellation. "
        "Compute statistics in float32 and cast the result.",
        snippet="variance = x.float().square().mean(-1, keepdim=True)\n"
        "x = (x.float() * torch.rsqrt(variance + eps)).to(x.dtype) * weight",
        page="layer-detail",
    )
)
def half_statistics(run: Run) -> list[Finding]:
    """`half-statistics`: statistics of a norm in 16 bits, computed or running."""
    buffers = signals(run, "half buffer")
    buffers = buffers[buffers["name"].str.contains(r"(?:^|\.)running_[^.]*$")]
    if len(buffers):
        row = buffers.iloc[0]
        name = str(row["name"])
        return [
            make_finding(
                "half-statistics",
                f"{name} is stored in {row['dtype']}",
                name.rpartition(".")[0] or model_name(run),
                value=float(len(buffers)),
                limit=0.0,
                unit="running statistics in 16 bits",
            )
        ]
    return (
        _from_signal(
            run,
            "narrow statistics",
            "statistics in 16 bits",
            lambda row: f"{row['name']} divides by statistics computed in {row['dtype']}",
        )
        or _from_signal(
            run,
            "narrow variance",
            "share of variances",
            lambda row: (
                f"{formatting.percent(float(str(row['value'])))} of the variances in {row['name']} lose "
                f"their digits: the square of the mean is subtracted from the mean of squares in {row['dtype']}"
            ),
        )
        or [
            replace(finding, advice=_DISTANCE_ADVICE, snippet=_DISTANCES)
            for finding in _from_signal(
                run,
                "narrow distance",
                "share of distances",
                lambda row: (
                    f"{formatting.percent(float(str(row['value'])))} of the squared distances in {row['name']} lose "
                    f"their digits: twice the product of two vectors is subtracted from their squares in {row['dtype']}"
                ),
            )
        ]
    )


@rule(
    Entry(
        code="half-sum",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=284,
        what="A long sum is accumulated in 16 bits.",
        signal="Sums, cumulative sums, index sums and chains of additions with 16-bit results: in the first step, "
        "between the first steps, and in the first evaluations.",
        threshold="4,096 terms of a sum, 65,536 of a mean, 256 per bin, or 64 consecutive additions to a number; to a "
        "tensor, 64 within one module of which the last leaves half of it unchanged. For a cumulative sum 2^8 terms in "
        "bfloat16 and 2^11 in float16, beyond which a sum of ones no longer grows; for differences of one, a spacing "
        "of a quarter of its terms.",
        advice="The sum has two or three significant digits, and where partial sums are rounded too, small terms "
        "are lost altogether. Sum in float32 and cast the result.",
        snippet="total = x.sum(-1, dtype=torch.float32)\nsteps = torch.cumsum(x, -1, dtype=torch.float32)",
        page="layer-detail",
    )
)
def half_sum(run: Run) -> list[Finding]:
    """`half-sum`: a long sum with its result in 16 bits."""
    return _from_signal(
        run,
        "narrow sum",
        "terms",
        lambda row: (
            f"{'Two sums that are subtracted have' if row['op'] == 'sub' else str(row['op']) + ' adds'} "
            f"{_terms(row)} terms in {row['dtype']}"
        ),
    )


def _terms(row: "pd.Series[Any]") -> str:
    """A chain of additions is reported, and no longer followed, once it has as many as its limit."""
    chain = str(row["op"]).startswith("add") and row["value"] == row["limit"]
    return f"{int(float(str(row['value']))):,}{' or more' if chain else ''}"


@rule(
    Entry(
        code="rounded-positions",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=285,
        what="Positions, timesteps or rotary angles are computed in 16 bits, where integers above 256 (bfloat16) or "
        "2,048 (float16) collide.",
        signal="Casts of integers and grids, ranges, sines and cosines in 16 bits in the first step, and by the loop "
        "between the first steps; the model's buffers at the start.",
        threshold="One integer that changes, or two neighbours that become equal; an angle of 32 in bfloat16 or 256 "
        "in float16, where the spacing is a quarter (transformers issue 29285); a column of an input, beyond 256 or "
        "2,048 on average, of which rounding is 2 % of the variance. The same angles in float32, of values beyond "
        "256 or 2,048 that had 16 bits before. Half of the differences of rounded values below two spacings of them.",
        advice="Positions, timesteps or coordinates that differ become equal, so the model cannot tell them apart. "
        "Compute them, their differences and their angles in float32 with autocast off, and cast the result.",
        snippet=_AUTOCAST_OFF
        + "    angles = torch.outer(torch.arange(length, device=x.device).float(), inv_freq.float())\n"
        "cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)",
        page="layer-detail",
    )
)
def rounded_positions(run: Run) -> list[Finding]:
    """`rounded-positions`: integers or angles that 16 bits cannot tell apart."""

    def title(row: "pd.Series[Any]") -> str:
        size = float(str(row["value"]))
        if row["op"] in ("cos", "sin"):
            return f"{row['op']} takes angles of up to {formatting.number(size)} in {row['dtype']}"
        if row["op"] == "angles":
            return (
                f"Sines and cosines take angles of up to {formatting.number(size)}, of values that were rounded to "
                f"{row['dtype']} before"
            )
        if row["op"] == "integers":
            return (
                f"Integers of up to {formatting.number(size)} were in {row['dtype']} before they became integers again"
            )
        if row["op"] == "columns":
            columns = formatting.plural(int(size), "column")
            return f"In {row['dtype']}, the values of {columns} of an input, such as years, are hardly told apart"
        if row["op"] == "differences":
            return (
                f"{formatting.percent(size)} of the differences of values that were rounded to {row['dtype']}, such as "
                "coordinates, are smaller than that rounding"
            )
        if row["op"] == "table":
            return f"{int(size):,} neighbouring rows of {row['name']} are equal: its positions were computed in 16 bits"
        if row["op"] == "list":
            return f"{int(size):,} neighbouring values of {row['name']} are equal: it was rounded to {row['dtype']}"
        if row["op"] == "frequencies":
            return f"The frequencies {row['name']} are stored in {row['dtype']}"
        if row["op"] == "schedule":
            return (
                f"The noise schedule {row['name']} is stored in {row['dtype']}, where neighbouring timesteps are equal"
            )
        return f"{int(size):,} integers are rounded or collide in {row['dtype']}"

    return _from_signal(run, "rounded positions", _ROUNDED_UNITS, title)


_ROUNDED_UNITS = {
    "sin": "largest angle",
    "cos": "largest angle",
    "angles": "largest angle",
    "integers": "largest integer",
    "differences": "share of differences",
    "columns": "columns",
    "table": "rows",
}
"""Units of what an event on rounded positions measures, by its operator."""
