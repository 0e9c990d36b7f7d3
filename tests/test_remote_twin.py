"""A server that writes for a target whose weights are here: the same words under its own name, or a refusal."""

from pathlib import Path

import pytest
import torch

from foredraft import collecting
from foredraft.core.errors import ModelError, VocabMismatchError
from foredraft.core.law import GREEDY
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Target
from foredraft.models.loading import LoadedModel
from foredraft.models.remote.twin import ServedTwin
from foredraft.models.target import LocalTarget
from foredraft.settings import TraceSettings
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, require_same
from foredraft.workspace import Workspace
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [Prompt(f"p{index}", "d", ({"role": "user", "content": "ab" * (1 + index)},)) for index in range(3)]


def target(name: str, seed: int = 0, tokenizer: str = "tokenizer") -> LocalTarget:
    return LocalTarget(LoadedModel(tiny_model(seed=seed), tiny_tokenizer(), name, f"weights-{name}", tokenizer))


def test_a_served_trace_bears_the_local_targets_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, server = target("local"), target("served")
    asked = []
    monkeypatch.setattr(collecting, "connect", lambda url, *_: asked.append(url) or server)
    settings = TraceSettings.model_validate(
        {"prompts": [{"file": "-"}], "max_new_tokens": 5, "top": 4, "server": {"url": "http://there"}}
    )

    def collected() -> Trace:
        writer = collecting.writer_of(local, settings)
        workspace = Workspace.open(tmp_path / "run")
        return collecting.collected(workspace, local, writer, settings, "train", PROMPTS, GREEDY, SILENT)

    trace = collected()
    require_same(trace, "it", target_fingerprint=local.fingerprint, tokenizer_fingerprint=local.tokenizer_fingerprint)
    assert trace.info.target == "local"
    expected = local.write([row.prompt_ids for row in trace.rows()], GREEDY, 5, 4, [0, 1, 2], lambda _: None)
    assert all(torch.equal(row.answer_ids, one.token_ids) for row, one in zip(trace.rows(), expected, strict=True))
    collected()
    assert asked == ["http://there"]  # What is complete needs no server.


def test_a_server_of_other_weights_is_refused() -> None:
    assert isinstance(ServedTwin.of(target("local"), target("served")), Target)
    with pytest.raises(ModelError, match=r"does not serve local: its log-probabilities differ by \d"):
        ServedTwin.of(target("local"), target("served", seed=1))


def test_a_server_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(VocabMismatchError, match="serve the target's own model"):
        ServedTwin.of(target("local"), target("served", tokenizer="other"))
