"""A draft as llama.cpp takes it: one GGUF file (draft-simple)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from foredraft.core.errors import UserError
from foredraft.core.files import whole_folder
from foredraft.export.card import Use, inherited_licence
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import write_card
from foredraft.export.gguf_file import write_gguf
from foredraft.export.gguf_tensors import TYPES, check_type, tensor_name
from foredraft.export.gguf_types import module_types
from foredraft.export.gguf_vocabulary import vocabulary_fields
from foredraft.export.llama_quantize import llama_quantize
from foredraft.export.lookup import lookup_match
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "b11434"
FILE = "draft.gguf"


def export_llamacpp(source: Path, target: LocalTarget, k: int, out: Path, type: str = "f16", types: str = "") -> None:
    """Write draft.gguf with the target's tokenizer, a model card and the plan; of `prompt-lookup` the plan alone.

    Args:
        type: Of the matrices: f32, f16, bf16, q8_0 and others of gguf_tensors.TYPES; `stored` keeps 8-bit units as q8_0
            and 4-bit ones as q4_0, with their very integers, bfloat16 as bf16 and float32 as f16.
        types: By unit, head=q6_k;layers.0.*=q8_0, of which the first pattern that matches decides. Types that are not
            written here are written by llama-quantize, where it is found.

    Raises:
        UserError: a type that is not written here, a pattern that matches nothing, or rows that blocks do not divide.
        CapabilityError: a type of llama-quantize's, which is not found.
        ModelError: an architecture or a tokenizer that is not written as GGUF; the message says what is instead.
        VocabMismatchError: the draft does not speak the target's tokens.
        OutputError: the folder exists, or the disk is full; nothing is left behind.
        CheckpointError: the file does not hold what was in memory; nothing is left behind.
    """
    if match := lookup_match(source):
        _lookup_plan(match, k).write_alone(out, target.name)
        return
    given = _read_types(types)
    if type != "stored":
        check_type(type)
    fitted = fitted_draft(source, target, "float32")
    by_module = _by_module(fitted.model, given, type)
    vocabulary = vocabulary_fields(target)
    settings = {"--spec-type": "draft-simple", "--spec-draft-n-max": k, "--spec-draft-p-min": 0.0}
    command = f"llama-server -m TARGET.gguf -md {FILE} {_flags(settings)}"
    plan = RuntimePlan("llama.cpp", VERSION, k, command, settings)
    with whole_folder(out) as folder:
        name = f"Draft for {target.name}"
        default = "f16" if type == "stored" else type
        plain = {module: kind if kind in TYPES else "f16" for module, kind in by_module.items()}
        licence = inherited_licence(target.path)
        stored = write_gguf(fitted.model, folder / FILE, vocabulary, name, licence, default, plain)
        if plain != by_module:
            asked = dict(stored) | {tensor_name(module): kind for module, kind in by_module.items()}
            (folder / FILE).rename(folder / "plain.gguf")
            matrices = {tensor: kind for tensor, kind in asked.items() if stored[tensor] != "f32"}
            llama_quantize(folder / "plain.gguf", folder / FILE, matrices)
            (folder / "plain.gguf").unlink()
            stored = asked
        kept = sum(kind not in (type, "f32") for kind in stored.values()) if not by_module else 0
        fallen = f"{kept} matrices have rows that are no multiple of 32 long and are kept in f16." if kept else ""
        changes = (*fitted.changes, *filter(None, [fallen]))
        named = replace(fitted, changes=changes)
        write_card(folder, named, target, plan, _use(command, type), {"draft": FILE})


def _lookup_plan(match: int, k: int) -> RuntimePlan:
    """Return the plan of ngram-simple, which copies behind the latest occurrence of the last `match` tokens."""
    if not 1 <= match <= k:
        raise UserError(
            f"ngram-simple drafts as many tokens as it matches, or more: max_match is 1 to {k}, not {match}."
        )
    settings = {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": match, "--spec-ngram-simple-size-m": k}
    return RuntimePlan("llama.cpp", VERSION, k, f"llama-server -m TARGET.gguf {_flags(settings)}", settings)


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in settings.items())


def _read_types(types: str) -> dict[str, str]:
    """Return the types of head=q6_k;layers.0.*=q8_0 by pattern."""
    pairs = [part.partition("=") for part in types.split(";") if part]
    return {pattern: kind for pattern, _, kind in pairs}


def _by_module(model: PreTrainedModel, given: Mapping[str, str], type: str) -> dict[str, str]:
    """Return the type of each matrix that is stored; none where all have one. A head of a type of its own is untied."""
    if not given and type != "stored":
        return {}
    types = module_types(model, dict(given) if type == "stored" else {**given, "*": type})
    if model.config.tie_word_embeddings:
        table, head = "model.embed_tokens", "lm_head"
        if types[table] == types[head] or not ({"head", "*"} & set(given)):
            types.pop(head)
        else:
            model.config.tie_word_embeddings = False
    return types


def _use(command: str, type: str) -> Use:
    return Use(
        "llama.cpp",
        (
            "```",
            command,
            "```",
            "",
            f"Written for llama.cpp {VERSION}, matrices in {type}. Without `--spec-type` the draft is loaded and never "
            "used. TARGET.gguf is the target, with the same tokenizer.",
        ),
        own_laws="llama.cpp drafts greedily unless --spec-draft-sampling says otherwise.",
    )
