"""The model that an init step takes its layers from: the target, or another that speaks the target's tokens."""

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.init.build import require_possible
from foredraft.distill.init.sibling import require_same_tokens, set_rows
from foredraft.distill.init.transplant import transplant_vocabulary
from foredraft.models.gguf import read_gguf_vocabulary
from foredraft.models.loading import DTYPES, load_causal_lm, load_tokenizer, locate
from foredraft.models.target import LocalTarget
from foredraft.steps import InitStep


def open_source(target: LocalTarget, step: InitStep) -> PreTrainedModel:
    """Return the target's model, or the named one with as many rows as the target has and its tokens.

    Raises:
        ModelError: it is no causal language model, or cannot be reached.
        VocabMismatchError: it speaks other tokens, and no transplant was asked for.
    """
    if not step.is_sibling:
        return target.model
    loaded = load_causal_lm(step.source, target.dtype if target.dtype in DTYPES else "auto")
    if step.transplant:
        transplant_vocabulary(loaded.model, loaded.tokenizer, target.tokenizer, target.vocab_size)
    else:
        require_same_tokens(step.source, loaded.tokenizer, target.name, target.tokenizer)
        set_rows(loaded.model, target.vocab_size)
    return loaded.model


def check_source(target: LocalTarget, step: InitStep) -> None:
    """Raise what making the draft would raise for its settings alone; of another model only the weights are not read.

    Raises:
        RecipeError: layers or widths that the source cannot have, or nothing to heal.
        ModelError: there is no such model.
        VocabMismatchError: it speaks other tokens, and no transplant was asked for.
    """
    if not step.is_sibling:
        require_possible(target.model.config, step)
        return
    path = locate(step.source, weights=False)
    if path.suffix == ".gguf":
        config, tokenizer = read_gguf_vocabulary(path)
    else:
        config, tokenizer = _config(step.source, path), load_tokenizer(path)
    require_possible(config, step)
    if not step.transplant:
        require_same_tokens(step.source, tokenizer, target.name, target.tokenizer)


def _config(source: str, path: object) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} is no model to start from: {str(error).splitlines()[0]}") from error
