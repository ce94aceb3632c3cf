"""`ampscope diagnose RUN`: what is wrong with a run, for people, for scripts and for CI jobs."""

import argparse
import json
import math
import textwrap
from typing import TYPE_CHECKING, Any

from amp_core.run import load_run

if TYPE_CHECKING:
    from amp_core.findings import Finding

LEVELS = ("error", "warning", "info")


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser("diagnose", help="say what is wrong with a run", allow_abbrev=False)
    command.add_argument("folder", metavar="RUN", help="run folder or packed run (.zip)")
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.add_argument(
        "--fail-on", metavar="LEVEL", choices=LEVELS, help=f"exit with 1 where a finding is as bad: {', '.join(LEVELS)}"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, worst first; 1 where one is at or above `--fail-on`."""
    from amp_core.findings import diagnose

    opened = load_run(arguments.folder)
    findings = diagnose(opened)
    if arguments.json:
        record = {"run": opened.name, "status": opened.status, "findings": [_plain(f.to_dict()) for f in findings]}
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        print(in_words(findings))
    failing = LEVELS[: LEVELS.index(arguments.fail_on) + 1] if arguments.fail_on else ()
    return 1 if any(f.severity in failing for f in findings) else 0


def in_words(findings: "list[Finding]") -> str:
    """The findings for people: what, where, the evidence, and what to change."""
    if not findings:
        return "nothing wrong was found"
    parts = []
    for finding in findings:
        lines = [f"{finding.severity}: {finding.title} [{finding.code}]"]
        where = finding.where
        if finding.steps is not None:
            where += f", steps {finding.steps[0]}–{finding.steps[1]}"
        lines.append(f"  {where}")
        lines.append(textwrap.fill(finding.advice, 100, initial_indent="  ", subsequent_indent="  "))
        if finding.snippet:
            lines.append(textwrap.indent(finding.snippet, "      "))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot hold become words."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
