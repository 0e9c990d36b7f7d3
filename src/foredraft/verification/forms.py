"""The forms in which runtimes read models: what of an export is loaded, and how a target is written in that form."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from foredraft.core.errors import ModelError
from foredraft.core.files import whole_file, whole_folder
from foredraft.export.folder import write_tokenizer
from foredraft.export.gguf_file import write_gguf
from foredraft.export.gguf_vocabulary import vocabulary_fields
from foredraft.export.llamacpp import FILE as GGUF_FILE
from foredraft.export.openvino import MODEL as OPENVINO_MODEL
from foredraft.export.openvino import PLAIN, convert
from foredraft.export.plan import PLAN
from foredraft.models.facts import read_side
from foredraft.models.loading import without_bars
from foredraft.models.target import LocalTarget

_EXACT = ("float32", "fp32")


@dataclass(frozen=True, slots=True)
class Served:
    """A draft as a runtime loads it.

    Attributes:
        place: Folder or file that the runtime is given; empty for lookup.
        weights: Folder or file of the same draft that foredraft counts with.
        is_exact: Whether the two compute with the very same weights, in float32.
    """

    place: str = ""
    weights: str = ""
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of runtimes stores models.

    Attributes:
        served: Finds what the runtime loads in an exported draft; ModelError says how to export one.
        write: Writes a target to a path that does not exist yet, in float32.
        suffix: Of the name that a written target has.
    """

    served: Callable[[str], Served]
    write: Callable[[LocalTarget, Path], None]
    suffix: str = ""


def _folder(draft: str) -> Served:
    if not (Path(draft) / "config.json").is_file() or (Path(draft) / OPENVINO_MODEL).is_file():
        raise ModelError(f"{draft} is no transformers folder: export the draft for this runtime first.")
    return Served(draft, draft, not read_side(draft).facts.quantization)


def _gguf(draft: str) -> Served:
    path = Path(draft)
    file = path if path.suffix == ".gguf" else path / GGUF_FILE
    if not file.is_file():
        raise ModelError(
            f"{draft} holds no {GGUF_FILE}: write one with foredraft export DRAFT --target TARGET --runtime "
            "llama.cpp:type=f32 --out FOLDER."
        )
    facts = read_side(str(file)).facts
    return Served(str(file), str(file), facts.dtype in _EXACT and not facts.quantization)


def _openvino(draft: str) -> Served:
    plain = Path(draft) / PLAIN
    if not ((Path(draft) / OPENVINO_MODEL).is_file() and plain.is_dir()):
        raise ModelError(
            f"{draft} holds no {OPENVINO_MODEL} beside {PLAIN}/: write them with foredraft export DRAFT --target "
            "TARGET --runtime openvino:weights=fp32 --out FOLDER."
        )
    return Served(draft, str(plain), _stored_weights(Path(draft)) in _EXACT)


def _stored_weights(folder: Path) -> str:
    """Return what the plan beside an export says of its weights; empty where it says nothing."""
    try:
        return str(json.loads((folder / PLAN).read_text(encoding="utf-8"))["stored_weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_folder(target: LocalTarget, path: Path) -> None:
    with whole_folder(path) as folder, without_bars():
        target.model.save_pretrained(folder)
        write_tokenizer(folder, target)


def _write_gguf(target: LocalTarget, path: Path) -> None:
    with whole_file(path) as partial:
        write_gguf(target.model, partial, vocabulary_fields(target), target.name, default="f32")


def _write_openvino(target: LocalTarget, path: Path) -> None:
    with plain_target(target) as source, whole_folder(path) as folder:
        convert(source, folder, "fp32")


FORMS: Mapping[str, Form] = {
    "folder": Form(_folder, _write_folder),
    "gguf": Form(_gguf, _write_gguf, ".gguf"),
    "openvino": Form(_openvino, _write_openvino, "-openvino"),
}


@contextmanager
def plain_target(target: LocalTarget) -> Iterator[Path]:
    """Yield a transformers folder of the target: its own, or one that is gone behind the block."""
    if target.path.is_dir() and target.path != Path():
        yield target.path
        return
    with TemporaryDirectory(prefix="foredraft-target-") as passing:
        _write_folder(target, Path(passing) / "target")
        yield Path(passing) / "target"


@contextmanager
def target_in(form: str, target: LocalTarget, keep: Path | None) -> Iterator[Path]:
    """Yield the target in a form, in float32; what must be written goes to `keep`, or away behind the block."""
    if form == "folder" and target.path.is_dir() and target.path != Path():
        yield target.path
        return
    with TemporaryDirectory(prefix="foredraft-verify-") as passing:
        path = (keep or Path(passing)) / f"target-{target.fingerprint}{FORMS[form].suffix}"
        if not path.exists():
            FORMS[form].write(target, path)
        yield path
