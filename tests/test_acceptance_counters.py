"""Counters of servers, read from what real ones gave (tests/data), under the names that scores have here."""

import json
import math
from pathlib import Path

import pytest

from foredraft.acceptance.counters import beside, comparison, parse_metrics, read_server
from foredraft.core.errors import CapabilityError
from tests.fake_server import FakeServer, serving
from tests.markov import MarkovTarget

DATA = Path(__file__).parent / "data"


def metrics(runtime: str) -> str:
    return (DATA / f"metrics-{runtime}.txt").read_text(encoding="utf-8")


def test_llama_cpps_counts_are_read() -> None:
    found = parse_metrics(metrics("llamacpp"))
    assert (found.runtime, found.num_drafts, found.num_draft_tokens, found.num_accepted) == ("llamacpp", 6, 15, 7)
    assert found.accepted_by_position == (4, 2, 1)
    assert found.mean_tokens_per_call == pytest.approx(1 + 7 / 6)
    assert found.accepted_of_drafted == pytest.approx(7 / 15)
    assert found.acceptance_by_position == pytest.approx((4 / 6, 2 / 4, 1 / 2))


def test_vllms_counts_are_read() -> None:
    found = parse_metrics(metrics("vllm"))
    assert found.runtime == "vllm"
    assert found.num_accepted == sum(found.accepted_by_position)
    assert found.num_draft_tokens == found.num_drafts * len(found.accepted_by_position)
    assert found.mean_tokens_per_call == 1 + found.num_accepted / found.num_drafts
    # Examined are the first token of every block, and each later one behind an accepted token.
    examined = found.num_drafts + sum(found.accepted_by_position[:-1])
    assert found.acceptance_rate == found.num_accepted / examined
    assert found.acceptance_rate > found.accepted_of_drafted


def test_sglangs_ratios_are_read() -> None:
    text = 'sglang:spec_accept_length{model_name="m"} 2.5\nsglang:spec_accept_rate{model_name="m"} 0.375\n'
    found = parse_metrics(text)
    assert (found.runtime, found.mean_tokens_per_call, found.accepted_of_drafted) == ("sglang", 2.5, 0.375)
    assert math.isnan(found.acceptance_rate)
    assert found.to_json()["num_drafts"] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_engines_add_up() -> None:
    text = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}.0\n'
        for engine in "01"
        for name, value in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 20))
    )
    found = parse_metrics(text)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted) == (20, 80, 40)


def test_what_came_before_is_left_out() -> None:
    early = parse_metrics("llamacpp:spec_decode_num_drafts_total 4\nllamacpp:spec_decode_num_draft_tokens_total 12\n")
    found = parse_metrics(metrics("llamacpp")).since(early)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted) == (2, 3, 7)
    assert found.accepted_by_position == (4, 2, 1)


def test_a_server_that_has_not_speculated_yet_has_no_ratios() -> None:
    found = parse_metrics("vllm:spec_decode_num_drafts_total 0.0\nvllm:spec_decode_num_draft_tokens_total 0.0\n")
    assert math.isnan(found.mean_tokens_per_call)
    assert "not measured tokens per call" in found.sentence


def test_a_server_without_counters_is_an_error() -> None:
    with pytest.raises(CapabilityError, match=r"counts no speculative decoding.*--speculative-config"):
        parse_metrics('vllm:prompt_tokens_total{engine="0"} 12.0\n')
    with serving(FakeServer(MarkovTarget())) as server:
        with pytest.raises(CapabilityError, match=r"http://.*/metrics gives nothing: switch metrics on"):
            read_server(server.address)
        server.metrics = metrics("llamacpp")
        assert read_server(server.address + "/v1") == read_server(server.address + "/metrics")


def test_replay_is_shown_at_the_servers_length() -> None:
    counters = parse_metrics(metrics("llamacpp"))
    assert counters.draft_tokens_per_call == 2.5
    tokens, shares = {"1": 1.5, "2": 1.9, "3": 2.0}, {"1": 1.0, "2": 1.0, "3": 0.5}
    entry = {"name": "draft", "mean_tokens_per_call": tokens, "guess_share": shares}
    found = beside(counters, {"laws": [{"label": "T=0", "drafters": [entry]}]})
    (replayed,) = found["replayed"]
    assert (replayed["law"], replayed["drafter"], replayed["k"]) == ("T=0", "draft", 3)
    # Half of the calls had a guess, and all accepted tokens are theirs.
    assert (replayed["mean_tokens_per_call"], replayed["mean_tokens_per_guess"]) == (2.0, 3.0)
    assert comparison(counters, [replayed]).endswith("calls with a guess only: draft 3.00 at k = 3, T=0.")
