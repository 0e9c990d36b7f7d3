"""Making a draft's shape what runtimes ask of a pair: as many rows as the target, its positions, explicit fields."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CapabilityError, ModelError, VocabMismatchError
from foredraft.core.files import write_json
from foredraft.models.draft import Draft, load_draft, stored_dtype
from foredraft.models.factored import has_factors, multiply_out
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.made_for import own_or_blank_manifest
from foredraft.models.passes import pass_facts
from foredraft.models.target import LocalTarget

_TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class FittedDraft:
    """A draft that is ready to be written for a target.

    Attributes:
        source: Folder that it came from.
        draft: With a whole head; head_token_ids are the rows that it computed here, empty for all.
        manifest: As it was in `source`, without what was measured where factors were multiplied out, which cost less
            there; a blank one for a draft made elsewhere.
        changes: What was changed so that runtimes take the pair, one sentence each.
    """

    source: Path
    draft: Draft
    manifest: DraftManifest
    changes: tuple[str, ...]

    @property
    def model(self) -> PreTrainedModel:
        return self.draft.model

    @property
    def head_rows(self) -> int:
        """Rows of a trimmed head; 0 for a whole one."""
        return len(self.draft.head_token_ids)

    @property
    def measured(self) -> Mapping[str, Any]:
        """What was measured of it; nothing where that was with fewer rows, or under a law of the draft's own.

        Neither holds in other runtimes.
        """
        return {} if self.head_rows or "own_laws" in self.manifest.options else self.manifest.measured


def fitted_draft(source: Path, target: LocalTarget, dtype: str = "") -> FittedDraft:
    """Load a draft and give it the target's number of rows and its context.

    Rows that are no tokens of the tokenizer are added or cut off; see `fit_rows`. A draft whose positions are the
    target's gets the target's max_position_embeddings: behind a smaller one servers stop drafting in silence.

    Args:
        source: A draft folder, or that of an ordinary transformers model.
        dtype: What to load it in; as stored unless given.

    Raises:
        ModelError: the draft is no causal language model.
        CapabilityError: it is a light net.
        VocabMismatchError: it does not speak the target's tokens.
    """
    manifest = _manifest(source, target)
    draft = load_draft(source, dtype or stored_dtype(source))
    if isinstance(draft.model, LightForCausalLM):
        raise CapabilityError(
            f"{source} is a light net, which transformers runs only where foredraft is imported. Export another draft."
        )
    multiplied = _multiplied_out(draft.model)
    if multiplied:
        manifest = replace(manifest, measured={})
    changes = [
        *multiplied,
        *fit_rows(draft.model, target.vocab_size, len(target.tokenizer)),
        *_fit_positions(draft.model, target.model),
    ]
    return FittedDraft(source, draft, manifest, tuple(changes))


def _multiplied_out(model: PreTrainedModel) -> list[str]:
    """Make factors in a model plain matrices, in place; return what that costs."""
    if not has_factors(model):
        return []
    before, count, after = pass_facts(model), multiply_out(model), pass_facts(model)
    return [
        f"{count} matrices that foredraft keeps as two thin ones each were multiplied out, since no other runtime "
        f"multiplies by factors: a draft step reads {after.weight_bytes / 1e6:.1f} MB instead of "
        f"{before.weight_bytes / 1e6:.1f} and is no faster than before the cut."
    ]


def fit_rows(model: PreTrainedModel, rows: int, num_tokens: int) -> list[str]:
    """Pad or trim embeddings and head in place to `rows`; return what was done.

    Each new row is the mean of the rows of tokens. Its logit is then the mean of theirs, which is never above the
    largest: a padding row cannot win (a row of zeros could, where all logits are negative). Rounded to the model's
    precision this holds but for the rounding.

    Args:
        num_tokens: Rows that are tokens, the first ones.

    Raises:
        VocabMismatchError: fewer rows than tokens are asked for, or the model has fewer.
        ModelError: embeddings or head are stored in fewer bits, which cannot be padded.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    held = embeddings.weight.shape[0]
    if held == rows:
        return []
    if num_tokens > min(rows, held):
        raise VocabMismatchError(
            f"The draft has {held:,} rows, {rows:,} are asked for, and the tokenizer has {num_tokens:,} tokens: rows "
            "of tokens cannot be added or cut off. Make the draft from this target."
        )
    tied = head.weight is embeddings.weight
    for module in [embeddings] if tied else [embeddings, head]:
        if not isinstance(module, nn.Embedding | nn.Linear):
            raise ModelError("Rows stored in fewer bits cannot be padded: pad the draft first, then round its head.")
        module.weight = nn.Parameter(_resized(module.weight.detach(), rows, num_tokens), requires_grad=False)
    if tied:
        head.weight = embeddings.weight
    if head.bias is not None:
        head.bias = nn.Parameter(_resized(head.bias.detach(), rows, num_tokens), requires_grad=False)
    embeddings.num_embeddings = head.out_features = rows
    model.config.get_text_config().vocab_size = rows
    done = "padded with rows that cannot win" if rows > held else "cut at the end, where no token is"
    return [f"Embeddings and head were {done}: {held:,} rows became {rows:,}, as many as the target has."]


def complete_config(folder: Path, model: PreTrainedModel) -> None:
    """Write out what readers of config.json would have to guess: the tie flag, positions, and older names.

    transformers leaves out what is its default, and writes `rope_parameters` and `dtype`; older versions and other
    runtimes read `rope_theta` and `torch_dtype`, and take 10000 and float32 where they are missing.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    read = model.config.get_text_config()
    rope = read.rope_parameters if isinstance(getattr(read, "rope_parameters", None), dict) else {}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    config["tie_word_embeddings"] = getattr(head, "weight", None) is embeddings.weight
    config["vocab_size"] = read.vocab_size
    config["max_position_embeddings"] = read.max_position_embeddings
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    write_json(file, config)


def name_old_tokenizer(folder: Path) -> None:
    """Call the tokenizer class what every version of transformers knows; 5 writes a name that 4 does not know."""
    file = folder / _TOKENIZER
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        write_json(file, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def _manifest(source: Path, target: LocalTarget) -> DraftManifest:
    manifest = own_or_blank_manifest(source, target)
    if manifest.kind != "causal-lm":
        raise ModelError(f"{source} is a drafter of kind {manifest.kind}: this runtime takes only causal-lm drafts.")
    return manifest


def _fit_positions(model: PreTrainedModel, target: PreTrainedModel) -> list[str]:
    draft, whole = model.config.get_text_config(), target.config.get_text_config()
    held, wanted = (getattr(config, "max_position_embeddings", None) for config in (draft, whole))
    rope, theirs = (getattr(config, "rope_parameters", None) for config in (draft, whole))
    if not (held and wanted and held < wanted):
        return []
    if rope is None or rope != theirs:
        return [
            f"The draft reads {held:,} tokens and the target {wanted:,}; its positions are not the target's, so that "
            "it was left so."
        ]
    draft.max_position_embeddings = wanted
    return [f"max_position_embeddings was raised from {held:,} to the target's {wanted:,}; its positions are the same."]


def _resized(weight: Float[Tensor, "held *wide"], rows: int, num_tokens: int) -> Float[Tensor, "rows *wide"]:
    if rows <= len(weight):
        return weight[:rows].clone()
    mean = weight[:num_tokens].float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(rows - len(weight), *weight.shape[1:])])
