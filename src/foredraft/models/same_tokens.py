"""Whether a draft that was made elsewhere speaks a target's tokens, as far as the files beside it tell."""

from pathlib import Path

from foredraft.core.errors import VocabMismatchError
from foredraft.models.loading import first_difference, load_tokenizer, tokenizer_fingerprint
from foredraft.models.target import LocalTarget


def refuse_other_tokens(source: Path, target: LocalTarget) -> None:
    """Compare the tokenizer in a draft's folder, if there is one, with the target's.

    Raises:
        VocabMismatchError: names the first token that the two read differently.
    """
    if not (source / "tokenizer_config.json").is_file():
        return
    tokenizer = load_tokenizer(source)
    if tokenizer_fingerprint(tokenizer) != target.tokenizer_fingerprint and (
        difference := first_difference(tokenizer, target.tokenizer)
    ):
        raise VocabMismatchError(f"{source} does not speak the tokens of {target.name}: {difference}.")
