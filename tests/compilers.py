"""Compilers on this machine, for tests that compile C or C++.

    pytestmark = needs_cxx

Without a compiler such tests are skipped with a reason; with AMPSCOPE_REQUIRE_COMPILERS=1 they fail instead.
"""

import os
import platform
import shutil

import pytest

CC = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
CXX = shutil.which("g++") or shutil.which("clang++")
REQUIRED = os.environ.get("AMPSCOPE_REQUIRE_COMPILERS") == "1"

needs_cc = pytest.mark.skipif(CC is None and not REQUIRED, reason="needs a C compiler: gcc or clang")
needs_cxx = pytest.mark.skipif(
    (CXX is None or platform.system() != "Linux") and not REQUIRED,
    reason="needs Linux and g++ or clang++",
)
