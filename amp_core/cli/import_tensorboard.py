"""`ampscope import-tensorboard`: a run folder from a TensorBoard log."""

import argparse

from amp_core.cli.untrusted import add_run_output, printable, reading_untrusted

MAX_TAGS = 12
"""Tags named in the output; the run's head keeps them all."""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "import-tensorboard",
        help="import a TensorBoard log as a run: loss, loss scale, gradient norm, learning rate, histograms",
        allow_abbrev=False,
    )
    command.add_argument("logdir", metavar="LOGDIR", help="TensorBoard's log folder, or an event file")
    add_run_output(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import, and print which tags were understood and which were not."""
    from amp_core.interop import import_tensorboard

    with reading_untrusted(f"logdir={arguments.logdir!r}"):
        imported = import_tensorboard(arguments.logdir, arguments.out, arguments.name)
    print(imported.folder)
    for column, tag in imported.understood.items():
        print(printable(f"{column}: {tag}, {imported.points[column]:,} values"))
    for kind, tags in imported.tensors.items():
        print(f"{kind}: {len(tags)} histograms, {_few(tags)}")
    missing = [column for column in ("loss", "loss_scale", "grad_norm", "lr") if column not in imported.understood]
    if missing:
        print(f"not in the log, so null in the run: {', '.join(missing)}")
    if imported.not_understood:
        print(f"not recognized and skipped: {_few(imported.not_understood)}")
    return 0


def _few(tags: list[str]) -> str:
    more = f", and {len(tags) - MAX_TAGS} more" if len(tags) > MAX_TAGS else ""
    return ", ".join(printable(tag)[:80] for tag in tags[:MAX_TAGS]) + more
