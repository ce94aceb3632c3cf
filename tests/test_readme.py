"""The README is correct: its commands, flags and code work."""

import re
import shlex
import subprocess

import pytest

from amp_core.__main__ import parser
from amp_core.schema import TABLES
from tests.paths import ROOT, SAMPLE_RUNS

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (SAMPLE_RUNS / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_ci_runs_the_readmes_test_command():
    assert "./dev test\n" in blocks(README, "bash")
    assert "./dev test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_dev_refuses_unknown_commands():
    done = subprocess.run([ROOT / "dev", "tests"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "usage: ./dev app | test | lint\n"


def test_the_loop_in_the_readme_runs(tmp_path, monkeypatch):
    """The code of the README, verbatim, with a small model on the CPU."""
    monkeypatch.chdir(tmp_path)
    loop = next(b for b in blocks(README, "python") if "with watch(" in b).replace('"cuda"', '"cpu"')
    setup = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loss_fn = torch.nn.functional.mse_loss
loader = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(25)]
"""
    exec(compile(setup + loop, "README.md", "exec"), {})
    read = next(b for b in blocks(README, "python") if "load_run(" in b)
    result = {}
    exec(compile(read, "README.md", "exec"), result)
    assert len(result["run"].steps) == 25
    assert sorted(result["run"].tensors().step.unique()) == [0, 10, 20]


COMMANDS = [line for line in "".join(blocks(README, "bash")).splitlines() if line.startswith("ampscope")]


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_in_the_readme_is_valid(line):
    parser().parse_args(shlex.split(line, comments=True)[1:])


def test_each_flag_in_the_readme_exists():
    """In comments beside commands, and in the text, alone or in a part of a command."""
    (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    known = {name: set(command._option_string_actions) for name, command in commands.items()}
    spoken = [*COMMANDS, *re.findall(r"`(ampscope [^`]+)`", README)]
    for line in spoken:
        assert set(re.findall(r"(?<!\S)--[\w-]+", line)) <= known[line.split()[1]], line
    alone = set(re.findall(r"`(--[\w-]+)", README))
    assert len(alone) > 5 and alone <= set.union(*known.values())


@pytest.mark.parametrize("table", TABLES)
def test_the_format_page_describes_every_column_as_the_schema_does(table):
    section = FORMAT.split(f"**{table}**: ")[1].split("\n**")[0]
    assert section.startswith(TABLES[table].doc)
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (.*?)(?: \(missing: .*\))? \|$", section, flags=re.MULTILINE)
    described = [
        (c.name, re.sub(r"list<item: (\w+)>", r"list of \1", str(c.type)), c.doc) for c in TABLES[table].columns
    ]
    assert rows == described
