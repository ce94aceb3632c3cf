"""How a process that this one starts finds this amp_core, also where that is not installed, as in a checkout.

>>> subprocess.run([sys.executable, "-m", "amp_core", "env"], env=os.environ | python_path())
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that amp_core lies in."""


def python_path() -> dict[str, str]:
    """What to add to a child's environment: `PYTHONPATH` with this amp_core's folder before all others.

    Nothing where it is installed: that folder is on the path anyway, and before the standard library it must not be.
    """
    if ROOT.name in ("site-packages", "dist-packages"):
        return {}
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in known if p not in ("", str(ROOT)))])}
