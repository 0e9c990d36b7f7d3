"""OpenVINO GenAI on the CPU, one request at a time, weights and caches in float32."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np
import openvino
import openvino_genai

_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def version() -> str:
    return metadata.version("openvino-genai")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    threads = {"INFERENCE_NUM_THREADS": job["threads"]}
    more: dict[str, Any] = {}
    if job["speculate"]:
        more["draft_model"] = openvino_genai.draft_model(job["draft"], "CPU", **_EXACT, **threads)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    pipe = openvino_genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **_EXACT, **threads, **more)
    for prompt in job["prompts"]:
        law = openvino_genai.GenerationConfig(max_new_tokens=prompt["max_new_tokens"], do_sample=False, ignore_eos=True)
        if job["speculate"]:
            law.num_assistant_tokens = job["k"]
        ids = openvino.Tensor(np.array([prompt["token_ids"]], dtype=np.int64))
        written = pipe.generate(openvino_genai.TokenizedInputs(ids, openvino.Tensor(np.ones_like(ids.data))), law)
        import sys

        m = written.perf_metrics
        print("STEPS", list(m.raw_metrics.m_batch_sizes), file=sys.stderr)
        e = written.extended_perf_metrics
        if e:
            print(
                "ACC",
                e.get_num_accepted_tokens(),
                list(e.draft_model_metrics.raw_metrics.m_batch_sizes),
                list(e.main_model_metrics.raw_metrics.m_batch_sizes),
                dir(e),
                file=sys.stderr,
            )
        yield {
            "token_ids": list(written.tokens[0]),
            "blocks": None,
            "drafted": None,
            "accepted": 0,
            "by_position": None,
        }
