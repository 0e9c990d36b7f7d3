"""A drafter as vLLM takes it: a folder for its method draft_model, or settings of its n-gram and suffix drafters."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.checkpoint import MANIFEST, read_manifest
from foredraft.core.errors import CapabilityError, OutputError
from foredraft.core.options import read_options
from foredraft.core.runtimes import VLLM_PATH_WORDS
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import plain_settings, write_folder
from foredraft.export.lookup import LONGEST_MATCH, LOOKUP
from foredraft.export.plan import RuntimePlan, length_by_batch
from foredraft.models.target import LocalTarget

VERSION = "0.32"
_DRAFT = "path/to/this/folder"
_SUFFIX = ("suffix", "suffix-automaton")


def export_vllm(source: Path, target: LocalTarget, k: int, out: Path) -> None:
    """Write a folder for `vllm serve TARGET --speculative-config`, its settings in foredraft-plan.json.

    `prompt-lookup` and suffix drafters become settings of vLLM's own drafters, which match by rules of their own.

    Raises:
        OutputError: the folder's path holds a word from which vLLM guesses another method; or see write_folder.
        CapabilityError: a drafter without a model that vLLM has no like of.
        ModelError, VocabMismatchError, CheckpointError: see export_transformers.
    """
    if found := [word for word in VLLM_PATH_WORDS if word in str(out.resolve()).lower()]:
        raise OutputError(
            f"{out.resolve()} contains {found[0]!r}, from which vLLM guesses its method, whatever is asked for: name "
            "another folder."
        )
    if settings := model_free_config(source, k):
        _plan(settings, k).write_alone(out, target.name)
        return
    fitted = fitted_draft(source, target)
    plan = _plan(speculative_config(k, length_by_batch(fitted.manifest.measured)), k)
    use = Use(
        "vLLM",
        (
            "```",
            plan.command.replace("TARGET", target.name),
            "```",
            "",
            f"Written for vLLM {VERSION}. The draft runs in the target's precision; `vllm:spec_decode_num_accepted_"
            "tokens` on /metrics counts what it brings.",
        ),
        own_laws="vLLM drafts greedily unless draft_sample_method says otherwise.",
    )
    write_folder(fitted, target, plan, use, plain_settings(target), out)


def speculative_config(k: int, by_batch: Mapping[str, int]) -> dict[str, Any]:
    """Return --speculative-config for a draft of k tokens, with a length for each range of batch sizes measured."""
    settings: dict[str, Any] = {"method": "draft_model", "model": _DRAFT, "num_speculative_tokens": k}
    if len(by_batch) > 1 and any(by_batch.values()):
        settings["num_speculative_tokens_per_batch_size"] = _ranges(by_batch, k)
    return settings


def model_free_config(source: Path, k: int) -> dict[str, Any]:
    """Return --speculative-config of the drafter in vLLM that is like a drafter without a model; empty for a model.

    Args:
        source: `prompt-lookup:max_match=3`, `suffix-automaton`, or the folder of a suffix index, whose text vLLM does
            not take: its suffix trees grow from what it serves.

    Raises:
        CapabilityError: vLLM has none like it.
    """
    kind = read_manifest(source).kind if (source / MANIFEST).is_file() else source.name.partition(":")[0]
    if kind == "causal-lm" or (source.is_dir() and not (source / MANIFEST).is_file()):
        return {}
    if kind == LOOKUP:
        options = {"max_match": LONGEST_MATCH, "min_match": 1} | read_options(
            source.name, {"max_match": int, "min_match": int}
        )
        lengths = {"prompt_lookup_max": options["max_match"], "prompt_lookup_min": options["min_match"]}
        return {"method": "ngram", "num_speculative_tokens": k, **lengths}
    if kind in _SUFFIX:
        return {"method": "suffix", "num_speculative_tokens": k}
    raise CapabilityError(
        f"vLLM has no drafter like {source}: it takes drafts that are models, {LOOKUP} and {' or '.join(_SUFFIX)}."
    )


def _plan(settings: Mapping[str, Any], k: int) -> RuntimePlan:
    return RuntimePlan("vllm", VERSION, k, f"vllm serve TARGET --speculative-config '{json.dumps(settings)}'", settings)


def _ranges(by_batch: Mapping[str, int], k: int) -> list[list[int]]:
    """Return [first, last, length] of neighbouring ranges of batch sizes, from what single sizes measured."""
    sizes = sorted(map(int, by_batch))
    starts, ends = [1, *sizes[1:]], [*(following - 1 for following in sizes[1:]), sizes[-1]]
    return [[start, end, min(k, by_batch[str(size)])] for start, end, size in zip(starts, ends, sizes, strict=True)]
