"""A real HTTP server on a port of its own that answers as vLLM, llama.cpp and bare servers were seen to.

What it says is drawn from the known law of tests/markov.py, so that every figure can be checked.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from foredraft.core.law import SamplingLaw, law_logprobs, sample_index
from tests.markov import MarkovTarget

Reply = dict[str, Any]


@dataclass
class FakeServer:
    """How it behaves, and what it was asked.

    Attributes:
        kind: vllm, llamacpp or other.
        processed: Whether log-probabilities are those of the processed law (vLLM's --logprobs-mode).
        takes_ids: Whether a prompt may be token ids.
        faults: What happens to the next completions instead of an answer: a status, a status with a Retry-After, or
            "drop" (the connection closes in the middle), "cut" (half the JSON).
        spoil: What is done to each completion before it is sent.
        pause: Seconds that each completion takes.
    """

    target: MarkovTarget
    kind: str = "vllm"
    processed: bool = True
    takes_ids: bool = True
    max_top: int = 20
    key: str = ""
    faults: deque[Any] = field(default_factory=deque)
    spoil: Callable[[Reply], Reply] = lambda reply: reply
    pause: float = 0.0
    models: Sequence[str] = ("served",)
    metrics: str = ""
    address: str = ""
    bodies: list[Reply] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def list_models(self) -> Reply:
        owner = {"vllm": "vllm", "llamacpp": "llamacpp"}.get(self.kind, "somebody")
        entries: list[Reply] = [{"id": name, "object": "model", "owned_by": owner} for name in self.models]
        for entry in entries:
            if self.kind == "vllm":
                entry |= {"root": "/models/served", "max_model_len": 512}
            if self.kind == "llamacpp":
                entry["meta"] = {"n_vocab": 272, "n_ctx": 512, "n_params": 1000, "ftype": "Q4_1", "size": 4000}
        return {"object": "list", "data": entries}

    def tokenize(self, body: Reply) -> Reply:
        return {"tokens": self.target.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}

    def complete(self, body: Reply) -> tuple[int, Reply]:
        top = body.get("logprobs")
        if isinstance(body["prompt"], list) and not self.takes_ids:
            return 422, {"error": "prompt must be a string"}
        if self.kind == "vllm" and top is not None and top > self.max_top:
            return 400, {
                "error": f"Requested sample logprobs of {top}, which is greater than max allowed: {self.max_top}"
            }
        prompt = body["prompt"]
        prompt = prompt if isinstance(prompt, list) else self.target.tokenizer(prompt)["input_ids"]
        law = SamplingLaw(body["temperature"], max(body.get("top_k", 0), 0), body["top_p"])
        own = law_logprobs(self.target.logits, law)
        shown = SamplingLaw() if law.is_greedy or not self._is_processed(body) else law
        shown_logprobs = law_logprobs(self.target.logits, shown)
        ids = self._draw(prompt[-1], own, body)
        stops = ids[-1] in self.target.stop_ids
        choice = {"index": 0, "text": self._text(ids), "finish_reason": "stop" if stops else "length"}
        rows = shown_logprobs[torch.tensor([prompt[-1], *ids[:-1]])]
        choice["logprobs"] = self._logprobs(ids, rows, top, body)
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return 200, self.spoil({"object": "text_completion", "choices": [choice], "usage": usage})

    def _is_processed(self, body: Reply) -> bool:
        return bool(body.get("post_sampling_probs")) if self.kind == "llamacpp" else self.processed

    def _draw(self, last: int, own: torch.Tensor, body: Reply) -> list[int]:
        generator = torch.Generator().manual_seed(body["seed"])
        ids = [last]
        while len(ids) <= body["max_tokens"] and (len(ids) == 1 or ids[-1] not in self.target.stop_ids):
            ids.append(sample_index(own[ids[-1]].exp(), float(torch.rand((), generator=generator))))
        return ids[1:]

    def _text(self, ids: Sequence[int]) -> str:
        # vLLM is asked for special tokens, llama.cpp leaves them out.
        return str(self.target.tokenizer.decode(list(ids), skip_special_tokens=self.kind != "vllm"))

    def _logprobs(self, ids: list[int], rows: torch.Tensor, top: int | None, body: Reply) -> Reply | None:
        if top is None or (self.kind == "llamacpp" and top == 0):
            return None
        best = [row.topk(top) for row in rows]
        if self.kind == "llamacpp":
            return {"content": [self._content(i, row, b, body) for i, row, b in zip(ids, rows, best, strict=True)]}
        named = self._by_id if body.get("return_tokens_as_token_ids") else self._by_text
        own = [_finite(float(row[i])) for i, row in zip(ids, rows, strict=True)]
        tops = []
        for i, row, found in zip(ids, rows, best, strict=True):
            pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
            tops.append({named(j): _finite(value) for j, value in pairs} | {named(i): _finite(float(row[i]))})
        return {"tokens": [named(i) for i in ids], "token_logprobs": own, "top_logprobs": tops, "text_offset": []}

    def _content(self, token_id: int, row: torch.Tensor, best: Any, body: Reply) -> Reply:
        word, words = ("prob", "top_probs") if body.get("post_sampling_probs") else ("logprob", "top_logprobs")

        def entry(one: int) -> Reply:
            value = float(row[one])
            return {"id": one, "token": self._text([one]), word: math.exp(value) if word == "prob" else _finite(value)}

        # llama.cpp lists no tokens that sampling removed.
        kept = [one for one in best.indices.tolist() if math.isfinite(float(row[one]))]
        return {**entry(token_id), words: [entry(one) for one in kept]}

    def _by_id(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def _by_text(self, token_id: int) -> str:
        return self._text([token_id])


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Serve on a free port of this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models" and server.models:
                self._send(200, json.dumps(server.list_models()))
            elif self.path == "/metrics" and server.metrics:
                self._send(200, server.metrics)
            else:
                self._send(404, '{"error": "not found"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if server.key and self.headers.get("authorization") != f"Bearer {server.key}":
                self._send(401, '{"error": "no key"}')
            elif self.path == "/tokenize" and server.kind != "other":
                self._send(200, json.dumps(server.tokenize(body)))
            elif self.path == "/v1/completions":
                self._complete(body)
            else:
                self._send(404, '{"error": "not found"}')

        def _complete(self, body: Reply) -> None:
            with server.lock:
                server.bodies.append(body)
                fault = server.faults.popleft() if server.faults and body["max_tokens"] > 1 else None
                server.running += 1
                server.most_running = max(server.most_running, server.running)
            try:
                time.sleep(server.pause)
                if fault == "drop":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                    self.close_connection = True
                elif isinstance(fault, int):
                    self._send(fault, '{"error": "busy"}')
                elif isinstance(fault, tuple):
                    self._send(fault[0], '{"error": "busy"}', {"retry-after": fault[1]})
                else:
                    status, reply = server.complete(body)
                    text = json.dumps(reply)
                    self._send(status, text[: len(text) // 2] if fault == "cut" else text)
            finally:
                with server.lock:
                    server.running -= 1

        def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None: ...

    with Quiet(("127.0.0.1", 0), Handler) as listening:
        server.address = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
