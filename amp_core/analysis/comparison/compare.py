"""Runs side by side: what each costs, what differs between them, and whether they converge alike.

>>> comparison = compare([run_fp32, run_bf16])
>>> comparison.answers["bf16"]
'BF16: 2.31 × faster, 38 % less memory, convergence parity unknown (1 seed)'
>>> comparison.table[["run", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_verdict", "memory_ratio"]]
>>> comparison.parity["bf16"]
'cannot tell: run more seeds (final loss +0.3 % against fp32, over 200 common steps)'

The first run is the baseline. A ratio of 2 in speed means twice as fast as the baseline, a ratio
of 0.5 in memory half of its peak. Speed is compared per sample where both runs counted samples, else per step. Runs
that differ only in their seed are repeats of one recipe and are evaluated together, in `recipes`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.comparison import ratios
from amp_core.analysis.comparison.answer import in_one_line
from amp_core.analysis.comparison.learned import TASK, Learned, common, final, learning
from amp_core.analysis.comparison.nodes import array_note
from amp_core.analysis.comparison.parity import ParityTest, mean_interval
from amp_core.analysis.comparison.ratios import Ratio
from amp_core.analysis.comparison.repeats import Group, differences, repeats
from amp_core.analysis.numerics.loss_scale import scale_summary
from amp_core.analysis.performance.energy import energy_per_sample
from amp_core.analysis.performance.kernels import traced_step_us
from amp_core.analysis.performance.memory import memory_description, memory_summary
from amp_core.analysis.performance.tensor_cores import tensor_core_use
from amp_core.analysis.run_labels import unique_labels
from amp_core.analysis.steps import attempts, emulated, median, recipe
from amp_core.hardware.device_types import is_accelerator
from amp_core.schema import RunError
from amp_core.settings.catalog import EMULATED
from amp_core.store.run import Run, check_run
from amp_core.text.formatting import join_words


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`. The first run, or its recipe where that has repeats, is the baseline."""

    table: pd.DataFrame
    """One row per run; see `compare`."""
    recipes: pd.DataFrame
    """One row per recipe, its repeats taken together; see `compare`."""
    parity: dict[str, str]
    """Parity by label of the run: whether its recipe converges as well as the baseline, then the evidence in words."""
    answers: dict[str, str]
    """Speed, memory and convergence in one line, by label of each recipe except the baseline."""
    differences: pd.DataFrame
    """Settings that are not the same in all runs: column `setting`, then one column of text per run."""
    notes: tuple[str, ...]
    """Caveats of the comparison: what was excluded, and what differs between runs."""

    def _repr_html_(self) -> str:
        """The comparison as a notebook shows it."""
        from amp_core.notebook import comparison_html

        return comparison_html(self)


def compare(runs: Sequence[Run], *, repeatedly: bool = False) -> Comparison:
    """Compare `runs` with the first of them. Raises `RunError` if there are none.

    `repeatedly`: seeds are added and tested again until parity is decided, as `ampscope tune` does; each test is
    stricter then (`amp_core.analysis.comparison.parity`).

    `.table` has one row per run, NaN if not measured:
    run (label), precision, status, steps, recipe (label of its row in `.recipes`), seed;
    warmup_steps (left out of timings), timed_steps, step_ms (median), step_ms_low, step_ms_high (quartiles),
    samples_per_s, speed_ratio, speed_ratio_low, speed_ratio_high (95 % interval), speed_verdict: against the
    baseline's run of the same seed or, without one, the first; see `amp_core.analysis.comparison.ratios`;
    memory_peak_bytes, memory_ratio; energy_j (per sample);
    loss_final (mean of the last tenth of its steps), common_steps, loss_ratio (the same over the steps or samples that
    it shares with that run), eval_loss, parity;
    skip_frac, skips, scale_last, tensor_frac (share of GPU time in kernels known to use tensor cores, where profiled);
    emulated (whether it emulates 8 or 4 bits, so that its speed and memory are compared with nothing).

    `.recipes` has: recipe (label), run (its first, for colours and names), precision, seeds (how many), speed_ratio,
    speed_ratio_low, speed_ratio_high, speed_verdict, paired (whether runs were interleaved), blocks; step_ms,
    samples_per_s, memory_peak_bytes, memory_ratio, energy_j, energy_ratio, loss_final, eval_loss, skip_frac,
    tensor_frac (means over repeats, of memory the highest), loss_final_low, loss_final_high, eval_loss_low,
    eval_loss_high (95 % intervals of the means); skips, steps (sums over repeats); loss_change_frac, loss_change_low,
    loss_change_high, noise_frac (deviation of the final loss, its 95 % interval and the baseline's seed-to-seed
    deviation, over the baseline's loss), parity, emulated."""
    if isinstance(runs, Run | str) or not isinstance(runs, Sequence):
        raise RunError(
            f"runs={runs!r:.80} is not a list of runs; give one, as in [load_run('runs/a'), load_run('runs/b')]"
        )
    if not runs:
        raise RunError("runs=[] is empty; give one run or more")
    for place, run in enumerate(runs):
        check_run(run, f"runs[{place}]")
    labels = unique_labels(runs)
    groups = repeats(runs, labels)
    frames = [attempts(run) for run in runs]
    partner = _partners(runs, groups)
    timed = [ratios.timed(run) for run in runs]
    rows = [_row(labels, runs, frames, timed, i, partner[i]) for i in range(len(runs))]
    table = pd.DataFrame(rows)
    tensors = [memory_summary(run).tensors_peak_bytes for run in runs]
    if None not in tensors:
        table["memory_peak_bytes"] = np.array(tensors, dtype=float)
    real = table["memory_peak_bytes"].mask(table["emulated"])
    table["memory_ratio"] = real / real.iloc[0]
    learned = [_learned(run, frames[i], _seed(groups, i)) for i, run in enumerate(runs)]
    parity = dict.fromkeys(labels, "reference")
    recipes = [_recipe(table, groups[0], ratios.ITSELF if len(timed[0].step) else ratios.UNKNOWN, "reference", None)]
    for group in groups[1:]:
        ours, theirs = (_members(learned, one) for one in (group, groups[0]))
        parity_text, test = learning(groups[0].label, theirs, ours, repeatedly=repeatedly)
        parity |= {labels[i]: parity_text for i in group.places}
        ratio = ratios.speed_ratio([(runs[partner[i]], runs[i]) for i in group.places])
        recipes.append(_recipe(table, group, ratio, parity_text, test))
    table["parity"] = [parity[label] for label in labels]
    table["recipe"] = [next(g.label for g in groups if i in g.places) for i in range(len(runs))]
    by_recipe = pd.DataFrame(recipes)
    for column in ("memory_peak_bytes", "energy_j"):
        real = by_recipe[column].mask(by_recipe["emulated"])
        by_recipe[f"{column.partition('_')[0]}_ratio"] = real / real.iloc[0]
    answers = {str(row["recipe"]): in_one_line(dict(row)) for _, row in by_recipe.iloc[1:].iterrows()}
    notes = _notes(runs, labels, frames, timed, by_recipe)
    return Comparison(table, by_recipe, parity, answers, differences(runs, labels), notes)


