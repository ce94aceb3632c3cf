"""The quick forms of `many_eyes`, `big_runs` and `soak` test that these work, and results that do not depend on the
load of the machine. Their long forms print times."""

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.serve import beside_tensorboard
from tests.serve.big_runs import big_run, library, live_tail, pages, write_library
from tests.serve.many_eyes import POOL_THREADS, rounds
from tests.serve.running import Server, app, run_async, serving
from tests.serve.soak import slope, soak, watching_ms
from tests.serve.viewer import Viewer

MAX_BYTES = 1.5 * 2**30
Start = Callable[[Path], AbstractContextManager[Server]]


@pytest.mark.whole
def test_sessions_see_their_own_run_and_leave_nothing(tmp_path: Path) -> None:
    threads, (result,) = rounds(tmp_path, live=6, own=3, seconds=2, number=1)
    assert result.crossed == 0 and result.errors == []
    assert len(result.opening_s) == 6 and len(result.pages_s) >= 15
    assert result.left_sessions == 0 and result.left_threads <= threads + POOL_THREADS
    assert result.peak_bytes < MAX_BYTES


@pytest.mark.whole
def test_every_page_opens_a_big_run_in_bounded_memory(tmp_path: Path) -> None:
    with big_run(tmp_path / "runs" / "big", 4_000, 200_000):
        pass
    with serving(tmp_path / "runs") as server:
        result = run_async(pages(server.base, "run/big"))
        assert all(result[page][1] is not None for page in ("overview", "loss-scale", "number-ranges", "layer-detail"))
        assert server.rss_bytes() < MAX_BYTES


@pytest.mark.whole
def test_live_refreshes_and_a_library_of_many_runs_work(tmp_path: Path) -> None:
    assert len(live_tail(tmp_path, [(100, 2_000)])) == 1
    write_library(tmp_path / "library", 60)
    with serving(tmp_path / "library") as server:
        assert min(run_async(library(server.base))) > 0


@pytest.mark.whole
def test_a_short_soak_shows_no_growth(tmp_path: Path) -> None:
    result = run_async(soak(300, 6, tmp_path))
    assert result["code"] == 0 and int(str(result["opened"])) > 0
    trainer = result["trainer"]
    assert isinstance(trainer, list) and len({row["handles"] for row in trainer[len(trainer) // 3 :]}) == 1
    assert slope(trainer, "threads")[1] == trainer[-1]["threads"]
    assert min(watching_ms(Path(str(result["run"])))) > 0


@pytest.mark.parametrize("start", [serving, app])
def test_the_first_session_may_open_any_page(tmp_path: Path, start: Start) -> None:
    async def first_session(base: str) -> tuple[bool, bool, list[str]]:
        async with Viewer(base) as viewer:
            shown = await viewer.open("loss-scale", run="sample/fp16-healthy")
            wrong = await viewer.open("no-such-page")
        return shown.not_found, wrong.not_found, shown.errors

    with start(tmp_path / "runs") as server:
        assert run_async(first_session(server.base)) == (False, True, [])


@pytest.mark.skipif(sys.platform != "linux", reason="the window is opened by xdg-open")
@pytest.mark.parametrize("start", [serving, app])
def test_a_start_opens_a_browser_once_the_server_responds(tmp_path: Path, start: Callable[..., Any]) -> None:
    opened = tmp_path / "opened"
    opener = tmp_path / "desktop" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(
        f"#!{sys.executable}\nimport sys, urllib.request\nurllib.request.urlopen(sys.argv[1])\n"
        f"open({str(opened)!r}, 'a').write(sys.argv[1])\n"
    )
    opener.chmod(0o700)
    with start(tmp_path / "runs", desktop=opener.parent) as server:
        give_up = time.monotonic() + 300
        while not opened.exists() and time.monotonic() < give_up:
            time.sleep(0.1)
        assert opened.read_text() == server.base


def test_the_comparison_with_tensorboard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["beside_tensorboard"])
    with pytest.raises(SystemExit, match=r"^TensorBoard is not installed here; pip install tensorboard\.$"):
        beside_tensorboard.main()
    monkeypatch.setattr(sys, "argv", ["beside_tensorboard", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        beside_tensorboard.main()
