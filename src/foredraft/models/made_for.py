"""Whom a draft was made for: its manifest where it has one, and else what the tokenizer beside it tells."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest
from foredraft.core.errors import ModelError, VocabMismatchError
from foredraft.core.pair import CUT_OTHERWISE
from foredraft.core.protocols import Speaker
from foredraft.models.loading import first_difference, load_tokenizer, tokenizer_fingerprint
from foredraft.models.target import LocalTarget


def own_or_blank_manifest(source: Path, target: Speaker) -> DraftManifest:
    """Return the manifest of a draft, or a blank one for a plain transformers folder.

    Raises:
        ModelError: it is neither.
        VocabMismatchError: it was made for another tokenizer than the target's.
    """
    if not (source / MANIFEST).is_file():
        if not (source / "config.json").is_file():
            raise ModelError(f"{source} is no draft: it has neither {MANIFEST} nor config.json.")
        if (source / "tokenizer_config.json").is_file():
            refuse_other_tokenizer(str(source), load_tokenizer(source), target)
        return blank_manifest(target, "causal-lm")
    manifest = read_manifest(source)
    if manifest.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise made_for_another(source, manifest, target)
    return manifest


def blank_manifest(target: Speaker, kind: str) -> DraftManifest:
    """Return the manifest of a draft for which nothing was done yet."""
    return DraftManifest(kind, target.vocab_size, target.name, target.fingerprint, target.tokenizer_fingerprint)


def made_for_another(source: Path, manifest: DraftManifest, target: Speaker) -> VocabMismatchError:
    """Return what to say of a draft that was made for another vocabulary than the target's."""
    return VocabMismatchError(
        f"{source} was made for {manifest.target} ({manifest.vocab_size} tokens, tokenizer "
        f"{manifest.tokenizer_fingerprint[:8]}), not for {target.name} ({target.vocab_size} tokens, "
        f"{target.tokenizer_fingerprint[:8]}). Make a draft from this target."
    )


def refuse_other_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, target: Speaker) -> None:
    """Compare the tokenizer of a draft that was made elsewhere with the target's.

    Raises:
        VocabMismatchError: names the first token that the two read differently, or says that only their rules differ.
    """
    if tokenizer_fingerprint(tokenizer) == target.tokenizer_fingerprint:
        return
    difference = "their tokenizers are not the same."
    if isinstance(target, LocalTarget):
        named = first_difference(tokenizer, target.tokenizer)
        difference = f"{named}." if named else f"{CUT_OTHERWISE.reason} {CUT_OTHERWISE.fix}"
    raise VocabMismatchError(f"{name} does not speak the tokens of {target.name}: {difference}")
