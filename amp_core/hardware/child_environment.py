"""Let child processes import this amp_core, also from a checkout where it is not installed.

>>> subprocess.run([sys.executable, "-m", "amp_core", "env"], env=os.environ | python_path())
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that holds amp_core."""


def python_path() -> dict[str, str]:
    """Variables to add to a child's environment: `PYTHONPATH` with this amp_core's folder first.

    Empty where amp_core is installed: site-packages is on the path anyway and must not come before the standard
    library.
    """
    if ROOT.name in ("site-packages", "dist-packages"):
        return {}
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in known if p not in ("", str(ROOT)))])}
