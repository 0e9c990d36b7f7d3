"""Opening what was just written: it must be what is in memory, no more and no less."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from foredraft.core.errors import CheckpointError
from foredraft.models.loading import tokenizer_fingerprint
from foredraft.models.target import LocalTarget


def refuse_changed_tensors(folder: Path, model: PreTrainedModel) -> None:
    """Compare every tensor of a folder's safetensors with the model that was written there.

    Names that share one tensor, such as a tied head, must be stored once.

    Raises:
        CheckpointError: names the first tensor that is missing, extra, stored twice, or different.
    """
    written = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    held = model.state_dict()
    names_of: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault(tensor.data_ptr(), []).append(name)
    for names in names_of.values():
        stored = [name for name in names if name in written]
        if len(stored) != 1:
            raise _changed(folder, f"{names[0]} is stored {len(stored)} times")
        one, other = held[stored[0]].cpu(), written.pop(stored[0])
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise _changed(folder, f"{stored[0]} differs")
    if written:
        raise _changed(folder, f"{min(written)} is no tensor of the model")


def refuse_changed_tokenizer(folder: Path, target: LocalTarget) -> None:
    """Compare the tokenizer that a folder gives with the target's.

    Raises:
        CheckpointError: they cut text differently.
    """
    if (
        tokenizer_fingerprint(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        != target.tokenizer_fingerprint
    ):
        raise _changed(folder, f"its tokenizer is not that of {target.name}")


def _changed(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"What was written to {folder} is not what was in memory: {what}. Nothing was kept.")
