"""Does an engine say the same through every path? In process alone and in a batch, 16 gRPC streams, HTTP.

    python -m benchmarks.same_tokens engines/NAME [--prompts 16] [--max-tokens 48]

Serves the engine on free ports, sends every prompt greedily by each path and compares the texts with those
of the engine in process, one request at a time. In float32 and float64 they must be equal. At 16 bit a
forward of another shape rounds otherwise, so each difference is printed with its position and with the gap
between the two best logits there: a small gap is a near tie, a large one would be a fault.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trtspec.artifact import Artifact, open_artifact
from trtspec.backends import open_engine
from trtspec.engine import Request, generate
from trtspec.prompts import PROMPTS_FILE
from trtspec.serve.client import generate as ask
from trtspec.serve.protocol import Generate
from trtspec.text import Tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()
    artifact = open_artifact(options.engine)
    tokenizer = Tokenizer.load(artifact.target_dir)
    chats = [json.loads(line)["messages"] for line in PROMPTS_FILE.read_text("utf-8").splitlines()]
    prompts = [tokenizer.render_chat(messages) for messages in chats[: options.prompts]]
    requests = [
        Request(
            str(i),
            tuple(tokenizer.encode(prompt)),
            options.max_tokens,
            stop_tokens=tokenizer.eos_token_ids,
        )
        for i, prompt in enumerate(prompts)
    ]
    engine = open_engine(artifact)
    alone = [generate(engine, [request])[0].tokens for request in requests]
    together = [completion.tokens for completion in generate(engine, requests)]
    served = _served(artifact, prompts, options.max_tokens)

    backend = artifact.recipe.backend
    print(f"{artifact.recipe.name}: {len(prompts)} prompts, {options.max_tokens} tokens, {backend.dtype}")
    texts = [tokenizer.decode(list(tokens)) for tokens in alone]
    different = 0
    for path, answers in {
        "in process, one batch": [tokenizer.decode(list(tokens)) for tokens in together],
        **served,
    }.items():
        wrong = [i for i, answer in enumerate(answers) if answer != texts[i]]
        different += len(wrong)
        print(f"  {path:24s} {len(prompts) - len(wrong)} of {len(prompts)} equal the engine alone")
        for i in wrong:
            ids = tokenizer.encode(answers[i])
            at = next(
                (k for k, pair in enumerate(zip(ids, alone[i], strict=False)) if pair[0] != pair[1]),
                min(len(ids), len(alone[i])),
            )
            known = [*requests[i].prompt_tokens, *alone[i][: at + 1]]
            gap = engine.score(known).margins[-1]
            print(f"    prompt {i}, token {at}: the two best logits differ by {gap:.3f}")
    exact = backend.dtype in ("float32", "float64")
    print("PASS" if not different else "FAIL" if exact else "differences above are at 16 bit")
    return 1 if different and exact else 0


def _served(artifact: Artifact, prompts: list[str], max_tokens: int) -> dict[str, list[str]]:
    ports = _free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        argv = [sys.executable, "-m", "trtspec", "serve", str(artifact.folder), "--ready-file", str(ready)]
        for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            argv += [f"--{name}-port", str(port)]
        server = subprocess.Popen(
            [*argv, "--log", str(Path(folder) / "log")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not ready.exists():
                if server.poll() is not None:
                    raise SystemExit(Path(folder, "log").read_text())
                time.sleep(0.1)
            return {
                f"{len(prompts)} gRPC streams": _grpc(artifact, ports[1], prompts, max_tokens),
                "HTTP, one at a time": [_http(artifact, ports[0], prompt, max_tokens) for prompt in prompts],
            }
        finally:
            server.terminate()
            server.wait()


def _grpc(artifact: Artifact, port: int, prompts: list[str], max_tokens: int) -> list[str]:
    barrier = threading.Barrier(len(prompts))

    def one(prompt: str) -> str:
        barrier.wait()
        request = Generate(prompt=prompt, max_tokens=max_tokens)
        return ask(f"127.0.0.1:{port}", artifact.recipe.serving.model_name, request).text

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def _http(artifact: Artifact, port: int, prompt: str, max_tokens: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {
        "text_input": prompt,
        "sampling_param_max_tokens": max_tokens,
        "sampling_param_exclude_input_from_output": True,
    }
    connection.request(
        "POST",
        f"/v2/models/{artifact.recipe.serving.model_name}/generate",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    text: str = answer["text_output"]
    return text


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports: list[int] = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
