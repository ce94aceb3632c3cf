"""A copy of the package with a line more, for tests of what one line is enough for.

run_edited(tmp_path, {"amp_core/phases.py": ('Phase("watch"', 'Phase("idle", …),')}, code)
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_edited(
    folder: Path, lines: Mapping[str, tuple[str, str]], code: str, files: Mapping[str, str] | None = None
) -> str:
    """What `code` prints, run with a copy of the product in which each file of `lines` has a line put before the one
    that begins with a text, and `files` are written: text by path."""
    for part in ("amp_core", "pages"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "app.py", folder)
    for name, (before, line) in lines.items():
        file = folder / name
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1
        start = text.rindex("\n", 0, text.index(before)) + 1
        indent = text[start : text.index(before)]
        file.write_text(f"{text[:start]}{indent}{line}\n{text[start:]}", encoding="utf-8")
    for name, text in (files or {}).items():
        assert not (folder / name).exists()
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
