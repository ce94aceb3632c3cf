"""`./dev test --cpu` prints the processor time of the folders, files, test functions and cases that take most.

Other work on the machine affects it less than wall time. It includes child processes that have ended, and not the
collection.
"""

import os
from collections import Counter
from collections.abc import Generator

import pytest

PARTS_SHOWN = 60


def used_s() -> float:
    """Processor time of this process and of its ended children, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """A plugin that measures each test with its fixtures, wherever it runs, and adds up files and folders."""

    def __init__(self) -> None:
        self._before = 0.0
        self._of_tests: Counter[str] = Counter()

    def pytest_runtest_logstart(self) -> None:
        self._before = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("processor_s", used_s() - self._before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._of_tests[report.nodeid] += dict(report.user_properties)["processor_s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: Counter[str] = Counter()
        files: Counter[str] = Counter()
        functions: Counter[str] = Counter()  # all cases of each
        for test, seconds in self._of_tests.items():
            file = test.partition("::")[0]
            files[file] += seconds
            functions[test.partition("[")[0]] += seconds
            folders["/".join(file.split("/")[:2])] += seconds
        for title, parts in (("folder", folders), ("file", files), ("function", functions), ("case", self._of_tests)):
            terminalreporter.section(f"processor time by {title}, {sum(parts.values()):.0f} s")
            for part, seconds in parts.most_common(PARTS_SHOWN):
                terminalreporter.write_line(f"{seconds:7.1f} s  {part}")
