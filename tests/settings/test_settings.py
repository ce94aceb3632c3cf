"""A field of `TrainConfig` defines a setting: its flag, its check, its form field and its part of a command."""

import dataclasses

import pytest

from amp_core import RunError
from amp_core.cli import settings
from amp_core.settings.setting import settings_of
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.resume import MAY_CHANGE
from tests.edited_package import run_edited_copy

FIELD = (
    'ema_decay: float | None = setting(None, "positive", "decay of the moving average of the weights", '
    'form=Form("EMA decay", place=1))'
)


def test_an_added_field_becomes_a_flag_a_check_a_form_field_and_part_of_the_command(tmp_path):
    code = """
import contextlib, io, os, shlex
os.environ["AMPSCOPE_RUNS"] = "runs"
from amp_core import RunError
from amp_core.__main__ import main
from amp_core.cli.settings import add_settings, flags, settings
from amp_core.settings.training import TrainConfig
for command in ("train", "compare", "tune"):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "--ema-decay X" in output.getvalue() and "decay of the moving average of" in output.getvalue()
import argparse
parser = argparse.ArgumentParser()
add_settings(parser)
config = TrainConfig.from_dict(settings(parser.parse_args(["--ema-decay", "0.9"])))
assert config.ema_decay == 0.9 and TrainConfig().ema_decay is None
assert flags(config) == ["--workload", "text-gpt", "--precision", "fp16", "--ema-decay", "0.9"]
try:
    TrainConfig(ema_decay=-1)
except RunError as error:
    assert str(error) == "ema_decay=-1 is not possible; give a number above 0", error

from streamlit.testing.v1 import AppTest
app = AppTest.from_file("app.py", default_timeout=300).run().switch_page("pages/start_run.py").run()
assert not app.exception, app.exception
field = next(n for n in app.number_input if n.key == "start.ema_decay")
assert (field.label, field.value) == ("EMA decay", None)
assert field.help == "Decay of the moving average of the weights.", field.help
field.set_value(0.95).run()
assert "--ema-decay 0.95" in app.code[-1].value, [c.value for c in app.code]
field = next(n for n in app.number_input if n.key == "start.ema_decay")
field.set_value(-1.0).run()
next(b for b in app.button if b.key == "start.go").click().run()
output = app.error[0].value.replace(chr(92), "")
assert output.startswith("ema_decay=-1.0 is not possible; give a number above 0"), output

from pages.parts.start import again
recorded = config.to_dict() | {"size": "tiny"}
assert again.settings(recorded)["ema_decay"] == 0.9 and again.left_out(recorded) == []
print("right")
"""
    assert (
        run_edited_copy(tmp_path, {"amp_core/settings/training.py": ("evaluate: bool", FIELD)}, code).strip() == "right"
    )


def test_every_setting_has_help_and_a_valid_default():
    for name, one in settings_of(TrainConfig).items():
        default = getattr(TrainConfig(), name)
        assert one.help and (one.metavar or one.kind == "switch"), name
        assert one.kind != "choice" or default in one.choices, name
        assert one.checked(name, default, optional=default is None) == default, name
    assert {"steps", "device"} <= MAY_CHANGE and "seed" not in MAY_CHANGE


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"profile": (3, 5)}, ["--profile", "3:5"]),
        ({"islands": ("head", "norm")}, ["--islands", "head,norm"]),
        ({"lr": 3.0, "tf32": False, "evaluate": False}, ["--lr", "3", "--no-tf32", "--no-evaluate"]),
        ({"trace_ops": 0, "nproc": 2, "fused": True}, ["--trace-ops", "0", "--nproc", "2", "--fused"]),
    ],
)
def test_written_flags_are_parsed_to_the_same_settings(changed, flags):
    config = dataclasses.replace(TrainConfig(), **changed)
    assert settings.flags(config) == ["--workload", "text-gpt", "--precision", "fp16", *flags]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tf32": "yes"}, "tf32='yes' is not a switch; give true, false or null for the recipe's own"),
        ({"fused": None}, "fused=None is not a switch; give true or false"),
        ({"seed": -1}, f"seed=-1 is not possible; give a whole number from 0 to {2**63 - 1}"),
        ({"every": None}, "every=None is not possible; give a whole number of 1 or more"),
        ({"profile": "5:5"}, "profile='5:5' is not a window of steps; 50:53 profiles steps 50, 51 and 52"),
        ({"optimizer": "adamm"}, "optimizer='adamm' is unknown; choose one of adamw, adam, sgd (did you mean adam?)"),
    ],
)
def test_an_invalid_value_is_refused_by_its_kind(values, message):
    with pytest.raises(RunError) as caught:
        TrainConfig(**values)
    assert str(caught.value) == message
