"""A draft and its target as ONNX Runtime GenAI takes them: one folder of both, through its own model builder.

The builder asks for another transformers than this package does: it is run by the interpreter of an environment of its
own.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foredraft.core.errors import CheckpointError, MissingExtraError, ModelError, UserError
from foredraft.core.files import refuse_existing, whole_folder, write_json
from foredraft.core.programs import environment_elsewhere, last_words
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import write_card, write_plain, write_target
from foredraft.export.lookup import lookup_match
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "0.18"
PYTHON_VARIABLE = "FOREDRAFT_ORT_PYTHON"
CONFIG = "genai_config.json"
TARGET, DRAFT = "target", "draft"
_MODEL = "model.onnx"
_WEIGHTS = ("fp32", "int4")
_MOST_DRAFT_TOKENS = 16


def export_onnxruntime_genai(source: Path, target: LocalTarget, k: int, out: Path, weights: str = "fp32") -> None:
    """Write genai_config.json over target/ and draft/, and in plain/ the transformers folder that the draft is made of.

    The head is whole, whatever rows the draft computes here. plain/ is what foredraft verify counts with. Of
    `prompt-lookup` there is a plan alone.

    Args:
        weights: fp32 or int4, of both models.

    Raises:
        MissingExtraError: the interpreter of its environment is not named.
        ModelError: the draft is rounded already, which the builder does not read.
        UserError: weights that are not written here for the CPU, or more draft tokens than the runtime takes.
        OutputError, VocabMismatchError: see folder.write_folder.
        CheckpointError: the builder failed; nothing is kept.
    """
    if weights not in _WEIGHTS:
        raise UserError(f"onnxruntime-genai: weights are {' or '.join(_WEIGHTS)}, not {weights!r}.")
    if k > _MOST_DRAFT_TOKENS:
        raise UserError(f"ONNX Runtime GenAI takes at most {_MOST_DRAFT_TOKENS} draft tokens, not {k}.")
    refuse_existing(out)
    if match := lookup_match(source):
        lookup = {"ngram_size": match + 1, "max_draft_tokens": k}
        RuntimePlan("onnxruntime-genai", VERSION, k, _LOOKUP_COMMAND, lookup).write_alone(out, target.name)
        return
    builder_python()
    fitted = fitted_draft(source, target)
    if fitted.draft.is_quantized:
        raise ModelError("The draft is rounded already: export its plain parent, with weights int4.")
    settings = {"max_draft_tokens": k}
    plan = RuntimePlan("onnxruntime-genai", VERSION, k, _COMMAND, settings, stored_weights=weights)
    with whole_folder(out) as folder:
        plain = write_plain(folder, fitted, target)
        build(plain, folder / DRAFT, weights)
        with TemporaryDirectory(prefix="foredraft-target-") as passing:
            build(write_target(target, Path(passing) / "target"), folder / TARGET, weights)
        compose(folder, k)
        write_card(folder, fitted, target, plan, _use(weights), {"draft": DRAFT})


_LOOKUP_COMMAND = "params.set_speculative_options(**SETTINGS)"
_COMMAND = "onnxruntime_genai.Generator(Model(FOLDER), params).generate_next_token()"


def builder_python() -> str:
    """Return the interpreter that has the model builder.

    Raises:
        MissingExtraError: it is not named, or not there; names the command that makes it.
    """
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not Path(python).is_file():
        raise MissingExtraError(
            "Models for ONNX Runtime GenAI are written by its builder, in an environment of its own: tools/runtimes.sh "
            f"ort DIR, and {PYTHON_VARIABLE}=DIR/bin/python."
        )
    return python


def compose(folder: Path, k: int) -> None:
    """Write the configuration of both models over folder/target and folder/draft, and the tokenizer beside it.

    The draft's decoder becomes model.draft. File names go down from the folder: the runtime refuses `..` in them.
    """
    config, draft = (_config(folder / name) for name in (TARGET, DRAFT))
    config["model"]["decoder"]["filename"] = f"{TARGET}/{_MODEL}"
    config["model"]["draft"] = draft["model"]["decoder"] | {"filename": f"{DRAFT}/{_MODEL}"}
    config["speculative"] = {"max_draft_tokens": k}
    for file in (folder / TARGET).iterdir():
        if not file.name.startswith(_MODEL):
            shutil.copyfile(file, folder / file.name)
    write_json(folder / CONFIG, config)


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return found


def build(source: Path, out: Path, weights: str) -> None:
    """Write a transformers folder as the builder does, into a new folder.

    Raises:
        MissingExtraError: see builder_python.
        CheckpointError: the builder failed, with its last words.
    """
    with TemporaryDirectory(prefix="foredraft-builder-") as cache:
        command = [builder_python(), "-m", "onnxruntime_genai.models.builder", "-m", str(source.resolve())]
        command += ["-o", str(out), "-p", weights, "-e", "cpu", "-c", cache]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_elsewhere())
    if done.returncode or not (out / _MODEL).is_file():
        raise CheckpointError(f"The builder of ONNX Runtime GenAI failed: {last_words(done)}. Nothing was kept.")


def _use(weights: str) -> Use:
    return Use(
        "ONNX Runtime GenAI",
        (
            "```python",
            "import onnxruntime_genai as og",
            'model = og.Model("path/to/this/folder")',
            "generator = og.Generator(model, og.GeneratorParams(model))",
            "generator.append_tokens(token_ids)",
            "while not generator.is_done():",
            "    generator.generate_next_token()",
            "generator.get_speculative_stats()",
            "```",
            "",
            f"Written for ONNX Runtime GenAI {VERSION}, both models in {weights}. One request at a time. Its "
            "`acceptance_rate` is accepted / examined.",
        ),
        own_laws="ONNX Runtime GenAI draws from a draft with the target's settings.",
    )
