"""Several texts read at once give what each gives alone."""

import random

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from foredraft.models.batch_session import BatchSession
from foredraft.models.head import Head
from foredraft.models.session import Session
from tests.tiny import tiny_model


def sliding_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=4, initializer_range=0.25,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def alone(model: PreTrainedModel, text: torch.Tensor, last: int) -> torch.Tensor:
    with torch.no_grad():
        return model(text[None]).logits[0, -last:].float()


MODELS = {"llama": lambda: tiny_model(num_layers=2), "sliding window": sliding_model}


@pytest.mark.parametrize("name", MODELS)
def test_any_walk_of_several_texts_equals_full_passes(name: str) -> None:
    """Texts grow, shrink and are left out at random; one ends after a while, and another takes its row."""
    model, rng = MODELS[name](), random.Random(0)
    session = BatchSession(model, Head(model), 4)
    texts = {number: torch.randint(3, 259, (rng.randint(1, 9),)) for number in range(4)}
    for step in range(24):
        if step in (8, 16):
            gone = rng.choice(sorted(texts))
            session.drop(gone)
            del texts[gone]
        for number, text in texts.items():
            kept = text[: rng.randint(1, len(text))]
            texts[number] = torch.cat([kept, torch.randint(3, 259, (rng.randint(0, 4),))])
        asked = {number: text for number, text in texts.items() if rng.random() < 0.8} or dict(texts)
        last = {number: rng.randint(1, len(text)) for number, text in asked.items()}
        found = session.logits(asked, last)
        assert found.keys() == asked.keys()
        for number, logits in found.items():
            torch.testing.assert_close(logits, alone(model, asked[number], last[number]), atol=1e-4, rtol=1e-4)


def test_long_texts_are_read_in_blocks_and_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.models.batch_session._PASS_TOKENS", 64)
    model = tiny_model(num_layers=1)
    session, texts = BatchSession(model, Head(model), 3), {n: torch.randint(3, 259, (5 + 200 * n,)) for n in range(3)}
    for extra in (0, 3):
        texts = {n: torch.cat([text, torch.full((extra,), 9)]) for n, text in texts.items()}
        found = session.logits(texts, dict.fromkeys(texts, 4))
        for number, text in texts.items():
            torch.testing.assert_close(found[number], alone(model, text, 4), atol=1e-4, rtol=1e-4)


def test_no_token_is_read_twice() -> None:
    model, read = tiny_model(num_layers=1), []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    session, text = BatchSession(model, Head(model), 2), torch.arange(3, 13)
    session.logits({0: text, 1: text[:4]}, {0: 1, 1: 1})
    session.logits({0: torch.cat([text[:8], text[:2]]), 1: text[:5]}, {0: 1, 1: 1})
    assert read == [(2, 10), (2, 2)]


def test_a_tree_respects_a_sliding_window() -> None:
    model = sliding_model()
    text, nodes = torch.arange(10, 30), torch.tensor([40, 41, 42, 43])
    logits = Session(model, Head(model)).tree_logits(text, nodes, (-1, 0, 0, 2))
    for node, path in {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 2, 3]}.items():
        wanted = alone(model, torch.cat([text, nodes[path]]), 1)[0]
        torch.testing.assert_close(logits[node + 1], wanted, atol=1e-4, rtol=1e-4)


def test_a_pass_that_fails_leaves_a_usable_session() -> None:
    model = tiny_model(num_layers=1)
    session, text = BatchSession(model, Head(model), 1), torch.arange(3, 9)
    session.logits({0: text}, {0: 1})
    with pytest.raises(IndexError):
        session.logits({0: torch.tensor([3, 4, 100_000])}, {0: 1})
    torch.testing.assert_close(session.logits({0: text}, {0: 2})[0], alone(model, text, 2), atol=1e-4, rtol=1e-4)
