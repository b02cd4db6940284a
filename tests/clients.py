"""Clients of a real server that count the tokens they get, to compare with what the server has counted."""

import json
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

SAMPLED = "vllm_gumbel_sampled_tokens_total"
STOCK = {"gumbel_sampler": "default"}

#: One of each kind of request.
MIXED = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "stream": True},
    {"temperature": 1.0, "vllm_xargs": STOCK},
]


class Clients:
    """Clients of one server.

    Attributes:
        server: the server.
        received: how many tokens they got, by arm.
    """

    def __init__(self, server):
        self.server, self.received = server, Counter()
        self._lock = threading.Lock()

    def post(self, bodies, tokens, times=1):
        """Post completions at the same time, each so often, and wait for all their tokens."""
        requests = [
            {"prompt": f"Story {i}: once upon a time", "max_tokens": tokens, **body}
            for i in range(times)
            for body in bodies
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            for got in pool.map(self.receive, requests):
                assert got == tokens

    def receive(self, body, at_most=math.inf):
        """Post one completion, leave its stream after `at_most` tokens, and return how many came."""
        got = 0
        request = {"model": "smollm2", "return_token_ids": True, "ignore_eos": True, **body}
        if body.get("stream"):
            with self.server.client.stream("POST", "/v1/completions", json=request) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if got < at_most and line not in ("", "data: [DONE]"):
                        got += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                    elif got >= at_most:
                        break
        else:
            got = len(self.server.tokens(**request))
        with self._lock:
            self.received["default" if body.get("vllm_xargs") == STOCK else "gumbel"] += got
        return got

    def counted(self):
        """Return how many tokens `/metrics` has, by arm."""
        return {labels["arm"]: value for labels, value in self.server.samples(SAMPLED)}
