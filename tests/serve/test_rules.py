"""The flags of `ampscope serve`, and the requests that its rules allow."""

import argparse
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_core import RunError, jobs
from amp_core.__main__ import main, parser
from amp_core.cli.serve import is_loopback, prepared
from amp_core.library.mutes import mute
from amp_core.library.permissions import VARIABLE, Rules, current, folder_bytes, host_name, user_allowed
from amp_core.settings.training import TrainConfig
from tests.file_modes import restricted


def flags(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["serve", *arguments])


def test_by_default_only_this_machine_is_served() -> None:
    command, environment = prepared(flags())
    assert "--server.address=127.0.0.1" in command
    assert {c.partition("=")[2] for c in command if c.startswith("--server.allowedHosts")} == {
        "localhost",
        "127.0.0.1",
        "::1",
    }
    assert '"read_only": false' in environment[VARIABLE] and '"scripts": []' in environment[VARIABLE]


@pytest.mark.parametrize(
    ("bad", "argument"),
    [
        (("--address", "0.0.0.0"), "address"),
        (("--address", "192.168.1.2"), "address"),
        (("--port", "0"), "port"),
        (("--scripts", "/no/such/folder"), "scripts"),
        (("--host", "http://evil/x"), "host"),
        (("--origin", "amp.example.org"), "origin"),
        (("--origin", "https://amp.example.org/path"), "origin"),
        (("--max-jobs", "0"), "max_jobs"),
        (("--max-disk", "-1"), "max_disk"),
    ],
)
def test_an_invalid_flag_raises_one_sentence(bad: tuple[str, ...], argument: str, home: Path) -> None:
    with pytest.raises(RunError, match=argument):
        prepared(flags(*bad))


def test_a_port_in_use_and_a_foreign_address_raise_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(_file: str, _command: list[str], _environment: dict[str, str]) -> None:
        raise SystemExit("became the server")

    monkeypatch.setattr("os.execve", become)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    assert capsys.readouterr().err.startswith(f"ampscope: port={port} is in use on 127.0.0.1; give another --port")
    assert main(["serve", "--read-only", "--address", "no-such-name.invalid"]) == 2
    assert "ampscope: address='no-such-name.invalid' is not an address" in capsys.readouterr().err
    assert main(["serve", "--read-only", "--address", "192.0.2.77"]) == 2
    assert "ampscope: address='192.0.2.77' is not an address" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="became the server"):
        main(["serve", "--port", port])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working directory without secrets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_open_address_needs_read_only_or_sign_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(flags("--address", "0.0.0.0", "--read-only"))
    (home / ".streamlit").mkdir()
    (home / ".streamlit" / "secrets.toml").write_text('[auth]\nclient_id = "a"\n')
    monkeypatch.setattr("amp_core.cli.serve.find_spec", lambda name: object())
    prepared(flags("--address", "0.0.0.0"))
    monkeypatch.setattr("amp_core.cli.serve.find_spec", lambda name: None)
    with pytest.raises(RunError, match="Authlib"):
        prepared(flags("--address", "0.0.0.0"))


def test_loopback() -> None:
    assert all(is_loopback(a) for a in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(a) for a in ("0.0.0.0", "::", "10.0.0.1", "example.org"))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("amp.example.org", True),
        ("AMP.example.org:8501", True),
        ("a.inside.example.org", True),
        ("inside.example.org", False),
        ("amp.example.org.evil", False),
        ("evil-amp.example.org", False),
        ("[::1]:8501", True),
        ("localhost:99999", False),
        ("user@localhost", False),
        ("localhost/x", False),
        ("", False),
        (None, False),
    ],
)
def test_hosts(host: str | None, allowed: bool) -> None:
    rules = Rules(hosts=("localhost", "::1", "amp.example.org", "*.inside.example.org"))
    assert rules.host_allowed(host) is allowed


@given(st.text(max_size=30))
def test_only_the_name_of_a_host_decides_whether_it_is_allowed(text: str) -> None:
    assert Rules(hosts=("localhost",)).host_allowed(text) is (host_name(text) == "localhost")


