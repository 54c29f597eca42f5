"""Real trackers and readers; each file is left out where its partner is not installed (``make partners`` has them)."""

import os
import tempfile
from importlib.util import find_spec

import schemas

PARTNERS = {
    "tensorboard": "tensorboard",
    "parquet": "pyarrow",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "triton": "triton",
}
collect_ignore = [f"test_{name}.py" for name, package in PARTNERS.items() if find_spec(package) is None]
schemas.declare()  # transformers imports torchvision where it is installed
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp()  # read when trackio is imported
