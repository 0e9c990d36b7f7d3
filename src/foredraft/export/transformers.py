"""A draft as transformers takes it: a folder for assistant_model, with the tuned draft length inside."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from transformers import GenerationConfig

from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest, write_draft
from foredraft.core.errors import CapabilityError, ModelError, VocabMismatchError
from foredraft.export.card import model_card
from foredraft.export.reopen import refuse_changed_tensors, refuse_changed_tokenizer
from foredraft.models.draft import load_draft
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.loading import without_bars
from foredraft.models.target import LocalTarget

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def export_transformers(source: Path, target: LocalTarget, k: int, out: Path) -> DraftManifest:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; return its manifest.

    The head is whole, whatever rows the draft computes here, since transformers takes no map of token
    ids. The tokenizer's files are the target's own, byte for byte; for a GGUF target, what its tokenizer
    saves. generation_config.json asks for k draft tokens at every call. All of it is opened again
    and compared before the folder gets its name.

    Args:
        source: A draft folder, or that of an ordinary transformers model.
        target: The target it drafts for.
        k: Draft tokens at every target call, >= 1.
        out: A folder that does not exist yet, or is empty.

    Raises:
        ModelError: the draft is no causal language model.
        CapabilityError: it is a light net.
        VocabMismatchError: it does not speak the target's tokens, or has another number of rows.
        OutputError: the folder exists, or the disk is full; nothing is left behind.
        CheckpointError: what was written differs from what is in memory; nothing is left behind.
    """
    manifest = _manifest(source, target)
    draft = load_draft(source, _stored_dtype(source))
    if isinstance(draft.model, LightForCausalLM):
        raise CapabilityError(
            f"{source} is a light net, which transformers runs only where foredraft is imported. Export another draft."
        )
    rows = draft.model.get_input_embeddings().weight.shape[0]
    if rows != target.vocab_size:
        raise VocabMismatchError(
            f"{source} has {rows} rows for tokens, {target.name} {target.vocab_size}: transformers takes only drafts "
            "with equally many. Make the draft from this target."
        )
    draft.model.generation_config = assistant_plan(target, k)
    exported = replace(
        manifest,
        options={**manifest.options, "head_rows": 0},
        # What was measured with fewer rows, or under a law of the draft's own, does not hold in transformers.
        measured={} if len(draft.head_token_ids) or "own_laws" in manifest.options else manifest.measured,
    )

    def fill(folder: Path) -> None:
        with without_bars():
            draft.model.save_pretrained(folder)
        _write_tokenizer(folder, target)
        card = model_card(manifest, target, k, len(draft.head_token_ids))
        (folder / "README.md").write_text(card, encoding="utf-8")
        refuse_changed_tensors(folder, draft.model)
        refuse_changed_tokenizer(folder, target)

    return write_draft(out, exported, fill)


def assistant_plan(target: LocalTarget, k: int) -> GenerationConfig:
    """Return the generation settings of a draft that offers k tokens at every call, and stops where the target stops.

    transformers reads the draft's own num_assistant_tokens, schedule and confidence threshold. A
    threshold would end blocks early, at a length that nobody measured. Nothing else of the target's
    settings belongs here: a repetition penalty in a draft's settings changes what it guesses.

    A draft's own temperature, top_k or do_sample has no effect there: transformers 5.24 lets the draft generate with
    the target's settings, every one of them filled in, and with the target's logits processors
    (generation/candidate_generator.py, AssistedCandidateGenerator). They are therefore not written; foredraft.json
    keeps the draft's own law.
    """
    stops = target.model.generation_config
    return GenerationConfig(
        bos_token_id=stops.bos_token_id,
        eos_token_id=stops.eos_token_id,
        pad_token_id=stops.pad_token_id,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def _manifest(source: Path, target: LocalTarget) -> DraftManifest:
    if not (source / MANIFEST).is_file():
        return DraftManifest(
            "causal-lm", target.vocab_size, target.name, target.fingerprint, target.tokenizer_fingerprint
        )
    manifest = read_manifest(source)
    if manifest.kind != "causal-lm":
        raise ModelError(f"{source} is a drafter of kind {manifest.kind}: transformers takes only causal-lm drafts.")
    if manifest.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise VocabMismatchError(
            f"{source} was made for the tokenizer {manifest.tokenizer_fingerprint[:8]} of {manifest.target}, "
            f"{target.name} has {target.tokenizer_fingerprint[:8]}. Make the draft from this target."
        )
    return manifest


def _stored_dtype(source: Path) -> str:
    file = source / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _write_tokenizer(folder: Path, target: LocalTarget) -> None:
    if not target.path.is_dir() or target.path == Path():
        target.tokenizer.save_pretrained(folder)
        return
    for name in {*_TOKENIZER_FILES, "tokenizer.json", *target.tokenizer.vocab_files_names.values()}:
        if (target.path / name).is_file():
            shutil.copyfile(target.path / name, folder / name)
