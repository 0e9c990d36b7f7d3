"""A draft as transformers takes it: a folder for assistant_model, with the tuned draft length inside."""

from importlib.metadata import version
from pathlib import Path

from transformers import GenerationConfig

from foredraft.checkpoint import DraftManifest
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import plain_settings, write_folder
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget


def export_transformers(source: Path, target: LocalTarget, k: int, out: Path) -> DraftManifest:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; return its manifest.

    generation_config.json asks for k draft tokens at every call; see folder.write_folder for the rest.

    Args:
        source: A draft folder, or that of an ordinary transformers model.
        target: The target it drafts for.
        k: Draft tokens at every target call, >= 1.
        out: A folder that does not exist yet, or is empty.

    Raises:
        ModelError: the draft is no causal language model.
        VocabMismatchError: it does not speak the target's tokens.
        OutputError, CheckpointError: see folder.write_folder.
    """
    fitted = fitted_draft(source, target)
    settings = assistant_plan(target, k)
    command = "target.generate(**inputs, assistant_model=draft)"
    plan = RuntimePlan("transformers", version("transformers"), k, command, _tuned(settings))
    return write_folder(fitted, target, plan, _use(k), settings, out)


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
    settings = plain_settings(target)
    settings.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return settings


def _tuned(settings: GenerationConfig) -> dict[str, object]:
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    return {name: getattr(settings, name) for name in names}


def _use(k: int) -> Use:
    return Use(
        "transformers",
        (
            "```python",
            "from transformers import AutoModelForCausalLM",
            'draft = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
            "target.generate(**inputs, assistant_model=draft)",
            "```",
            "",
            f"Made with transformers {version('transformers')}. `generation_config.json` asks for {k} draft tokens at "
            "every call of the target; the tokenizer is the target's.",
        ),
        own_laws="transformers lets a draft draw with the target's temperature and top-k, whatever its "
        "generation_config.json says, so that acceptance there is that of the target's law.",
    )
