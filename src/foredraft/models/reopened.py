"""A draft's folder, opened by a process that has nothing of it: it must give the logits that were measured."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.core.errors import CheckpointError
from foredraft.core.programs import last_words
from foredraft.models.loading import load_model, max_context
from foredraft.models.widened import widened

HERE = "FOREDRAFT_REOPEN_HERE"
_TOKENS = 24
# Of the largest logit: sums of another process may come in another order.
_TOLERANCE = 1e-3


def logits_of(folder: Path, token_ids: Int[Tensor, "1 tokens"]) -> Float[Tensor, "1 tokens vocab"]:
    """Return what the model of a folder says of some tokens, computed in float32."""
    with torch.no_grad():
        return load_model(folder, "float32")(token_ids).logits


def logits_in_new_process(folder: Path, token_ids: Int[Tensor, "1 tokens"]) -> Float[Tensor, "1 tokens vocab"]:
    """Return the same, from a Python process that is started for it, unless FOREDRAFT_REOPEN_HERE is set.

    Raises:
        CheckpointError: it could not load the folder; its last words are in the message.
    """
    if os.environ.get(HERE):
        return logits_of(folder, token_ids)
    with TemporaryDirectory() as temporary:
        asked, said = Path(temporary) / "tokens.safetensors", Path(temporary) / "logits.safetensors"
        save_file({"token_ids": token_ids.contiguous()}, asked)
        done = subprocess.run(
            [sys.executable, "-m", "foredraft.models.reopened", str(folder), str(asked), str(said)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FOREDRAFT_DEVICE": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CheckpointError(
                f"What was written cannot be loaded in a new process: {last_words(done)}. Nothing was kept."
            )
        return load_file(said)["logits"]


def refuse_changed_logits(folder: Path, model: torch.nn.Module) -> None:
    """Raise unless a folder, opened in a new process, gives the logits of the model that was written into it.

    Args:
        model: As it was written; run in float32 for a moment, in place.

    Raises:
        CheckpointError: the logits differ, or the folder cannot be loaded.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    count = min(_TOKENS, max_context(model))
    token_ids = torch.linspace(0, rows - 1, count).long()[None]
    expected = _in_float32(model, token_ids)
    found = logits_in_new_process(folder, token_ids)
    difference, size = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * size:
        raise CheckpointError(
            f"The draft gives other logits once it is loaded from disk: {difference:.3g} apart where the largest is "
            f"{size:.3g}. Nothing was kept; please report this with the command."
        )


@torch.no_grad()
def _in_float32(model: torch.nn.Module, token_ids: Int[Tensor, "1 tokens"]) -> Float[Tensor, "1 tokens vocab"]:
    device = next(model.parameters()).device
    with widened(model):
        return model(token_ids.to(device)).logits.float().cpu()


def _main(folder: str, asked: str, said: str) -> None:
    save_file({"logits": logits_of(Path(folder), load_file(asked)["token_ids"]).contiguous()}, said)


if __name__ == "__main__":
    _main(*sys.argv[1:])
