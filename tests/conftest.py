"""Shared fixtures: tiny models on disk, made once a session.

Imports nothing heavy: the process that hands out the tests reads this file too, and the others wait for it.
"""

import os
from pathlib import Path

import pytest

from tests.shapes import check_annotations

# Processes that tests start find the package, installed or not.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What was written is opened again after each operation, but not in a process of its own, which takes seconds each time.
os.environ.setdefault("FOREDRAFT_REOPEN_HERE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

check_annotations("foredraft")

LONGEST = ("test_pool.py", "test_verification.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: at the end, one process would wait for the other."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def one_plain_thread() -> None:
    import torch

    torch.set_num_threads(1)
    # `auto` means float32 here, whatever the processor computes in: exactness is demanded of float32 only.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: False


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer Llama with a tokenizer of 259 tokens and 272 columns (13 padding rows)."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(scope="session")
def shallow_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two layers, for laws to which the depth is nothing: half the time."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "shallow-target", num_layers=2)


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama of the same vocabulary: an ordinary transformers folder, no foredraft.json."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-draft", num_layers=1, seed=1)
