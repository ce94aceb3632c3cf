"""Make the README's loss curves in 8 and 4 bits: train text-gpt in each precision, and draw the losses.

    python -m tests.browser.low_precision                # writes sample_runs/low-precision.png
    python -m tests.browser.low_precision --runs runs/lp # keeps the runs there, and takes those that are there already

Needs the test extra (Playwright, torchao) and Chromium. The 24 trainings, eight with three seeds each, take about 20
minutes on one CPU core.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.subplots import make_subplots

from amp_core import load_run
from amp_core.figures import recipe_colour
from tests.browser.conftest import FLAGS

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "sample_runs" / "low-precision.png"
TRAINING = "--workload text-gpt --size tiny --steps 1500 --every 100 --device cpu"
SEEDS = (1, 2, 3)
RUNS = {
    "FP32": "--precision fp32",
    "BF16": "--precision bf16",
    "FP8": "--precision fp8",
    "MXFP8": "--precision mxfp8",
    "NVFP4": "--precision nvfp4",
    "NVFP4, stochastic rounding": "--precision nvfp4 --stochastic-rounding",
    "NVFP4, Hadamard": "--precision nvfp4 --hadamard",
    "NVFP4, both": "--precision nvfp4 --stochastic-rounding --hadamard",
}
VARIANTS = {
    "NVFP4, stochastic rounding": ("#A069D5", "dash"),
    "NVFP4, Hadamard": ("#C24E9A", "dot"),
    "NVFP4, both": ("#B0891A", "dashdot"),
}
"""Colour and dash of those that share a precision with another."""
SMOOTH_STEPS = 200
"""Length of the mean that is drawn, over the last so many steps."""
WIDTH, HEIGHT = 1280, 460
MAX_BYTES = 300_000


def train(folder: Path) -> None:
    """Train what is not there yet, each in a process of its own."""
    for seed in SEEDS:
        for name, settings in RUNS.items():
            out = folder / f"{name}-{seed}"
            if not (out / "run.json").exists():
                command = [sys.executable, "-m", "amp_core", "train", "--out", str(out), *TRAINING.split()]
                command += [*settings.split(), "--seed", str(seed)]
                environment = os.environ | {"PYTHONPATH": str(ROOT)}
                subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def losses(folder: Path) -> dict[str, pd.DataFrame]:
    """By name: the loss of each step (rows) with each seed (columns), smoothed."""
    return {
        name: pd.DataFrame({seed: load_run(folder / f"{name}-{seed}").steps["loss"] for seed in SEEDS})
        .rolling(SMOOTH_STEPS)
        .mean()
        for name in RUNS
    }


def figure(curves: dict[str, pd.DataFrame]) -> go.Figure:
    """Means over seeds of the smoothed losses, and of how far each lies above that of FP32 with the same seed."""
    titles = ("Loss of text-gpt", "Above the loss in FP32")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
    for name, curve in curves.items():
        hue, dash = VARIANTS.get(name) or (recipe_colour(name.lower()), "solid")
        for column, values in ((1, curve), (2, curve - curves["FP32"])):
            mean = values.mean(axis=1).dropna().iloc[::5]
            line = {"color": hue, "width": 2, "dash": dash}
            trace = go.Scatter(x=mean.index, y=mean, name=name, line=line, legendgroup=name, showlegend=column == 1)
            drawn.add_trace(trace, 1, column)
    drawn.update_xaxes(title_text="step")
    drawn.update_yaxes(title_text="nats per byte, mean of 3 seeds", col=1)
    layout = {"width": WIDTH, "height": HEIGHT, "template": "plotly_white", "font": {"size": 13}}
    drawn.update_layout(margin={"l": 70, "r": 20, "t": 40, "b": 50}, legend={"font": {"size": 12}}, **layout)
    return drawn


def picture(drawn: go.Figure) -> None:
    """The figure as a PNG, drawn by Chromium."""
    with tempfile.TemporaryDirectory(prefix="ampscope-curves-") as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "curves.html"
        drawn.write_html(page_file, include_plotlyjs=True)
        executable = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=60_000)
        page.screenshot(path=str(PICTURE), clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})
        browser.close()


def main() -> int:
    """Train and draw; returns 1 if the file is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", metavar="DIR", type=Path, help="folder of the runs (default: one that is removed)")
    chosen = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="ampscope-curves-") as aside:
        folder = chosen or Path(aside)
        train(folder)
        curves = losses(folder)
        for name in RUNS:
            held_out = [load_run(folder / f"{name}-{seed}").head.results["eval_loss"] for seed in SEEDS]
            above = (curves[name] - curves["FP32"]).iloc[-1]
            spread = ", ".join(f"{value:+.4f}" for value in above)
            mean = sum(held_out) / len(held_out)
            sys.stdout.write(f"{name}: held-out {mean:.4f}; last {SMOOTH_STEPS} steps above FP32: {spread}\n")
        picture(figure(curves))
    size = PICTURE.stat().st_size
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {size / 1000:.0f} kB\n")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
