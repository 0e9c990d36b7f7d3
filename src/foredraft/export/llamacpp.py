"""A draft as llama.cpp takes it: one GGUF file (draft-simple)."""

from pathlib import Path

from foredraft.core.files import whole_folder
from foredraft.export.card import Use, inherited_licence, model_card
from foredraft.export.fit import fitted_draft
from foredraft.export.gguf_file import write_gguf
from foredraft.export.gguf_tensors import check_type
from foredraft.export.gguf_vocabulary import vocabulary_fields
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "b11434"
FILE = "draft.gguf"


def export_llamacpp(source: Path, target: LocalTarget, k: int, out: Path, type: str = "f16") -> None:
    """Write draft.gguf with the target's tokenizer, a model card and the plan.

    Args:
        type: Of the matrices: f32, f16, bf16, q8_0 and others of gguf_tensors.TYPES.

    Raises:
        UserError: a type that is not written here.
        ModelError: an architecture or a tokenizer that is not written as GGUF; the message says what is instead.
        VocabMismatchError: the draft does not speak the target's tokens.
        OutputError: the folder exists, or the disk is full; nothing is left behind.
        CheckpointError: the file does not hold what was in memory; nothing is left behind.
    """
    check_type(type)
    fitted = fitted_draft(source, target, "float32")
    vocabulary = vocabulary_fields(target)
    settings = {"--spec-type": "draft-simple", "--spec-draft-n-max": k, "--spec-draft-p-min": 0.0}
    command = f"llama-server -m TARGET.gguf -md {FILE} " + " ".join(
        f"{name} {value}" for name, value in settings.items()
    )
    plan = RuntimePlan("llama.cpp", VERSION, k, command, settings)
    with whole_folder(out) as folder:
        name = f"Draft for {target.name}"
        stored = write_gguf(fitted.model, folder / FILE, vocabulary, name, inherited_licence(target.path), default=type)
        kept = sum(kind not in (type, "f32") for kind in stored.values())
        fallen = f"{kept} matrices have rows that are no multiple of 32 long and are kept in f16." if kept else ""
        changes = (*fitted.changes, *filter(None, [fallen]))
        card = model_card(fitted.manifest, target, _use(command, type), k, fitted.head_rows, changes)
        (folder / "README.md").write_text(card, encoding="utf-8")
        measured = {} if fitted.head_rows else fitted.manifest.measured
        plan.write(folder, target.name, measured, changes, {"draft": FILE, "card": "README.md"})


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
