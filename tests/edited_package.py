"""A copy of the package with inserted lines, for tests that one line is enough for a change.

run_edited_copy(tmp_path, {"amp_core/phases.py": ('Phase("watch"', 'Phase("idle", …),')}, code)
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_edited_copy(
    folder: Path, lines: Mapping[str, tuple[str, str]], code: str, files: Mapping[str, str] | None = None
) -> str:
    """The output of `code`, run with a copy of the product. In each file of `lines`, a line is inserted before the one
    that begins with the given text; `files` maps paths of new files to their text."""
    for directory in ("amp_core", "pages"):
        shutil.copytree(ROOT / directory, folder / directory, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "app.py", folder)
    for name, (anchor, line) in lines.items():
        file = folder / name
        text = file.read_text(encoding="utf-8")
        assert text.count(anchor) == 1
        start = text.rindex("\n", 0, text.index(anchor)) + 1
        indent = text[start : text.index(anchor)]
        file.write_text(f"{text[:start]}{indent}{line}\n{text[start:]}", encoding="utf-8")
    for name, text in (files or {}).items():
        assert not (folder / name).exists()
        (folder / name).write_text(text, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