def _row(
    labels: list[str], runs: Sequence[Run], frames: list[pd.DataFrame], timed: list[ratios.Timed], i: int, other: int
) -> dict[str, Any]:
    run, times = runs[i], timed[i]
    scale = scale_summary(run)
    low, high = np.percentile(times.step_ms, [25, 75]) if len(times.step_ms) else (np.nan, np.nan)
    if i:
        ratio = ratios.speed_ratio([(runs[other], run)])
    else:
        ratio = ratios.ITSELF if len(times.step) else ratios.UNKNOWN
    extent = common([frames[other], frames[i]])
    first, this = (final(extent.cut(frames[n])) for n in (other, i))
    seed = run.head.config.get("seed")
    return {
        "run": labels[i],
        "precision": recipe(run),
        "status": run.status,
        "steps": len(frames[i]),
        "seed": _number(seed),
        "warmup_steps": times.warmup,
        "timed_steps": len(times.step_ms),
        "step_ms": traced / 1e3 if (traced := traced_step_us(run)) else _number(median(times.step_ms)),
        "step_ms_low": float(low),
        "step_ms_high": float(high),
        "samples_per_s": 1e3 / m if (m := median(times.sample_ms)) else np.nan,
        **_speed(ratio, first=i == 0),
        "memory_peak_bytes": _number(memory_summary(run).peak_bytes),
        "energy_j": _number(energy_per_sample(run).joules),
        "loss_final": final(frames[i]).mean,
        "common_steps": len(extent.cut(frames[i])),
        "loss_ratio": this.mean / first.mean if first.mean else np.nan,
        "skip_frac": _number(scale.skip_frac),
        "skips": float(scale.skips) if scale.skip_frac is not None else np.nan,
        "scale_last": _number(scale.last),
        "eval_loss": _number(run.head.results.get("eval_loss")),
        "tensor_frac": _number(tensor_core_use(run).tensor_frac),
        "emulated": emulated(run),
    }


def _speed(ratio: Ratio, first: bool) -> dict[str, Any]:
    return {
        "speed_ratio": ratio.value,
        "speed_ratio_low": ratio.low,
        "speed_ratio_high": ratio.high,
        "speed_verdict": "reference" if first else ratio.speed_verdict,
    }


