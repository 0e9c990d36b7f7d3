"""A draft as SGLang takes it (STANDALONE): a folder, and the tokens of a trimmed head in a file of their own."""

from pathlib import Path

from foredraft.checkpoint import DraftManifest
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import TOKEN_MAP, plain_settings, write_folder
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "0.5.23"


def export_sglang(source: Path, target: LocalTarget, k: int, out: Path) -> DraftManifest:
    """Write a folder for --speculative-draft-model-path, its settings in foredraft-plan.json.

    A trimmed head is written whole, and the target's tokens that it kept lie in token_map.pt, in the form of
    --speculative-token-map. By its source SGLang cuts the head of EAGLE drafts by such a map; the command for a
    standalone draft does not name it. Nothing here has run SGLang.

    Raises:
        ModelError, VocabMismatchError, OutputError, CheckpointError: see export_transformers.
    """
    fitted = fitted_draft(source, target)
    settings = {
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "path/to/this/folder",
        "--speculative-num-steps": k,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": k + 1,
        "--speculative-draft-model-quantization": "unquant",
    }
    if fitted.draft.is_quantized:
        del settings["--speculative-draft-model-quantization"]
    command = "python -m sglang.launch_server --model-path TARGET " + " ".join(
        f"{name} {value}" for name, value in settings.items()
    )
    lines = ["```", command.replace("TARGET", target.name), "```", ""]
    lines.append(f"Written for SGLang {VERSION} by its source; not run there.")
    if fitted.head_rows:
        lines.append(
            f"`{TOKEN_MAP}` lists the {fitted.head_rows:,} tokens that the draft was trained to guess, for "
            "`--speculative-token-map`, which SGLang applies to EAGLE drafts."
        )
    use = Use("SGLang", tuple(lines), own_laws="SGLang drafts the likeliest tokens.")
    plan = RuntimePlan("sglang", VERSION, k, command, settings)
    return write_folder(fitted, target, plan, use, plain_settings(target), out, with_token_map=True)
