"""`ampscope diagnose RUN`: the findings of a run, or of a trace, for people, scripts and CI jobs."""

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

from amp_core.cli.import_trace import TRACE_HELP, is_trace, runs_and_traces
from amp_core.cli.untrusted import RUN_HELP, printable
from amp_core.library.mutes import mute, muted
from amp_core.schema import RunError
from amp_core.store.run import load_run

if TYPE_CHECKING:
    from amp_core.findings import Finding
    from amp_core.store.run import Run

LEVELS = ("error", "warning", "info")
NOTHING = "nothing wrong was found"


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "diagnose",
        help="list a run's findings",
        description="Lists the findings, most severe first, with evidence and what to change. In CI, ampscope "
        "diagnose RUN --fail-on error exits with code 1 if there is an error.",
        allow_abbrev=False,
    )
    command.add_argument("folder", metavar="RUN", help=RUN_HELP + TRACE_HELP)
    command.add_argument("others", nargs="*", help=argparse.SUPPRESS)
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.add_argument(
        "--fail-on",
        metavar="LEVEL",
        choices=LEVELS,
        help=f"exit with 1 if a finding is at least this severe: {', '.join(LEVELS)}",
    )
    command.add_argument("--against", metavar="RUN", help="an FP32 run of the same task, as the baseline")
    command.add_argument(
        "--mute",
        metavar="CODE",
        action="append",
        default=[],
        help="mute findings of this code from now on, e.g. watch-overhead; repeatable",
    )
    command.add_argument("--unmute", metavar="CODE", action="append", default=[], help="unmute this code")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, worst first. Returns 1 if one that is not muted is at or above `--fail-on`."""
    from amp_core.findings import GUIDE

    if arguments.others:
        raise RunError(
            f"{1 + len(arguments.others)} paths are too many: diagnose takes one; import the traces of several ranks "
            "with import-trace, and diagnose that run"
        )
    for option in ("mute", "unmute"):
        for code in getattr(arguments, option):
            if code not in GUIDE:
                raise RunError(f"--{option} {code} is not a finding code; the Findings guide lists them all")
    if is_trace(arguments.folder):
        if arguments.mute or arguments.unmute:
            raise RunError(
                f"--mute is kept beside a run; import the trace {arguments.folder!r} with import-trace first"
            )
        with runs_and_traces([arguments.folder]) as (imported,):
            return _print_findings(imported, frozenset(), arguments)
    opened = load_run(arguments.folder).salvaged()
    for option in ("mute", "unmute"):
        for code in getattr(arguments, option):
            mute(arguments.folder, code, on=option == "mute")
    return _print_findings(opened, muted(arguments.folder), arguments)


def _print_findings(opened: "Run", silenced: frozenset[str], arguments: argparse.Namespace) -> int:
    from amp_core.findings import diagnose, diagnosis, first_sentence
    from amp_core.findings.document import diagnosis_document

    all_findings = diagnose(opened, load_run(arguments.against) if arguments.against else None)
    shown = [f for f in all_findings if f.code not in silenced]
    muted_codes = sorted({f.code for f in all_findings} & silenced)
    if arguments.json:
        document = diagnosis_document(opened, all_findings, silenced)
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        if broke_off := end_in_words(opened):
            print(printable(f"{broke_off}\n"))
        sentence = first_sentence(opened)  # of a trace, which it says to be well, or not
        none = "no finding explains that" if broke_off else NOTHING
        words = in_words(shown, none="" if sentence else none)
        print(printable("\n\n".join(part for part in (sentence, words) if part)))
        chain = diagnosis(opened, shown)
        if chain.cause is not None and (more := [text for text in (chain.began, *chain.measurements) if text]):
            print(printable("\n" + "\n".join(more)))
        if muted_codes:
            print(f"\nmuted: {', '.join(muted_codes)}")
    failing = LEVELS[: LEVELS.index(arguments.fail_on) + 1] if arguments.fail_on else ()
    return 1 if any(f.severity in failing for f in shown) else 0


def end_in_words(run: "Run") -> str:
    """States that the run failed or was lost, and why: a problem, but not a finding. Empty for every other run."""
    if run.status not in ("failed", "lost"):
        return ""
    made = f"after {count} steps" if (count := run.table("steps").num_rows) else "before its first step"
    return (
        f"the run {'failed' if run.status == 'failed' else 'was lost'} {made}: {run.end_reason or 'no reason is known'}"
    )


def in_words(findings: "list[Finding]", none: str = NOTHING) -> str:
    """The findings as text: what, where, the evidence, and what to change; `none` where nothing is wrong."""
    parts = [none] if none and all(f.severity == "info" for f in findings) else []
    for finding in findings:
        lines = [f"{finding.severity}: {finding.title} [{finding.code}]"]
        lines.append(f"  {', '.join(finding.evidence())}")
        if finding.follows:
            lines.append(f"  follows from {finding.follows}")
            parts.append("\n".join(lines))
            continue
        lines.append(textwrap.fill(finding.advice, 100, initial_indent="  ", subsequent_indent="  "))
        if finding.snippet:
            lines.append(textwrap.indent(finding.snippet, "      "))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