@given(st.text(max_size=30))
def test_only_the_own_origin_is_allowed(text: str) -> None:
    own = text.lower() in ("http://localhost:8501", "https://localhost:8501")
    assert Rules().origin_allowed(text, "localhost:8501") is own


def test_a_further_origin_can_be_allowed() -> None:
    rules = Rules(origins=("https://amp.example.org",))
    assert rules.origin_allowed("https://amp.example.org", "127.0.0.1:8501")
    assert not rules.origin_allowed("http://amp.example.org", "127.0.0.1:8501")
    assert rules.origin_allowed(None, "127.0.0.1:8501")


def test_functions_refuse_changes_on_a_read_only_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Rules(read_only=True).environment().items():
        monkeypatch.setenv(name, value)
    assert current().read_only
    with pytest.raises(RunError, match="read-only: it does not start"):
        jobs.start(TrainConfig(steps=1), tmp_path / "runs")
    with pytest.raises(RunError, match="read-only: it does not mute"):
        mute(tmp_path / "a", "watch-overhead")
    assert not (tmp_path / "runs").exists()


def test_damaged_rules_allow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("{", "[]", '{"unknown": 1}', "1"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(RunError, match=VARIABLE):
            current()


def test_scripts_are_refused_unless_their_folder_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    for folder in (tmp_path, tmp_path / "allowed"):
        (folder / "own.py").write_text("")
    inside = TrainConfig(workload=f"{tmp_path}/allowed/own.py:f")
    outside = TrainConfig(workload=f"{tmp_path}/allowed/../own.py:f")
    rules = Rules(scripts=(str(tmp_path / "allowed"),))
    rules.check_start(inside, tmp_path, 0)
    with pytest.raises(RunError, match=r"does not exist; Python files in its folder: own\.py"):
        rules.check_start(TrainConfig(workload=f"{tmp_path}/allowed/onw.py:f"), tmp_path, 0)
    for refused, by in ((outside, rules), (inside, Rules())):
        with pytest.raises(RunError, match="may not run"):
            by.check_start(refused, tmp_path, 0)


def test_limits_on_jobs_uploads_and_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to("/")
    assert folder_bytes(tmp_path) == 1000 and folder_bytes(tmp_path / "nowhere") == 0
    rules = Rules(most_jobs=2, most_upload_bytes=500, most_disk_bytes=1200)
    rules.check_start(TrainConfig(), tmp_path, 1)
    rules.check_upload(tmp_path, 200)
    for refused, message in (
        (lambda: rules.check_start(TrainConfig(), tmp_path, 2), "2 trainings are already running or queued"),
        (lambda: rules.check_upload(tmp_path, 501), "the upload is"),
        (lambda: rules.check_upload(tmp_path, 201), "the runs take"),
    ):
        with pytest.raises(RunError, match=message):
            refused()


def test_uploads_to_a_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 2**30 - 1})
    monkeypatch.setattr("amp_core.library.permissions.shutil.disk_usage", lambda path: usage)
    with pytest.raises(RunError, match="left; free some space"):
        Rules(most_disk_bytes=2**40).check_room(tmp_path)


@pytest.mark.parametrize(
    ("email", "verified", "allowed", "may"),
    [
        ("ann@example.org", True, None, True),
        (None, None, None, True),
        ("Ann@Example.org", True, ["ann@example.org"], True),
        ("ann@example.org", False, ["ann@example.org"], False),
        ("bob@example.com", None, ["*@example.com"], True),
        ("bob@evil-example.com", True, ["*@example.com"], False),
        ("bob@example.com.evil", True, ["*@example.com"], False),
        (None, True, ["*@example.com"], False),
        ("ann@example.org", True, "ann@example.org", False),
        ("ann@example.org", True, [], False),
    ],
)
def test_accounts(email: object, verified: object, allowed: object, may: bool) -> None:
    assert user_allowed(email, verified, allowed) is may


def test_a_folder_of_runs_that_may_not_be_listed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0)
    with restricted(), pytest.raises(RunError, match="Permission denied"):
        prepared(flags("--runs", str(tmp_path / "runs")))
    (tmp_path / "runs").chmod(0o755)
