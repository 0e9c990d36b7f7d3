"""The model card of an exported draft."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from huggingface_hub import ModelCard, ModelCardData

from foredraft.acceptance.wording import number, times
from foredraft.checkpoint import DraftManifest
from foredraft.core.own_law import TARGETS_LAWS, OwnLaws
from foredraft.export.plan import slowdown_sentence
from foredraft.models.target import LocalTarget


@dataclass(frozen=True, slots=True)
class Use:
    """How a runtime takes a draft, for its card.

    Attributes:
        runtime: A key of core.runtimes.RUNTIMES; the card calls it so.
        lines: Markdown: the exact command, and for which version it was written.
        own_laws: Which law the runtime lets a draft draw from.
    """

    runtime: str
    lines: tuple[str, ...]
    own_laws: str


def model_card(
    manifest: DraftManifest,
    target: LocalTarget,
    use: Use,
    k: int,
    head_rows: int,
    changes: tuple[str, ...] = (),
) -> str:
    """Return README.md of a draft: what it is for, how to use it, how it was made, what was measured, whose licence.

    Args:
        manifest: Of the draft before it was exported.
        target: What it drafts for.
        k: Draft tokens at every target call.
        head_rows: Rows of the head that the draft computed when it was measured; 0 for all.
        changes: What was changed in it for the runtime.
    """
    licence = inherited_licence(target.path)
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", target.name) is not None
    data = ModelCardData(
        base_model=target.name if is_hub_id else None,
        library_name="transformers",
        license=licence or None,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "foredraft"],
    )
    return "\n".join(
        [
            "---",
            data.to_yaml(),
            "---",
            "",
            f"# Draft model for {target.name}",
            "",
            f"This model guesses a few tokens ahead for {target.name}, which checks them (speculative decoding). The "
            "text is the target's own, only sooner; alone this model is of little use.",
            "",
            "## Use",
            "",
            *use.lines,
            "",
            "## How it was made",
            "",
            *_steps(manifest),
            *_changes(changes),
            "",
            "## Measured",
            "",
            *_measured(manifest.measured, k, head_rows, use),
            *_own_law(manifest, use),
            "",
            "## Licence",
            "",
            f"That of {target.name}" + (f": {licence}." if licence else ", which its own page states."),
            "",
        ]
    )


def inherited_licence(path: Path) -> str:
    """Return the licence that a model folder's README.md or a GGUF file states, such as `apache-2.0`; empty if none."""
    if path.suffix == ".gguf":
        field = GGUFReader(path).fields.get("general.license")
        return str(field.contents()) if field else ""
    readme = path / "README.md"
    if path == Path() or not readme.is_file():
        return ""
    return str(ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict().get("license") or "")


def _steps(manifest: DraftManifest) -> Iterator[str]:
    if not manifest.steps:
        yield "Not by foredraft."
    for place, step in enumerate(manifest.steps, 1):
        ((verb, settings),) = step.items()
        yield f"{place}. {verb}: `{json.dumps(settings)}`"
    if manifest.training_tokens:
        yield ""
        yield f"Trained on {manifest.training_tokens:,} tokens that the target wrote itself, repeats included."


def _changes(changes: tuple[str, ...]) -> Iterator[str]:
    if changes:
        yield ""
        yield "For this runtime: " + " ".join(changes)


def _own_law(manifest: DraftManifest, use: Use) -> Iterator[str]:
    laws = OwnLaws.from_json(manifest.options.get("own_laws", {}))
    if laws == TARGETS_LAWS:
        return
    yield ""
    yield (
        f"Measured drawing its guesses from a law of its own ({laws}). {use.own_laws} The text is the target's own "
        "either way."
    )


def _measured(measured: Mapping[str, Any], k: int, head_rows: int, use: Use) -> Iterator[str]:
    if not measured:
        yield "Nothing yet."
        return
    yield f"On text that the target wrote, with {k} draft tokens at every call:"
    yield ""
    yield "| sampling | expected acceptance | tokens per target call | predicted speedup | prompts |"
    yield "|---|---|---|---|---|"
    for label, entry in measured.items():
        tokens, speedup = (entry[name].get(str(k), math.nan) for name in ("mean_tokens_per_call", "predicted_speedup"))
        yield (
            f"| {label} | {number(entry['expected_acceptance'], 3)} | {number(tokens)} | {times(speedup)} | "
            f"{entry['prompts']} |"
        )
    if sentence := slowdown_sentence(measured, k):
        yield ""
        yield sentence
    if head_rows:
        yield ""
        yield (
            f"Measured in foredraft, which computes only {head_rows} rows of the head; {use.runtime} computes all of "
            "them, so that a guess costs more here."
        )
