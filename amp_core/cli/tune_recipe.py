"""`ampscope tune` without `--max-batch`: the fastest recipe that keeps parity, and its code.

ampscope tune --workload text-gpt --size small --budget 600
ampscope tune my_task.py:build --budget 300 --code lightning
"""

import argparse
import dataclasses
import itertools
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from amp_core.cli.placement import submit
from amp_core.cli.settings import settings
from amp_core.schema import RunError
from amp_core.schema.documents import versioned
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig, unknown
from amp_core.text import formatting
from amp_core.tune.codegen import FRAMEWORKS, code_for
from amp_core.tune.result import STAGES, Tuned

BUDGET_S = 300


def add_flags(command: argparse.ArgumentParser) -> None:
    """Declare the flags of this search beside the settings."""
    command.add_argument("task", metavar="FILE.py:FUNCTION", nargs="?", help="workload to tune, instead of --workload")
    command.add_argument("--budget", metavar="S", help=f"time limit of the search in seconds (default {BUDGET_S})")
    command.add_argument("--out", metavar="DIR", help="new folder for its runs (default: runs/tune-1, -2, …)")
    command.add_argument("--code", metavar="NAME", help=f"{', '.join(FRAMEWORKS)}, all (default {FRAMEWORKS[0]})")


def run(arguments: argparse.Namespace, resources: Resources) -> int:
    """Search, print each stage to standard error, then evidence, answer and code."""
    from amp_core.tune.search import Ended, tune  # here, because it imports pandas and all of analysis

    code = FRAMEWORKS[0] if arguments.code is None else arguments.code
    if code not in (*FRAMEWORKS, "all"):
        raise unknown("code", code, [*FRAMEWORKS, "all"])
    given = settings(arguments)
    if arguments.task is not None:
        if "workload" in given:
            raise RunError(
                f"workload={given['workload']!r} and {arguments.task!r} are both given; give only one of them"
            )
        given["workload"] = arguments.task
    config = TrainConfig.from_dict({"precision": "fp32"} | given)
    budget_s = _seconds(str(BUDGET_S) if arguments.budget is None else arguments.budget)
    out = Path(arguments.out) if arguments.out is not None else free_folder()
    if resources.on != "local":
        config.check_file()
        return submit(arguments, config, resources, str(out), makes="runs")
    config = with_device(config)  # the code names the device
    before = signal.signal(signal.SIGTERM, interrupt)  # like Ctrl-C: results so far are kept
    try:
        tuned = tune(
            config,
            out,
            budget_s,
            on_progress=print_progress,
        )
    except Ended as ended:
        return ended.code
    finally:
        signal.signal(signal.SIGTERM, before)
    texts = {name: code_for(tuned.config, name, tuned.answer) for name in FRAMEWORKS}
    (out / "code").mkdir(exist_ok=True)
    for name, text in texts.items():
        (out / "code" / f"train_{name}.py").write_text(text, encoding="utf-8")
    shown = FRAMEWORKS if code == "all" else (code,)
    if arguments.json:
        record = versioned(tuned.to_json()) | {"out": str(out), "code": {name: texts[name] for name in shown}}
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        print("\n".join([in_words(tuned), "", *(texts[name] for name in shown)]))
        print_progress(f"runs and code for {', '.join(FRAMEWORKS)} are in {out}; see them on the app's Tune page")
    return 0


def in_words(tuned: Tuned) -> str:
    """Evidence and answer as text."""
    lines = []
    for stage, title in STAGES.items():
        rows = [row for row in tuned.tried if row.stage == stage]
        if not rows:
            continue
        lines += [f"{title}:"]
        width = max(len(row.name) for row in rows)
        for row in rows:
            speed = formatting.ratio(row.speed_ratio, row.speed_ratio_low, row.speed_ratio_high)
            outcome = row.out or row.parity or row.note
            lines.append(f"  {row.name:<{width}}  {speed:<24} {outcome}".rstrip())
    if tuned.left_out:
        lines += ["not tried:", *(f"  {what}: {why}" for what, why in tuned.left_out)]
    took = f"{formatting.duration(tuned.seconds)} of {formatting.duration(tuned.budget_s)}"
    return "\n".join([*lines, f"took {took}", "", tuned.answer, tuned.why])


def with_device(config: TrainConfig) -> TrainConfig:
    """The configuration with `auto` resolved to `cpu` or `cuda`."""
    if config.device != "auto":
        return config
    from amp_core.train.environment import environment

    device = environment()["device"]
    if device is None:
        raise RunError("device='auto' needs torch, which is not installed")
    return dataclasses.replace(config, device=device)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RunError(f"budget={text!r} is not possible; give seconds above 0, e.g. 300") from None


def free_folder() -> Path:
    """The first of runs/tune-1, runs/tune-2, … that does not exist."""
    return next(p for n in itertools.count(1) if not (p := Path("runs") / f"tune-{n}").exists())


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """A signal handler that acts like Ctrl-C."""
    raise KeyboardInterrupt


def print_progress(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
