"""Import and export of runs in formats of other tools: TensorBoard's event files, Parquet and CSV.

>>> import_tensorboard("logs/a", "runs/a").understood
{'loss': 'train/loss', 'lr': 'train/learning_rate'}
>>> export(load_run("runs/a"), "csv", "exported")
[PosixPath('exported/run.json'), PosixPath('exported/steps.csv'), PosixPath('exported/events.csv')]

The tensorboard package is imported only where its files are read or written.
"""

from amp_core.interop.export import FORMS, export
from amp_core.interop.import_te import ImportedTE, import_te
from amp_core.interop.import_tensorboard import Imported, import_tensorboard

__all__ = ["FORMS", "Imported", "ImportedTE", "export", "import_te", "import_tensorboard"]
