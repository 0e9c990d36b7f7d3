"""Names of every pluggable thing, as "module:attribute", resolved when first used.

Third parties add theirs through the entry-point groups `foredraft.<group>`.
"""

import difflib
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from foredraft.core.errors import UnknownNameError

_BUILT_IN: dict[str, dict[str, str]] = {
    # Model-free drafters that need nothing built: factory(vocab_size, **options) -> Drafter.
    "drafters": {
        "prompt-lookup": "foredraft.ngram.prompt_lookup:PromptLookup",
        "suffix-automaton": "foredraft.ngram.suffix:context_drafter",
        "traffic": "foredraft.ngram.traffic:traffic_drafter",
    },
    # What makes one drafter of another, as `draft+name:option=value`: wrap(drafter, load, **options) -> Drafter, where
    # load(spec) loads a further drafter.
    "wrappers": {
        "tree": "foredraft.decoding.trees:tree",
        "confident": "foredraft.decoding.stopping:confident",
        "cascade": "foredraft.decoding.cascade:cascade",
        "adaptive": "foredraft.select.wrapper:adaptive",
        "mixture": "foredraft.ngram.hybrid:mixture",
        "first-guess": "foredraft.ngram.hybrid:first_guess",
    },
    # Model-free drafters built from token sequences: build(sequences, vocab_size, settings, manifest, out, progress)
    # -> DraftManifest.
    "builders": {
        "ngram": "foredraft.ngram.table:build_ngram_table",
        "ngram-law": "foredraft.ngram.law:build_ngram_law",
        "lookup-table": "foredraft.ngram.lookup_table:build_lookup_table",
        "suffix": "foredraft.ngram.suffix:build_suffix",
    },
    # What reads a draft checkpoint of each kind: load(path, dtype) -> Drafter.
    "loaders": {
        "causal-lm": "foredraft.models.causal_lm:load_causal_lm_drafter",
        "ngram": "foredraft.ngram.table:load_ngram_table",
        "ngram-law": "foredraft.ngram.law:load_ngram_law",
        "lookup-table": "foredraft.ngram.lookup_table:load_lookup_table",
        "suffix": "foredraft.ngram.suffix:load_suffix",
    },
    # What training makes small, as `name:option=value`: loss(law, draft_logprobs, **numbers) -> one value a position.
    "losses": {
        "forward_kl": "foredraft.distill.losses:forward_kl",
        "soft_cross_entropy": "foredraft.distill.losses:soft_cross_entropy",
        "reverse_kl": "foredraft.distill.losses:reverse_kl",
        "jsd": "foredraft.distill.losses:jsd",
        "hard_cross_entropy": "foredraft.distill.losses:hard_cross_entropy",
        "tvd": "foredraft.distill.losses:total_variation",
        "tvd_plus_plus": "foredraft.distill.losses:tvd_plus_plus",
        "lk_hybrid": "foredraft.distill.losses:lk_hybrid",
        "neg_log_acceptance": "foredraft.distill.losses:neg_log_acceptance",
    },
    # Which drafter, and how long, the next block gets: policy(**numbers) -> Policy.
    "policies": {
        "fixed": "foredraft.select.policies:Fixed",
        "thresholds": "foredraft.select.policies:Thresholds",
        "marginal": "foredraft.select.policies:Marginal",
        "ucb": "foredraft.select.policies:Ucb",
        "thompson": "foredraft.select.policies:Thompson",
        "hedge": "foredraft.select.policies:Hedge",
        "contextual": "foredraft.select.policies:Contextual",
        "score": "foredraft.select.policies:Score",
    },
    # What writes a draft for a runtime: export(source, target, k, out, **options).
    "exporters": {
        "transformers": "foredraft.export.transformers:export_transformers",
        "vllm": "foredraft.export.vllm:export_vllm",
        "sglang": "foredraft.export.sglang:export_sglang",
        "llama.cpp": "foredraft.export.llamacpp:export_llamacpp",
        "mlx-lm": "foredraft.export.mlx_lm:export_mlx_lm",
        "openvino": "foredraft.export.openvino:export_openvino",
        "onnxruntime-genai": "foredraft.export.onnxruntime_genai:export_onnxruntime_genai",
        "llamacpp-lookup": "foredraft.ngram.exports:export_llamacpp_lookup",
        "sglang-ngram": "foredraft.ngram.exports:export_sglang_ngram",
    },
}
_SINGULAR = {
    "drafters": "drafter",
    "wrappers": "way of drafting",
    "builders": "drafter kind",
    "loaders": "draft kind",
    "losses": "loss",
    "policies": "policy",
    "exporters": "runtime to export for",
}


def names(group: str) -> list[str]:
    """Return the known names of a group, sorted."""
    return sorted({*_BUILT_IN[group], *(entry.name for entry in entry_points(group=f"foredraft.{group}"))})


def resolve(group: str, name: str) -> Any:
    """Return the thing that `name` stands for.

    Raises:
        UnknownNameError: no such name; the message lists the known ones and the nearest.
    """
    if name in _BUILT_IN[group]:
        module, attribute = _BUILT_IN[group][name].split(":")
        return getattr(import_module(module), attribute)
    for entry in entry_points(group=f"foredraft.{group}"):
        if entry.name == name:
            return entry.load()
    raise UnknownNameError(unknown_name_message(_SINGULAR[group], name, names(group)))


def unknown_name_message(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence for an unknown name: the known ones, and the nearest if one is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {what} {name!r}. Known: {', '.join(known)}.{hint}"
