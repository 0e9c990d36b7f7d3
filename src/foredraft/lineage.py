"""What a draft was made from, and for whom: its manifest, as the steps go on."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

from foredraft.checkpoint import MANIFEST, DraftManifest
from foredraft.core.errors import CheckpointError
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Speaker
from foredraft.models.made_for import made_for_another, own_or_blank_manifest
from foredraft.settings import Settings

_log = logging.getLogger(__name__)


def manifest_for(source: Path, target: Speaker) -> DraftManifest:
    """Return the manifest of a draft, or a blank one for a plain transformers folder.

    Raises:
        ModelError: it is neither.
        VocabMismatchError: it was made for another vocabulary or tokenizer than the target's.
    """
    manifest = own_or_blank_manifest(source, target)
    if manifest.vocab_size != target.vocab_size:
        raise made_for_another(source, manifest, target)
    warn_of_changed_target(source, manifest, target)
    return manifest


def refuse_missing_files(source: Path, manifest: DraftManifest) -> None:
    """Raise a CheckpointError unless every file that the manifest names is there."""
    for name in manifest.files:
        if not (source / name).is_file():
            raise CheckpointError(
                f"{source} lacks {name}: the draft is only half there. Delete the folder and run the command that "
                "made it again."
            )


def warn_of_changed_target(source: Path, manifest: DraftManifest, target: Speaker) -> None:
    """Say so where the draft was made for other weights under the same vocabulary."""
    if manifest.target_fingerprint != target.fingerprint:
        _log.warning(
            "The target behind %s has changed: it was made for %s with %s, this is %s with %s (other weights, settings "
            "or precision). Its recorded figures are of the other target.",
            source, manifest.target, manifest.target_fingerprint[:8], target.name, target.fingerprint[:8],
        )  # fmt: skip


def extended(manifest: DraftManifest, verb: str, step: Settings) -> DraftManifest:
    """Return the manifest after one more step; what was measured or fitted before it is dropped."""
    done = {verb: step.model_dump(by_alias=True)}
    parents = (manifest.digest,) if manifest.files else ()
    manifest = replace(
        manifest, steps=(*manifest.steps, done), parents=(*manifest.parents, *parents), measured={}, curve=()
    )
    if verb in ("law", "head"):
        return manifest
    # A law that was fitted to other weights says nothing of the new ones.
    dropped = (
        {"own_laws", "law_fits", "adapted"} if verb == "distill" else {"own_laws", "law_fits", "adapted", "shared"}
    )
    options = {name: value for name, value in manifest.options.items() if name not in dropped}
    return replace(manifest, options=options, law=SamplingLaw())


def copy_files(source: Path, folder: Path) -> None:
    """Copy what is in a draft's folder but its manifest."""
    for file in source.iterdir():
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif file.name != MANIFEST:
            shutil.copyfile(file, folder / file.name)
