"""The domain classifier that ships with the package, on text that was written for this test."""

from importlib.resources import files

import numpy as np
import pytest
import torch

from foredraft.core.protocols import Answer
from foredraft.select.domains import DOMAINS, domain_of_tokens, shipped_model, text_features
from foredraft.select.situations import Reader, Situations, situations_in

TEXTS = {
    "code": "fn area(r: f64) -> f64 {\n    let pi = 3.14;\n    return pi * r * r;\n}\n\nfor (int i = 0; i < n; i++) {\n"
    "    total += values[i];\n}\n",
    "mathematics": "A farmer sells 12 boxes of apples at $4 each and 7 boxes of pears at $5 each. How much more money "
    "does he get for the apples than for the pears?",
    "dialogue": "Hi, I would like to book a table for two tonight. Sure! What time would you like? Seven please, and "
    "can you find me somewhere quiet? Thanks.",
    "prose": "The harbour of the old town was built in the reign of the second duke, whose engineers cut a channel "
    "through the northern marshes and enclosed it between two moles of granite. The work was completed in the spring "
    "of the year in which the duke died. In the following century the channel silted up; the fishing fleet, on which "
    "the wealth of the town had depended, was moved to the estuary, and the moles fell into ruin.",
    "structured": '[{"name": "Ada", "age": 36, "city": "London"}, {"name": "Alan", "age": 41, "city": "Wilmslow"}]',
    "other language": "今天的天气很好，我们决定去公园散步，然后在湖边吃午饭。",
}


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_domain_is_told_from_a_short_text(domain: str) -> None:
    assert shipped_model().domain(TEXTS[domain]) == domain


def test_what_cannot_be_told_has_no_domain_and_nothing_is_not_finite() -> None:
    for text in ("", " \n\t "):
        assert shipped_model().domain(text) == ""
        assert np.isfinite(text_features(text)).all()
    assert shipped_model().domain("\x00\ud7ff" * 3000) in DOMAINS


def test_it_is_small() -> None:
    assert len(files("foredraft.data").joinpath("domains.json").read_bytes()) < 50_000


def test_situations_follow_the_domain_and_the_match() -> None:
    """Tokens are characters here: the second half of the text repeats the first."""
    situations = Situations(DOMAINS)
    text = [ord(character) % 128 for character in TEXTS["code"]]
    reader = Reader(situations, domain_of_tokens(lambda token_ids: "".join(map(chr, token_ids))))
    answer = Answer(torch.tensor(text * 2), len(text))
    found = situations_in(reader, answer)
    assert reader.domain == "code"
    assert set(found.tolist()) <= {situations.number("code", match) for match in (0, 2, 4, 8)}
    assert situations.number("code", 16) in found
    assert len({situations.number(domain, match) for domain in (*DOMAINS, "") for match in (0, 3, 6, 12)}) == 28
    assert max(situations.number(domain, 99) for domain in (*DOMAINS, "")) == len(situations) - 1


def test_the_domain_is_read_at_the_same_places_however_the_text_grows() -> None:
    """By blocks, as decoding does, and token by token, as replay does."""
    by_block, by_token = (Reader(Situations(), lambda token_ids: str(token_ids[-1])) for _ in range(2))
    for reader in (by_block, by_token):
        reader.start([1, 2, 3])
    for at in range(0, 400, 5):
        by_block.grow(range(at, at + 5))
        for token in range(at, at + 5):
            by_token.grow([token])
        assert by_block.domain == by_token.domain
    assert by_block.domain == "383"
