"""Opening what was just written: it must be what is in memory, no more and no less."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from foredraft.core.errors import CheckpointError
from foredraft.models.draft import Draft, load_draft
from foredraft.models.loading import tokenizer_fingerprint
from foredraft.models.target import LocalTarget

_STEP_TOKENS = 16  # more than the few rows that loaded models multiply in another way


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
            raise changed(folder, f"{names[0]} is stored {len(stored)} times")
        one, other = held[stored[0]].cpu(), written.pop(stored[0])
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise changed(folder, f"{stored[0]} differs")
    if written:
        raise changed(folder, f"{min(written)} is no tensor of the model")


def refuse_changed_tokenizer(folder: Path, target: LocalTarget) -> None:
    """Compare the tokenizer that a folder gives with the target's.

    Raises:
        CheckpointError: they cut text differently.
    """
    if (
        tokenizer_fingerprint(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        != target.tokenizer_fingerprint
    ):
        raise changed(folder, f"its tokenizer is not that of {target.name}")


@torch.no_grad()
def refuse_changed_step(folder: Path, draft: Draft) -> None:
    """Run one step of the draft in a folder and of the one in memory.

    Raises:
        CheckpointError: their logits differ in a bit, or the folder computes other rows of its head.
    """
    again = load_draft(folder, str(next(draft.model.parameters()).dtype).removeprefix("torch."))
    rows = draft.model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(min(rows, _STEP_TOKENS))[None]
    if not torch.equal(again.head_token_ids, draft.head_token_ids):
        raise changed(folder, "it computes other rows of its head")
    one, other = (model(tokens.to(model.device)).logits for model in (draft.model, again.model))
    if not torch.equal(one, other):
        raise changed(folder, "one step from disk gives other logits")


def refuse_map_that_is_not_inverse(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Check the two maps of a reduced vocabulary against each other.

    Args:
        d2t: Target id minus draft id of each draft token.
        t2d: Whether each target token is one of the draft's.

    Raises:
        CheckpointError: they do not name the same tokens, once each and in order.
    """
    named = torch.arange(len(d2t)) + d2t
    inside = len(named) == 0 or bool((named >= 0).all() and (named < len(t2d)).all())
    if not inside or not torch.equal(named, t2d.nonzero().flatten()):
        raise CheckpointError(
            f"The maps of the reduced vocabulary are not inverse: d2t names {len(d2t):,} tokens, t2d "
            f"{int(t2d.sum()):,}. Write both from one list of token ids."
        )


def changed(folder: Path, what: str) -> CheckpointError:
    """Return the error of a written folder or file that is not what was in memory."""
    return CheckpointError(f"What was written to {folder} is not what was in memory: {what}. Nothing was kept.")
