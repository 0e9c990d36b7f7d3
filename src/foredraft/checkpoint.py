"""A draft on disk: a folder with foredraft.json beside what its kind needs, written whole or not at all."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foredraft.core.digest import digest_of, file_digest
from foredraft.core.errors import CheckpointError
from foredraft.core.files import whole_folder, write_json
from foredraft.core.law import SamplingLaw

MANIFEST = "foredraft.json"
# Weights of a draft that holds factors. Other programs look for other names, and so take none of its matrices for new.
FACTORS = "factored.safetensors"
SCHEMA = 1
_VERSIONED = ("foredraft", "torch", "transformers", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class DraftManifest:
    """What foredraft.json says of a draft.

    Attributes:
        kind: Name in the catalog's group "loaders".
        vocab_size: Width of the draft's laws; equals the target's.
        target, target_fingerprint, tokenizer_fingerprint: What the draft was made for.
        steps: The resolved recipe steps that made it, first to last.
        parents: Digests of the drafts it was made from.
        law: The law it draws from when nothing else is asked.
        training_tokens: Answer positions seen in training, all ancestors included.
        curve: Its last training, one entry an optimizer step.
        options: What the kind's loader needs beyond the files.
        measured: Acceptance and cost by target law, once evaluated.
        versions: Packages that wrote it.
        files: SHA-256 of every other file, by relative path. Filled in when written.
    """

    kind: str
    vocab_size: int
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    steps: tuple[Mapping[str, Any], ...] = ()
    parents: tuple[str, ...] = ()
    law: SamplingLaw = SamplingLaw()
    training_tokens: int = 0
    curve: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Identity of the draft: its kind, options and the content of its files; not what was measured."""
        return digest_of({"kind": self.kind, "options": dict(self.options), "files": dict(self.files)})


def write_draft(path: Path, manifest: DraftManifest, fill: Callable[[Path], None]) -> DraftManifest:
    """Let `fill` write a draft's files into a new folder and add the manifest; return it complete.

    Raises:
        OutputError: the folder exists, or the disk is full; nothing is left behind.
    """
    with whole_folder(path) as partial:
        fill(partial)
        files = {
            str(file.relative_to(partial)): file_digest(file) for file in sorted(partial.rglob("*")) if file.is_file()
        }
        manifest = replace(manifest, files=files, versions=_versions())
        write_json(partial / MANIFEST, {"schema": SCHEMA, **asdict(manifest)})
    return manifest


def read_manifest(path: Path) -> DraftManifest:
    """Return the manifest of a draft folder.

    Raises:
        CheckpointError: no draft is there, or of a newer schema.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is no foredraft checkpoint: it has no {MANIFEST}.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        schema = data.pop("schema")
        if schema != SCHEMA:
            raise CheckpointError(f"{file} has schema {schema}; this version reads {SCHEMA}. Update foredraft.")
        data["law"] = SamplingLaw(**data["law"])
        data |= {name: tuple(data[name]) for name in ("steps", "parents", "curve")}
        return DraftManifest(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Make the draft again.") from error


def verify_draft(path: Path) -> DraftManifest:
    """Return the manifest after comparing every file with the digest it was written with.

    Raises:
        CheckpointError: names the first file that is missing, changed or extra.
    """
    manifest = read_manifest(path)
    for name, digest in manifest.files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path} lacks {name}: the draft is incomplete. Make it again.")
        if file_digest(path / name) != digest:
            raise CheckpointError(f"{path / name} was changed after the draft was written. Make it again.")
    return manifest


def record_measurement(path: Path, measured: Mapping[str, Any]) -> None:
    """Store measured acceptance and cost in a draft's manifest, unless they stand there already; its digest stays."""
    found = read_manifest(path)
    if found.measured == measured:
        return
    manifest = replace(found, measured=measured)
    write_json(path / MANIFEST, {"schema": SCHEMA, **asdict(manifest)})


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
