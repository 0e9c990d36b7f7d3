"""A draft as OpenVINO takes it, through optimum: its own exporter, in an environment of its own.

optimum-intel asks for another transformers than this package does, so that the two do not share an environment: its
optimum-cli is run as a program.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from foredraft.core.errors import CheckpointError, MissingExtraError, ModelError, UserError
from foredraft.core.files import refuse_existing, whole_folder
from foredraft.core.programs import environment_elsewhere, last_words
from foredraft.export.card import Use
from foredraft.export.fit import fitted_draft
from foredraft.export.folder import write_card, write_plain
from foredraft.export.lookup import lookup_match
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

VERSION = "2026.4"
OPTIMUM_VARIABLE = "FOREDRAFT_OPTIMUM_CLI"
MODEL = "openvino_model.xml"
_WEIGHTS = ("fp32", "fp16", "int8", "int4")
_EXACT: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_LOOKUP_COMMAND = 'LLMPipeline(TARGET, "CPU", prompt_lookup=True)'
_COMMAND = 'LLMPipeline(TARGET, "CPU", draft_model=draft_model(FOLDER, "CPU"))'


def export_openvino(
    source: Path, target: LocalTarget, k: int, out: Path, weights: str = "fp16", group: int = 0
) -> None:
    """Write the folder that openvino_genai.draft_model reads, and in plain/ the transformers folder it is made from.

    The head is whole, whatever rows the draft computes here. plain/ is what foredraft verify counts with; OpenVINO does
    not read it. Of `prompt-lookup` there is a plan alone.

    Args:
        weights: fp32, fp16, int8 or int4.
        group: Inputs that share a scale in 4 bits; 0 leaves it to optimum.

    Raises:
        MissingExtraError: there is no optimum-cli.
        ModelError: the draft is rounded already, which optimum does not read.
        UserError: weights that optimum does not write.
        OutputError, VocabMismatchError: see folder.write_folder.
        CheckpointError: optimum failed; nothing is kept.
    """
    if weights not in _WEIGHTS:
        raise UserError(f"openvino: weights are {', '.join(_WEIGHTS)}, not {weights!r}.")
    refuse_existing(out)
    if match := lookup_match(source):
        settings = {"prompt_lookup": True, "max_ngram_size": match, "num_assistant_tokens": k} | _EXACT
        RuntimePlan("openvino", VERSION, k, _LOOKUP_COMMAND, settings).write_alone(out, target.name)
        return
    optimum()
    fitted = fitted_draft(source, target)
    if fitted.draft.is_quantized:
        raise ModelError("The draft is rounded already: export its plain parent, with weights int8 or int4.")
    settings = {"num_assistant_tokens": k} | _EXACT
    plan = RuntimePlan("openvino", VERSION, k, _COMMAND, settings, stored_weights=weights)
    with whole_folder(out) as folder:
        plain = write_plain(folder, fitted, target)
        convert(plain, folder, weights, group)
        write_card(folder, fitted, target, plan, _use(k, weights), {"draft": "."})


def optimum() -> str:
    """Return the optimum-cli that is named or in PATH.

    Raises:
        MissingExtraError: there is none; names the command that installs it.
    """
    program = shutil.which(os.environ.get(OPTIMUM_VARIABLE, "optimum-cli"))
    if not program:
        raise MissingExtraError(
            "OpenVINO models are written by optimum-cli, which is not in PATH. It needs an environment of its own: "
            f"tools/runtimes.sh openvino DIR, and {OPTIMUM_VARIABLE}=DIR/bin/optimum-cli."
        )
    return program


def convert(source: Path, folder: Path, weights: str, group: int = 0) -> None:
    """Write a transformers folder as OpenVINO's into a folder that exists.

    Raises:
        MissingExtraError: there is no optimum-cli.
        CheckpointError: it failed, with its last words.
    """
    program = optimum()
    command = [program, "export", "openvino", "--model", str(source.resolve())]
    command += ["--task", "text-generation-with-past", "--weight-format", weights]
    command += ["--group-size", str(group)] if group else []
    done = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, check=False, env=environment_elsewhere()
    )
    if done.returncode or not (folder / MODEL).is_file():
        raise CheckpointError(f"{program} failed: {last_words(done)}. Nothing was kept.")


def _use(k: int, weights: str) -> Use:
    return Use(
        "OpenVINO GenAI",
        (
            "```python",
            "from openvino_genai import GenerationConfig, LLMPipeline, draft_model",
            'pipe = LLMPipeline("TARGET", "CPU", draft_model=draft_model("path/to/this/folder", "CPU"))',
            f'pipe.generate("...", GenerationConfig(max_new_tokens=100, num_assistant_tokens={k}))',
            "```",
            "",
            f"Written for OpenVINO GenAI {VERSION}, weights in {weights}. TARGET is the target as `optimum-cli export "
            "openvino` writes it. On the CPU it computes in bfloat16 unless INFERENCE_PRECISION_HINT=f32, and text may "
            "then differ from plain decoding at near ties.",
        ),
        own_laws="OpenVINO GenAI draws from a draft with the target's settings.",
    )
