"""The reference results in docs/evidence.md: each figure is recomputed here from a run in `sample_runs/`, or is one of
the same page's table of what a GPU showed.

`python -m tests.test_reference_results` prints the table.
"""

import re
import shlex

from amp_core import Run, load_run
from amp_core.__main__ import parser
from amp_core.analysis import compare
from amp_core.analysis.numerics.histograms import true_counts
from tests.gpu.checks import all_checks
from tests.paths import ROOT, SAMPLE_RUNS

NOT_YET = "not measured yet"
ABLATION = ("fp32", "fp16-unscaled", "fp16-static-128", "fp16-dynamic")


def sample(name: str) -> Run:
    return load_run(SAMPLE_RUNS / name)


def on_gpu() -> list[str]:
    """Samples that were trained on a GPU."""
    folders = [file.parent for file in SAMPLE_RUNS.rglob("run.json")]
    return [f.name for f in folders if str(load_run(f).head.config.get("device")).startswith("cuda")]


def losses_of_ablation() -> str:
    """Final losses of the LSTM, also relative to FP32."""
    table = compare([sample(f"ablation/{name}") for name in ABLATION]).recipes
    first = table["loss_final"].iloc[0]
    changes = [f"{value:.3g} ({100 * (value / first - 1):+.1f} %)" for value in table["loss_final"].iloc[1:]]
    return f"final loss {first:.3g} in FP32; {changes[0]} unscaled, {changes[1]} with 128, {changes[2]} dynamic"


def held_out() -> str:
    """Losses of the same GPT on held-out text; one seed each, which decides nothing."""
    losses = [sample(name).head.results["eval_loss"] for name in ("fp32", "bf16", "fp16-healthy")]
    fp32, bf16, fp16 = (f"{loss:.3f}" for loss in losses)
    return f"held-out loss {fp32} in FP32, {bf16} in BF16, {fp16} in FP16; one seed, so parity is unknown"


def in_the_band() -> str:
    """Share of the LSTM's FP32 output gradients from 2^-27 up to 2^-24, by number and by size."""
    result = true_counts(sample("ablation/fp32"), "output_grad")
    band = (result.exponents >= -27) & (result.exponents < -24)
    counts, sizes = (values[:, band].sum() / values.sum() for values in (result.counts, result.magnitudes))
    return (
        f"{100 * counts:.0f} % of the LSTM's nonzero output gradients lie there, with {100 * sizes:.0f} % of their size"
    )


def on_this_cpu() -> str:
    """A case without gain: a CPU without FP16 instructions, and a model that is too small."""
    table = compare([sample(name) for name in ("fp32", "bf16", "fp16-healthy")]).recipes
    bf16, fp16 = (f"{1 / ratio:.2g}" for ratio in table["speed_ratio"].iloc[1:])
    return f"not on this CPU: BF16 {bf16} × slower, FP16 {fp16} × slower"


def on_an_h100(check: str) -> str:
    """What the table "On a GPU" has for a check of `tests.gpu`."""
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    (line,) = (line for line in evidence.splitlines() if line.startswith("|") and line.endswith(f"| `{check}` |"))
    what, measured = (cell.strip() for cell in line.strip("|").split("|")[:2])
    model = what.split(" over ")[0].split(",")[0]
    return f"{model}: {measured} over FP32 without TF32, each at its best batch, on an H100"


LSTM = "ampscope train --workload text-lstm --size logistic --steps 120"
GPT = "ampscope train --workload text-gpt --size tiny --steps 400 --seed 1"


def rows() -> list[tuple[str, str, str]]:
    """The myth, the measurement, and its command."""
    return [
        (
            "Over 2.5 × faster than conventional training",
            NOT_YET,
            "ampscope compare --workload image-resnet --size resnet50 --precisions fp32,tf32,bf16,fp16",
        ),
        ("1.5–5.5 × faster on NVIDIA GPUs", on_an_h100("speed-gpt2"), "python -m tests.gpu --only speed-gpt2"),
        ("BERT-large near 6 × faster", on_an_h100("speed-bert"), "python -m tests.gpu --only speed-bert"),
        ("Less memory, hence larger batches", NOT_YET, "ampscope tune --max-batch --workload text-bert --size large"),
        ("The same final quality", held_out(), f"{GPT} --precision bf16"),
        (
            "An LSTM fails without loss scaling, and with 128 or a dynamic scale matches FP32",
            losses_of_ablation(),
            f"{LSTM} --precision fp16 --loss-scale 128",
        ),
        ("Gradients from 2⁻²⁷ to 2⁻²⁴ matter", in_the_band(), f"{LSTM} --precision fp32"),
        ("Should always be used", on_this_cpu(), f"{GPT} --precision fp16"),
    ]


def table() -> str:
    lines = [f"| {claim} | {measured} | `{command}` |" for claim, measured, command in rows()]
    return "\n".join(["| claim | measured | command |", "|---|---|---|", *lines])


def section() -> str:
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    return evidence.split("## Reference results\n", 1)[1].split("\n## ", 1)[0]


def test_the_table_has_the_figures_of_the_sample_runs() -> None:
    result = re.search(r"\| claim .*?(?=\n\n|\Z)", section(), flags=re.DOTALL)
    assert result is not None and result[0].strip() == table()


def test_figures_are_missing_only_because_no_sample_is_of_a_gpu() -> None:
    assert section().count(NOT_YET) == 2
    assert on_gpu() == [], "there are GPU runs now: add their figures to the table"


def test_each_command_is_valid() -> None:
    for _, _, command in rows():
        program, *words = shlex.split(command)
        if program == "python":
            assert words[:3] == ["-m", "tests.gpu", "--only"] and words[3] in {check.name for check in all_checks()}
        else:
            parser().parse_args(words if words[0] == "tune" else [*words, "--out", "x"])


def test_the_ablation_supports_the_claim() -> None:
    first, unscaled, static, dynamic = compare([sample(f"ablation/{n}") for n in ABLATION]).recipes["loss_final"]
    assert unscaled > 2 * first and abs(static / first - 1) < 0.02 and abs(dynamic / first - 1) < 0.02


if __name__ == "__main__":
    print(table())