def _recipe(table: pd.DataFrame, group: Group, ratio: Ratio, parity: str, test: ParityTest | None) -> dict[str, Any]:
    rows = table.iloc[list(group.places)]
    share = 1 / abs(test.baseline) if test is not None and test.baseline else np.nan
    means = ("step_ms", "samples_per_s", "energy_j", "loss_final", "eval_loss", "skip_frac", "tensor_frac")
    return {
        "recipe": group.label,
        "run": str(rows["run"].iloc[0]),
        "precision": rows["precision"].iloc[0],
        "seeds": len(rows),
        **_speed(ratio, first=0 in group.places),
        "paired": ratio.paired,
        "blocks": ratio.blocks,
        "memory_peak_bytes": float(rows["memory_peak_bytes"].max()),
        **{column: float(rows[column].mean()) for column in means},
        **{
            f"{column}_{side}": end
            for column in ("loss_final", "eval_loss")
            for side, end in zip(("low", "high"), mean_interval(rows[column].to_numpy(dtype=np.float64)), strict=True)
        },
        "skips": float(rows["skips"].sum(min_count=1)),
        "steps": int(rows["steps"].sum()),
        "loss_change_frac": test.deviation * share if test is not None else np.nan,
        "loss_change_low": test.low * share if test is not None else np.nan,
        "loss_change_high": test.high * share if test is not None else np.nan,
        "noise_frac": test.noise * share if test is not None else np.nan,
        "parity": parity,
        "emulated": bool(rows["emulated"].any()),
    }


def _partners(runs: Sequence[Run], groups: list[Group]) -> list[int]:
    """For each run the baseline run that it is compared with: the one of its own seed, else the first."""
    baseline = groups[0]
    by_seed = dict(zip(baseline.seeds, baseline.places, strict=True))
    partners = [0] * len(runs)
    for group in groups[1:]:
        for place, seed in zip(group.places, group.seeds, strict=True):
            partners[place] = by_seed.get(seed, 0)
    return partners


def _seed(groups: list[Group], place: int) -> int:
    return next(g.seeds[g.places.index(place)] for g in groups if place in g.places)


def _members(learned: list[Learned], group: Group) -> list[Learned]:
    return [learned[i] for i in group.places]


def _learned(run: Run, frame: pd.DataFrame, seed: int) -> Learned:
    task = tuple(str(run.head.config.get(k)) for k in TASK)
    return Learned(frame, seed, task, _number(run.head.results.get("eval_loss")))


def _notes(
    runs: Sequence[Run],
    labels: Sequence[str],
    frames: list[pd.DataFrame],
    timed: list[ratios.Timed],
    recipes: pd.DataFrame,
) -> tuple[str, ...]:
    notes = []
    if len({len(f) for f in frames}) > 1:
        notes.append(
            "Runs have different lengths: losses are compared over the steps that each has in common with the first."
        )
    if len({float(f["samples"].median()) for f in frames if f["samples"].notna().any()}) > 1:
        notes.append("Batch sizes differ: losses are compared over common samples, speeds per sample.")
    left_out = sorted({t.warmup for t in timed if t.warmup})
    if left_out:
        counts = " or ".join(str(n) for n in left_out)
        notes.append(f"The first {counts} steps of each run are excluded from timings as warm-up.")
    names = [str(row["recipe"]) for row in recipes.to_dict("records") if row["emulated"]]
    if names:
        notes.append(f"{join_words(names)} {'is' if len(names) == 1 else 'are'} {EMULATED}, so these are not compared.")
    others = recipes.iloc[1:]
    others = others[others["speed_verdict"] != "emulated"]
    if len(others) and others["paired"].all():
        notes.append(
            "Runs were interleaved, so background load affects all alike; timings compare paired blocks of steps."
        )
    elif len(others) and (in_array := array_note(runs, labels)):
        notes.append(in_array)
    elif len(others):
        notes.append(
            "Runs were not interleaved; background load may bias timings. `ampscope compare` runs them interleaved."
        )
    if len({tuple(str(run.head.config.get(k)) for k in TASK) for run in runs}) > 1:
        notes.append("The runs train different tasks, so their losses cannot be compared.")
    tensors = [memory_summary(run).tensors_peak_bytes for run in runs]
    if None not in tensors:
        notes.append("Memory is that of the tensors in a sampled step; on a CPU, the process uses more.")
    elif memory_description(runs[0]) == "resident set of the process":
        notes.append(
            "On a CPU, memory is that of the whole process, including Python and libraries, which hides most of what a "
            "recipe saves in a small model's tensors; memory by category shows it."
        )
    return (*notes, *_tf32(runs[0]))


def _tf32(baseline: Run) -> tuple[str, ...]:
    """Whether the FP32 baseline used TF32, which would make every other recipe look slower."""
    if recipe(baseline) not in ("fp32", None):
        return ()
    name = baseline.name
    flags = baseline.head.environment.get("flags")
    recorded = flags if isinstance(flags, Mapping) else {}
    if not is_accelerator(baseline.head.config.get("device", baseline.head.environment.get("device"))):
        return ()
    inside = {"matmul": recorded.get("tf32_matmul"), "cuDNN": recorded.get("tf32_cudnn")}
    if any(value is None for value in inside.values()):
        return (f"{name} does not record whether TF32 was on.",)
    on = [what for what, value in inside.items() if value]
    if on:
        return (f"TF32 was on in {name} for {' and '.join(on)}: the baseline is not pure FP32.",)
    return (f"TF32 was off in {name}, for matmul and cuDNN.",)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan
