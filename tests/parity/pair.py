"""Two servers that are asked the same: one draws with vLLM's own sampler, one with `--sampler gumbel`."""

import json
import math

from tests.serving import Server

#: What names an answer or says when it came; all else is what it says.
NAMES = frozenset({"id", "created", "created_at", "completed_at", "request_id", "item_id", "system_fingerprint"})

#: Tolerance of logprobs: two servers compute a row in batches of different sizes, and vLLM sums it in float32.
TOLERANCE = 1e-4


class Pair:
    """vLLM's own sampler and ours, in servers that have everything else in common.

    Attributes:
        stock, ours: the servers.
    """

    def __init__(self, stock: Server, ours: Server) -> None:
        self.stock, self.ours = stock, ours

    def post(self, path: str, body: dict, status: int = 200) -> tuple[dict, dict]:
        """Return the JSON of both answers, stock's first, to a request that both must answer with this status."""
        answers = [server.client.post(path, json={"model": "smollm2", **body}) for server in (self.stock, self.ours)]
        assert [answer.status_code for answer in answers] == [status] * 2, [answer.text for answer in answers]
        stock, ours = (answer.json() for answer in answers)
        return stock, ours

    def alike(self, path: str = "/v1/completions", **body) -> dict:
        """Return our answer, which must say what stock's says, to the last field."""
        if path == "/v1/completions":
            body = {"return_token_ids": True, **body}
        stock, ours = self.post(path, body)
        same(ours=ours, stock=stock)
        return ours

    def choice(self, **body) -> dict:
        """Return the first choice of our completion, which must be stock's."""
        return self.alike(**body)["choices"][0]

    def refused(self, path: str = "/v1/completions", **body) -> str:
        """Return the words with which both refuse a request alike."""
        stock, ours = self.post(path, body, status=400)
        assert ours == stock
        return ours["error"]["message"]

    def events(self, path: str = "/v1/completions", **body) -> tuple[list[dict], list[dict]]:
        """Return the events of both streams, stock's first."""
        stock, ours = (events(server, path, {"model": "smollm2", "stream": True, **body}) for server in self)
        return stock, ours

    def __iter__(self):
        return iter((self.stock, self.ours))


def events(server: Server, path: str, body: dict) -> list[dict]:
    """Return the events of a stream, which must end as streams end."""
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    if path != "/v1/responses":  # whose last event is one of its own
        assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def same(*, ours: object, stock: object, where: str = "answer") -> None:
    """Fail where our answer says anything else than stock's; numbers with a fraction within the tolerance."""
    if isinstance(ours, dict) and isinstance(stock, dict):
        assert ours.keys() == stock.keys(), where
        for name in ours.keys() - NAMES:
            same(ours=ours[name], stock=stock[name], where=f"{where}.{name}")
    elif isinstance(ours, list) and isinstance(stock, list):
        assert len(ours) == len(stock), where
        for place, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
            same(ours=mine, stock=theirs, where=f"{where}[{place}]")
    elif isinstance(ours, float) and isinstance(stock, float):
        assert math.isclose(ours, stock, rel_tol=0, abs_tol=TOLERANCE), f"{where}: {ours}, stock {stock}"
    else:
        assert ours == stock, where
