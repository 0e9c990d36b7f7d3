"""Assisted generation of transformers, one prompt after the other, in float32."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import candidate_generator


def version() -> str:
    return metadata.version("transformers")


@torch.no_grad()
def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(job["threads"])
    offered, matched = _watched(
        candidate_generator.PromptLookupCandidateGenerator
        if job["lookup"]
        else candidate_generator.AssistedCandidateGenerator
    )
    target = _loaded(job["target"])
    more: dict[str, Any] = {}
    if job["speculate"] and job["lookup"]:
        more = {"prompt_lookup_num_tokens": job["k"], "max_matching_ngram_size": job["lookup"]["max_match"]}
    elif job["speculate"]:
        draft = _loaded(job["draft"])
        draft.generation_config.update(
            num_assistant_tokens=job["k"], num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        more = {"assistant_model": draft}
    for prompt in job["prompts"]:
        offered.clear()
        matched.clear()
        ids = torch.tensor([prompt["token_ids"]])
        written = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=prompt["max_new_tokens"],
            **more,
        )
        blocks = [(drafted, accepted) for drafted, accepted in zip(offered, matched, strict=True) if drafted]
        accepted = [accepted for _, accepted in blocks]
        yield {
            "token_ids": written[0, ids.shape[1] :].tolist(),
            "blocks": len(blocks),
            "drafted": sum(drafted for drafted, _ in blocks),
            "accepted": sum(accepted),
            "by_position": [sum(one > place for one in accepted) for place in range(job["k"])],
        }


def _loaded(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    # Answers go on to their given length: what stands behind an end token is of no account here.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _watched(generator: Any) -> tuple[list[int], list[int]]:
    """Return two lists that grow by the draft tokens offered and accepted at every target call."""
    offered: list[int] = []
    matched: list[int] = []
    propose, learn = generator.get_candidates, generator.update_candidate_strategy

    def get_candidates(self: Any, input_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        candidates, logits = propose(self, input_ids, *rest, **named)
        offered.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    def update_candidate_strategy(self: Any, input_ids: torch.Tensor, scores: Any, num_matches: Any) -> Any:
        matched.append(int(num_matches))
        return learn(self, input_ids, scores, num_matches)

    generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
    return offered, matched
