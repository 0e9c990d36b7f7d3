"""A draft as a folder that transformers' loaders read, whole and opened again; runtimes that take folders share it."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import torch
from transformers import GenerationConfig

from foredraft.checkpoint import DraftManifest, write_draft
from foredraft.core.files import whole_folder
from foredraft.export.card import Use, model_card
from foredraft.export.fit import FittedDraft, complete_config, name_old_tokenizer
from foredraft.export.plan import RuntimePlan
from foredraft.export.reopen import refuse_changed_step, refuse_changed_tensors, refuse_changed_tokenizer
from foredraft.models.head import NO_IDS
from foredraft.models.loading import without_bars
from foredraft.models.target import LocalTarget

TOKEN_MAP = "token_map.pt"
PLAIN = "plain"  # what a runtime's own files are made of, where those are no transformers folder
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def write_folder(
    fitted: FittedDraft,
    target: LocalTarget,
    plan: RuntimePlan,
    use: Use,
    settings: GenerationConfig,
    out: Path,
    with_token_map: bool = False,
) -> DraftManifest:
    """Write weights, the target's tokenizer files, a model card and the plan; open all of it again and compare.

    The head is whole, whatever rows the draft computes here. The tokenizer's files are the target's own, byte for
    byte; for a GGUF target, what its tokenizer saves, under a class name that old versions know.

    Args:
        settings: The draft's generation_config.json.
        with_token_map: Whether the rows of a trimmed head are listed in a file of their own.

    Raises:
        OutputError: the folder exists, or the disk is full; nothing is left behind.
        CheckpointError: what was written differs from what is in memory; nothing is left behind.
    """
    manifest = fitted.manifest
    exported = replace(
        manifest,
        vocab_size=target.vocab_size,
        options={**manifest.options, "head_rows": 0},
        measured=fitted.measured,
    )

    def fill(folder: Path) -> None:
        write_model(folder, fitted, target, settings)
        files = {"draft": "."}
        if with_token_map and fitted.head_rows:
            write_token_map(folder / TOKEN_MAP, fitted.draft.head_token_ids)
            files["token_map"] = TOKEN_MAP
        write_card(folder, fitted, target, plan, use, files)
        refuse_changed(folder, fitted, target)

    return write_draft(out, exported, fill)


def write_model(folder: Path, fitted: FittedDraft, target: LocalTarget, settings: GenerationConfig) -> None:
    """Put weights, configuration and the target's tokenizer files into a folder that transformers' loaders read."""
    fitted.model.generation_config = settings
    with without_bars():
        fitted.model.save_pretrained(folder)
    complete_config(folder, fitted.model)
    write_tokenizer(folder, target)


def write_card(
    folder: Path, fitted: FittedDraft, target: LocalTarget, plan: RuntimePlan, use: Use, files: Mapping[str, str]
) -> None:
    """Put the model card and the plan into a folder.

    Args:
        files: What else the plan names, by what it is.
    """
    card = model_card(fitted.manifest, target, use, plan.k, fitted.head_rows, fitted.changes)
    (folder / "README.md").write_text(card, encoding="utf-8")
    plan.write(folder, target.name, fitted.measured, fitted.changes, {**files, "card": "README.md"})


def write_plain(folder: Path, fitted: FittedDraft, target: LocalTarget) -> Path:
    """Write the transformers folder that a runtime's own files are made of into PLAIN, and return it.

    Raises:
        CheckpointError: see refuse_changed.
    """
    plain = folder / PLAIN
    plain.mkdir()
    write_model(plain, fitted, target, plain_settings(target))
    refuse_changed(plain, fitted, target)
    return plain


def refuse_changed(folder: Path, fitted: FittedDraft, target: LocalTarget) -> None:
    """Open what write_model wrote, and compare it with what is in memory.

    Raises:
        CheckpointError: a tensor, the tokenizer or one step differs.
    """
    refuse_changed_tensors(folder, fitted.model)
    refuse_changed_tokenizer(folder, target)
    refuse_changed_step(folder, replace(fitted.draft, head_token_ids=NO_IDS))


def plain_settings(target: LocalTarget) -> GenerationConfig:
    """Return the generation settings of a draft: the target's special tokens, and nothing that changes a guess."""
    stops = target.model.generation_config
    return GenerationConfig(
        bos_token_id=stops.bos_token_id, eos_token_id=stops.eos_token_id, pad_token_id=stops.pad_token_id
    )


def write_tokenizer(folder: Path, target: LocalTarget) -> None:
    """Put the target's tokenizer files into a folder."""
    if not target.path.is_dir() or target.path == Path():
        target.tokenizer.save_pretrained(folder)
        name_old_tokenizer(folder)
        return
    for name in {*_TOKENIZER_FILES, "tokenizer.json", *target.tokenizer.vocab_files_names.values()}:
        if (target.path / name).is_file():
            shutil.copyfile(target.path / name, folder / name)


def write_target(target: LocalTarget, path: Path) -> Path:
    """Return a transformers folder of the target: its own, or `path`, which is written."""
    if target.path.is_dir() and target.path != Path():
        return target.path
    with whole_folder(path) as folder, without_bars():
        target.model.save_pretrained(folder)
        write_tokenizer(folder, target)
    return path


def write_token_map(path: Path, token_ids: torch.Tensor) -> None:
    """Write the target's token of each kept head row, as SGLang reads it: a list, loadable with weights_only."""
    held = BytesIO()  # torch does not tell a full disk from other faults
    torch.save(token_ids.tolist(), held)
    path.write_bytes(held.getvalue())
