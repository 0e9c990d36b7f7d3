"""Nothing holds laws over the vocabulary for more than a chunk of positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.acceptance import audit as audit_module
from foredraft.acceptance.audit import audit
from foredraft.acceptance.evaluate import score
from foredraft.core.errors import NonFiniteError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.models import causal_lm
from foredraft.models import target as target_module
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.trace.store import Trace
from tests.tiny import save_tiny, tiny_model
from tests.traces import build_trace, trace_row

VOCAB = 272
POSITIONS = 20  # more than the hidden size: a transposed head is no law
HIDDEN = 16


class Widest(TorchDispatchMode):
    """Remembers the most rows of vocabulary width that any operation returned in floating point."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.shape[-1:] == (VOCAB,):
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return result


@contextmanager
def widest() -> Iterator[Widest]:
    with Widest() as seen:
        yield seen


@pytest.fixture
def long_trace(tmp_path: Path) -> Trace:
    generator = torch.Generator().manual_seed(0)
    rows = [
        trace_row(f"row-{number}", [5, 6, 7], torch.randint(3, 259, (100,), generator=generator).tolist(), greedy=False)
        for number in range(3)
    ]
    return build_trace(tmp_path / "trace", rows, SamplingLaw())


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.8, top_k=9, top_p=0.9)], ids=str)
def test_scoring_holds_one_chunk(law: SamplingLaw, long_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "_HEAD_POSITIONS", POSITIONS)
    drafter = CausalLMDrafter(Draft(tiny_model(num_layers=1, hidden=HIDDEN)), law, VOCAB)
    with widest() as seen:
        score("draft", drafter, long_trace, [1, 8])
    assert 1 <= seen.rows <= POSITIONS


@pytest.mark.slow
def test_the_audit_holds_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "_POSITIONS", POSITIONS)
    target = target_module.load_target(str(save_tiny(tmp_path / "target", hidden=HIDDEN)), "float32")
    drafter = CausalLMDrafter(Draft(tiny_model(num_layers=1, hidden=HIDDEN)), GREEDY, VOCAB)
    monkeypatch.setattr(causal_lm, "_HEAD_POSITIONS", POSITIONS)
    with widest() as seen:
        found = audit(target, {"draft": (drafter, 2)}, [torch.tensor([5, 6, 7])], GREEDY, 50, 0)
    assert found["draft"].tokens > 2 * POSITIONS
    assert 1 <= seen.rows <= POSITIONS


def test_a_batch_whose_caches_do_not_fit_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_module.load_target(str(save_tiny(tmp_path / "target", hidden=HIDDEN)), "float32")
    prompts = [torch.arange(4, 4 + length) for length in (3, 9, 5)]
    whole = target.write(prompts, SamplingLaw(), 6, 8, [1, 2, 3], lambda count: None)
    # Two rows of 15 tokens: 4 layers, 2 heads of 4, keys and values, 4 bytes.
    monkeypatch.setattr(target_module, "_CACHE_BYTES", 2 * 15 * 4 * 2 * 4 * 2 * 4)
    rows: list[int] = []
    target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    parts = target.write(prompts, SamplingLaw(), 6, 8, [1, 2, 3], lambda count: None)
    assert max(rows) == 2
    assert [one.token_ids.tolist() for one in parts] == [one.token_ids.tolist() for one in whole]
    rows.clear()
    monkeypatch.setattr(target_module, "_CACHE_BYTES", 3 * 15 * 4 * 2 * 4 * 2 * 4)
    target.write([*prompts, prompts[0]], SamplingLaw(), 6, 8, [1, 2, 3, 4], lambda count: None)
    assert max(rows) == 2  # two and two, not three and one
    with torch.no_grad():
        target.model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="prompt 0 at position 3"):
        target.write(prompts, SamplingLaw(), 6, 8, [1, 2, 3], lambda count: None)
