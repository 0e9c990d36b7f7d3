"""A session gives what a full pass gives, whatever was read before."""

import pytest
import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from foredraft.core.errors import CapabilityError
from foredraft.models.head import Head
from foredraft.models.kv_cache import KeyValueCache
from foredraft.models.session import Session
from tests.tiny import tiny_model

NUM_TOKENS = 259


def _full_pass(model: PreTrainedModel, token_ids: Tensor, last: int) -> Tensor:
    with torch.no_grad():
        return model(token_ids[None], use_cache=False).logits[0, -last:]


def _walk(model: PreTrainedModel, steps: int, seed: int = 0) -> None:
    """Grow, crop, branch and append at random; compare every answer with a full pass."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(count: int) -> Tensor:
        return torch.randint(3, NUM_TOKENS, (count,), generator=generator)

    session, text = Session(model, Head(model)), tokens(6)
    session.logits(text)
    for _ in range(steps):
        if number(0, 3) == 0:
            added = tokens(number(1, 4))
            text, last = torch.cat([text, added]), len(added)
            logits = session.append(added)
        else:
            text = torch.cat([text[: number(1, len(text) + 1)], tokens(number(0, 5))])
            last = number(1, len(text) + 1)
            logits = session.logits(text, last)
        torch.testing.assert_close(logits, _full_pass(model, text, last), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_any_walk_equals_full_passes(family: str) -> None:
    _walk(tiny_model(num_layers=2, family=family), steps=60)


def test_sliding_windows_are_masked_over_the_whole_cache() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=4, initializer_range=0.25,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    _walk(MistralForCausalLM(config).eval(), steps=30)


def test_the_cache_grows_past_its_first_capacity() -> None:
    model = tiny_model(num_layers=1)
    text = torch.arange(3, 203)
    session = Session(model, Head(model))
    for end in range(20, 401, 20):
        longer = text.repeat(2)[:end]
        torch.testing.assert_close(session.logits(longer), _full_pass(model, longer, 1), atol=1e-4, rtol=1e-4)


class _Counter(nn.Module):
    """Counts the tokens that pass through the embeddings."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, 0

    def forward(self, token_ids: Tensor) -> Tensor:
        self.seen += token_ids.numel()
        return self.inner(token_ids)


def test_what_was_read_is_never_read_again() -> None:
    model = tiny_model(num_layers=1)
    counter = _Counter(model.get_input_embeddings())
    model.set_input_embeddings(counter)
    session, text = Session(model, Head(model)), torch.arange(3, 53)
    session.logits(text[:40])
    assert counter.seen == 40
    session.logits(text[:44], last=3)
    assert counter.seen == 44
    session.append(text[44:46])
    session.logits(torch.cat([text[:45], text[:2]]))
    assert counter.seen == 48
    session.logits(text[:47])
    assert counter.seen == 50


def test_a_pass_that_fails_leaves_a_usable_session() -> None:
    model = tiny_model(num_layers=2)
    session, text = Session(model, Head(model)), torch.arange(3, 20)
    session.logits(text)
    with pytest.raises(IndexError):
        session.logits(torch.cat([text[:9], torch.tensor([5000])]))
    torch.testing.assert_close(session.logits(text), _full_pass(model, text, 1), atol=1e-4, rtol=1e-4)


def test_rows_behind_the_last_token_have_no_mass() -> None:
    model = tiny_model(num_layers=1)
    text = torch.arange(3, 20)
    logits = Session(model, Head(model, num_tokens=NUM_TOKENS)).logits(text, last=2)
    assert bool(logits[:, NUM_TOKENS:].isneginf().all())
    torch.testing.assert_close(logits[:, :NUM_TOKENS], _full_pass(model, text, 2)[:, :NUM_TOKENS], atol=1e-4, rtol=1e-4)


def test_logits_keep_no_graph() -> None:
    model = tiny_model(num_layers=1)
    session = Session(model, Head(model))
    assert not session.logits(torch.arange(3, 9)).requires_grad
    assert not session.append(torch.arange(3, 5)).requires_grad


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(CapabilityError, match=r"recurrent state .* cannot be cropped"):
        KeyValueCache(MambaForCausalLM(config))
