"""The app under Streamlit's AppTest; a page is opened by its address.

app = app_test(run="run/a").run()
app.switch_page("pages/loss_scale.py").run()
"""

import functools
from typing import Any

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from tests.paths import ROOT

# An AppTest looks for components in the metadata of every installed package, which takes longer than most pages do. The
# packages do not change, so one scan is enough.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)


def app_test(**address: Any) -> AppTest:
    """The app before its first pass, with these parameters in its address."""
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=300)
    for name, value in address.items():
        app.query_params[name] = value
    return app
