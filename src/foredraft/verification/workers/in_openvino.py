"""OpenVINO GenAI on the CPU, one request at a time, in float32 with caches in float32.

Its metrics leave out the last block of an answer (get_num_accepted_tokens, 2026.4.1). What each step emitted is counted
whole: the first step reads the prompt and emits one token, each later one its accepted draft tokens and one more.
"""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np
import openvino
import openvino_genai

_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_CACHE_GB = 1


def version() -> str:
    return metadata.version("openvino-genai")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pipe = _pipeline(job)
    for prompt in job["prompts"]:
        law = openvino_genai.GenerationConfig(max_new_tokens=prompt["max_new_tokens"], do_sample=False, ignore_eos=True)
        if job["speculate"]:
            law.num_assistant_tokens = job["k"]
            if job["lookup"]:
                law.max_ngram_size = job["lookup"]["max_match"]
        ids = np.array([prompt["token_ids"]], dtype=np.int64)
        given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        written = pipe.generate(given, law)
        accepted = [emitted - 1 for emitted in written.perf_metrics.raw_metrics.m_batch_sizes[1:]]
        yield {
            "token_ids": list(written.tokens[0]),
            "blocks": None,
            "drafted": None,
            "accepted": sum(accepted),
            "by_position": [sum(one > place for one in accepted) for place in range(job["k"])],
        }


def _pipeline(job: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {**_EXACT, "INFERENCE_NUM_THREADS": job["threads"]}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.enable_prefix_caching = False
    drafting: dict[str, Any] = {}
    if job["speculate"] and job["lookup"]:
        drafting = {"prompt_lookup": True}
    elif job["speculate"]:
        drafting = {"draft_model": openvino_genai.draft_model(job["draft"], "CPU", **settings)}
    return openvino_genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **settings, **drafting)
