"""The forms in which runtimes read models: what of an export is loaded, and how a target is written in that form."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from foredraft.core.errors import ModelError
from foredraft.core.files import whole_file, whole_folder
from foredraft.export.folder import PLAIN, write_target
from foredraft.export.gguf_file import write_gguf
from foredraft.export.gguf_vocabulary import vocabulary_fields
from foredraft.export.llamacpp import FILE as GGUF_FILE
from foredraft.export.onnxruntime_genai import CONFIG as ONNX_CONFIG
from foredraft.export.onnxruntime_genai import TARGET as ONNX_TARGET
from foredraft.export.onnxruntime_genai import build as build_onnx
from foredraft.export.openvino import MODEL as OPENVINO_MODEL
from foredraft.export.openvino import convert
from foredraft.export.plan import PLAN
from foredraft.models.facts import read_side
from foredraft.models.target import LocalTarget

_EXACT = ("float32", "fp32")
_EXPORT = "foredraft export DRAFT --target TARGET --out FOLDER --runtime"


@dataclass(frozen=True, slots=True)
class Served:
    """A draft as a runtime loads it.

    Attributes:
        place: Folder or file that the runtime is given; empty for lookup.
        weights: Folder or file of the same draft that foredraft counts with.
        is_exact: Whether the two compute with the very same weights, in float32.
        target: Folder of the target inside an export that holds both; None for others.
    """

    place: str = ""
    weights: str = ""
    is_exact: bool = True
    target: Path | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of runtimes stores models.

    Attributes:
        served: Finds what the runtime loads in an exported draft; ModelError says how to export one.
        write: Returns a target in float32 in this form: written to a path that does not exist yet, unless it has the
            form already.
        suffix: Of the name that a written target has.
    """

    served: Callable[[str], Served]
    write: Callable[[LocalTarget, Path], Path]
    suffix: str = ""


def _folder(draft: str) -> Served:
    if not (Path(draft) / "config.json").is_file() or (Path(draft) / OPENVINO_MODEL).is_file():
        raise ModelError(f"{draft} is no transformers folder: export the draft for this runtime first.")
    return Served(draft, draft, not read_side(draft).facts.quantization)


def _gguf(draft: str) -> Served:
    path = Path(draft)
    file = path if path.suffix == ".gguf" else path / GGUF_FILE
    if not file.is_file():
        raise ModelError(f"{draft} holds no {GGUF_FILE}: write one with {_EXPORT} llama.cpp:type=f32.")
    facts = read_side(str(file)).facts
    return Served(str(file), str(file), facts.dtype in _EXACT and not facts.quantization)


def _openvino(draft: str) -> Served:
    plain = _plain_beside(draft, OPENVINO_MODEL, "openvino:weights=fp32")
    return Served(draft, str(plain), _stored_weights(draft) in _EXACT)


def _onnx(draft: str) -> Served:
    plain = _plain_beside(draft, ONNX_CONFIG, "onnxruntime-genai")
    return Served(draft, str(plain), _stored_weights(draft) in _EXACT, Path(draft) / ONNX_TARGET)


def _plain_beside(draft: str, file: str, runtime: str) -> Path:
    plain = Path(draft) / PLAIN
    if not ((Path(draft) / file).is_file() and plain.is_dir()):
        raise ModelError(f"{draft} holds no {file} beside {PLAIN}/: write them with {_EXPORT} {runtime}.")
    return plain


def _stored_weights(draft: str) -> str:
    """Return what the plan beside an export says of its weights; empty where it says nothing."""
    try:
        return str(json.loads((Path(draft) / PLAN).read_text(encoding="utf-8"))["stored_weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_gguf(target: LocalTarget, path: Path) -> Path:
    with whole_file(path) as partial:
        write_gguf(target.model, partial, vocabulary_fields(target), target.name, default="f32")
    return path


def _write_openvino(target: LocalTarget, path: Path) -> Path:
    with TemporaryDirectory(prefix="foredraft-target-") as passing, whole_folder(path) as folder:
        convert(write_target(target, Path(passing) / "target"), folder, "fp32")
    return path


def _write_onnx(target: LocalTarget, path: Path) -> Path:
    with TemporaryDirectory(prefix="foredraft-target-") as passing, whole_folder(path) as folder:
        build_onnx(write_target(target, Path(passing) / "target"), folder, "fp32")
    return path


FORMS: Mapping[str, Form] = {
    "folder": Form(_folder, write_target),
    "gguf": Form(_gguf, _write_gguf, ".gguf"),
    "openvino": Form(_openvino, _write_openvino, "-openvino"),
    "onnx": Form(_onnx, _write_onnx, "-onnx"),
}


@contextmanager
def target_in(form: str, target: LocalTarget, served: Served, keep: Path | None) -> Iterator[Path]:
    """Yield the target in a form, in float32; what must be written goes to `keep`, or away behind the block."""
    if served.target is not None:
        yield served.target
        return
    with TemporaryDirectory(prefix="foredraft-verify-") as passing:
        path = (keep or Path(passing)) / f"target-{target.fingerprint}{FORMS[form].suffix}"
        yield path if path.exists() else FORMS[form].write(target, path)
