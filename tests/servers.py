"""Real servers for tests: started from the environments that tools/runtimes.sh makes, ended with the test."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
LLAMA, VLLM = "FOREDRAFT_XLLAMA_PYTHON", "FOREDRAFT_VLLM_PYTHON"
_START_SECONDS = 400
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def python_of(variable: str) -> str:
    """Return the interpreter that an environment variable names; skip the test where it is not set."""
    path = os.environ.get(variable, "")
    if not path:
        pytest.skip(f"needs {variable}: see tools/runtimes.sh")
    return path


@contextmanager
def llama_server(model: Path, *options: str) -> Iterator[str]:
    """Yield the address of a llama.cpp server; options as in tools/serve_llama.py."""
    command = [python_of(LLAMA), str(TOOLS / "serve_llama.py"), str(model), *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http"), "the server did not start"
            yield address
        finally:
            process.stdin.close()
            process.wait(timeout=60)


@contextmanager
def vllm_server(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Yield the address of a vLLM server in float32 on one thread, without compilation; its output goes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python_of(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "served", "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager", *options]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **_ONE_THREAD}, start_new_session=True
        )
        try:
            _wait(address, process, log)
            yield address
        finally:
            _end(process)


def _wait(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urlopen(f"{address}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1.0)
    raise AssertionError(f"vLLM did not start: {log.read_text()[-2000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server and what it started; it has a session of its own."""
    os.killpg(process.pid, 15)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait(timeout=20)
