"""Drafts in the real runtimes: transformers in a process of its own; the others where installed.

    tools/runtimes.sh llama DIR
    FOREDRAFT_XLLAMA_PYTHON=DIR/bin/python python -m pytest -m server -n 1 tests/test_verification_runtimes.py

The models are tiny: what is shown is that each runtime loads what is written and counts what foredraft counts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.core.errors import ServerError
from foredraft.export.openvino import OPTIMUM_VARIABLE
from foredraft.models.target import LocalTarget, load_target
from foredraft.trace.prompts import Prompt
from foredraft.verbs import export_draft
from foredraft.verification.runtimes import RUNTIMES
from foredraft.verification.verify import VerifySettings, verify
from tests.servers import python_of
from tests.test_export_gguf import save_named
from tests.tiny import SPECIAL

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]
TEXTS = ["a sea of oaks", "red owl", "0123", "the fog and the ink"]
# Parts of the circle that the circling target runs in, with other ends: the earliest match is not the latest.
CIRCLES = ["P\\{ a P\\ b", "QmS Xm Qm", "/Q [/ B", "XBP\\{X"]


def asked(texts: list[str]) -> list[Prompt]:
    return [Prompt(f"p{i}", "none", ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


PROMPTS = asked(TEXTS)
SETTINGS = VerifySettings(max_new_tokens=24)
# Without padding rows: foredraft never emits them, and random weights let runtimes do so.
SIZES = {"hidden": 128, "vocab_size": 260}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    folder = save_named(tmp_path_factory.mktemp("models") / "tiny-named", **SIZES)
    return load_target(str(folder), "float32")


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    """Its next token depends on the last one alone, so that its answers soon go round in circles; it never ends."""
    folder = save_named(tmp_path_factory.mktemp("models") / "circling", **SIZES, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    return load_target(str(folder), "float32")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps the target in each runtime's form."""
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def noisy(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise: some of its guesses are accepted."""
    folder = save_named(tmp_path_factory.mktemp("drafts") / "noisy", **SIZES)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(folder)
    return folder


def export_for(runtime: str, draft: Path, target: LocalTarget, out: Path, kind: str = "f32") -> str:
    options = {"llama.cpp": f":type={kind}", "openvino": ":weights=fp32"}
    export_draft(draft, target, runtime + options.get(runtime, ""), 4, out)
    return str(out)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_runtime_counts_by_position_what_foredraft_counts(
    runtime: str, noisy: Path, target: LocalTarget, tmp_path: Path
) -> None:
    if RUNTIMES[runtime].variable:
        python_of(RUNTIMES[runtime].variable)
    if runtime == "openvino":
        python_of(OPTIMUM_VARIABLE)
    served = export_for(runtime, noisy, target, tmp_path / "served")
    found = verify(served, target, runtime, PROMPTS, SETTINGS)
    print(runtime, found.version, found.counted, found.expected, found.same_text)
    assert found.faults == []
    assert (found.same_counts, found.same_text) == (len(PROMPTS), len(PROMPTS))
    assert 0 < found.counted.accepted < (found.expected.drafted or 0)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_llamacpp_loads_rounded_files_and_counts_within_the_interval(
    kind: str, noisy: Path, target: LocalTarget, tmp_path: Path
) -> None:
    python_of(RUNTIMES["llama.cpp"].variable)
    served = export_for("llama.cpp", noisy, target, tmp_path / "served", kind)
    found = verify(served, target, "llama.cpp", PROMPTS, SETTINGS)
    print(kind, found.counted, found.expected, found.interval)
    assert not found.exact
    assert found.faults == []


@pytest.mark.parametrize("max_match", [1, 3])
@pytest.mark.parametrize("runtime", [name for name, runtime in RUNTIMES.items() if runtime.lookup])
def test_the_runtimes_own_lookup_matches_as_foredraft_says(
    runtime: str, max_match: int, circling: LocalTarget, targets: Path
) -> None:
    if RUNTIMES[runtime].variable:
        python_of(RUNTIMES[runtime].variable)
    if runtime == "openvino":
        python_of(OPTIMUM_VARIABLE)
    settings = replace(SETTINGS, k=4, max_new_tokens=48, keep=targets)
    found = verify(f"prompt-lookup:max_match={max_match}", circling, runtime, asked(CIRCLES), settings)
    print(runtime, max_match, found.version, found.counted, found.expected)
    assert found.faults == []
    assert (found.same_counts, found.same_text) == (len(PROMPTS), len(PROMPTS))
    assert 0 < found.counted.accepted < (found.expected.drafted or 0)


def test_a_file_that_llamacpp_cannot_load_ends_with_its_log(noisy: Path, target: LocalTarget, tmp_path: Path) -> None:
    python_of(RUNTIMES["llama.cpp"].variable)
    served = export_for("llama.cpp", noisy, target, tmp_path / "served")
    (tmp_path / f"target-{target.fingerprint}.gguf").write_bytes(b"GGUF, and no more")
    with pytest.raises(ServerError, match="in_llamacpp .*Its log ends with"):
        verify(served, target, "llama.cpp", PROMPTS[:1], replace(SETTINGS, keep=tmp_path))
