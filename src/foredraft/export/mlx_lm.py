"""A draft as MLX-LM takes it: an ordinary transformers folder."""

from pathlib import Path

from foredraft.checkpoint import DraftManifest
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import plain_settings, write_folder
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "0.32"


def export_mlx_lm(source: Path, target: LocalTarget, k: int, out: Path) -> DraftManifest:
    """Write a folder for `mlx_lm.generate --draft-model`; see export_transformers for the errors."""
    fitted = fitted_draft(source, target)
    settings = {"--draft-model": "path/to/this/folder", "--num-draft-tokens": k}
    options = " ".join(f"{name} {value}" for name, value in settings.items())
    command = f"mlx_lm.generate --model TARGET {options} --prompt ..."
    lines = ("```", command.replace("TARGET", target.name), "```", "", f"Written for MLX-LM {VERSION}.")
    use = Use("MLX-LM", lines, own_laws="MLX-LM draws from a draft with the target's sampler.")
    plan = RuntimePlan("mlx-lm", VERSION, k, command, settings)
    return write_folder(fitted, target, plan, use, plain_settings(target), out)
