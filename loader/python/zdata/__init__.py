"""Pretraining data from a `zdata` store: any batch of any step, exactly, with where it came from.

`Store` reads a store, `Plan` says what a curriculum trains on, `Loader` reads batches. `zdata.torch` has datasets for
PyTorch. The command `zdata` builds stores. Importing this starts no thread, and imports no NumPy.
"""

from ._batch import Batch
from ._zdata import __version__, step_digest
from .errors import BugError, DataError, DivergedError, Error, MachineError, MismatchError, UsageError
from .loader import Loader
from .plan import Phase, Plan, Source, SourceUse
from .provenance import Document, DocumentPart, Infill, Sighting, Whereabouts
from .store import Store, Stream

__all__ = [
    "Batch",
    "BugError",
    "DataError",
    "DivergedError",
    "Document",
    "DocumentPart",
    "Error",
    "Infill",
    "Loader",
    "MachineError",
    "MismatchError",
    "Phase",
    "Plan",
    "Sighting",
    "Source",
    "SourceUse",
    "Store",
    "Stream",
    "UsageError",
    "Whereabouts",
    "__version__",
    "step_digest",
]
