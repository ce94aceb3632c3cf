"""The app under Streamlit's AppTest; a page is opened by its address.

app = app_test("pages/loss_scale.py", run="run/a").run()
"""

import ast
import functools
from pathlib import Path
from typing import Any

from streamlit.components.v2 import manifest_scanner
from streamlit.runtime.pages_manager import PagesManager
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from tests.paths import ROOT

OVERVIEW = "pages/run_overview.py"

# An AppTest looks for components in the metadata of every installed package, which takes longer than most pages do. The
# packages do not change, so one scan is enough.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)

# Each AppTest compiles the app and its pages, which do not change either.
_compiled = ScriptCache.get_bytecode
_of_checkout = functools.cache(functools.partial(_compiled, ScriptCache()))


def _get_bytecode(cache: ScriptCache, script_path: str) -> Any:
    own = Path(script_path).is_relative_to(ROOT)
    return _of_checkout(script_path) if own else _compiled(cache, script_path)


ScriptCache.get_bytecode = _get_bytecode  # type: ignore[method-assign]

# Until the first `st.navigation` of a process, Streamlit takes each file in pages/ for a page, and opens it without
# app.py.
PagesManager.uses_pages_directory = False


@functools.cache
def pages() -> dict[str, str]:
    """File and address of every page, as `app.py` passes them to `st.Page`."""
    calls = [n for n in ast.walk(ast.parse((ROOT / "app.py").read_text())) if isinstance(n, ast.Call)]
    result = {}
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "Page":
            options = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
            result[ast.literal_eval(call.args[0])] = options["url_path"]
    return result


def app_test(page: str = OVERVIEW, **address: Any) -> AppTest:
    """The app before its first pass, at that page, with these parameters in its address."""
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=300)
    for name, value in address.items():
        app.query_params[name] = value
    if page != OVERVIEW:  # `switch_page` knows the addresses of pages only after the first pass
        app._page_hash = calc_hash(pages()[page])
    return app
