"""What the keys of a request make of a draw, written from their descriptions in plain Python on top of `naive.py`.

It shares no code with the library and no NumPy.
"""

import math
from collections.abc import Sequence

from tests import naive
from tests.naive import Parameters, single

PRESETS = {"creative": 1.0, "factual": 0.7}
INVERSE_CDF, TAIL = 1, 2


def parameters(row: Parameters, keys: dict, vocabulary: int) -> Parameters:
    """Return what vLLM's own parameters become: temperature, top_k, salt."""
    temperature = PRESETS[keys["gumbel_preset"]] if "gumbel_preset" in keys else row.temperature
    if keys.get("gumbel_temperature_rule") == "log_vocab" and temperature > 0:
        temperature *= 1 + 0.1 * math.log(vocabulary)
    limits = [n for n in (row.top_k, keys.get("gumbel_top_n", 0)) if n > 0]
    return row._replace(temperature=temperature, top_k=min(limits, default=0), salt=keys.get("gumbel_salt", row.salt))


def loops(tokens: Sequence[int]) -> dict[int, int]:
    """Return, for each token that would continue a loop, the most copies of one whose continuation it is."""
    found: dict[int, int] = {}
    for period in range(64, 0, -1):
        copies = 1
        piece = tokens[len(tokens) - period :]
        while list(tokens[len(tokens) - (copies + 1) * period : len(tokens) - copies * period]) == list(piece) != []:
            copies += 1
        if copies >= 3 and copies * period <= len(tokens):
            found[tokens[len(tokens) - period]] = copies  # a smaller period comes later and replaces it
    return found


def normal(seed: int, position: int, token: int, salt: int) -> float:
    """Return the normal number of a token."""
    even = token - token % 2
    first, second = (naive.word(seed, position, even + i, TAIL, salt) for i in (0, 1))
    radius = math.sqrt(2 * math.exp(-naive.gumbel(first)))
    angle = 2 * math.pi * (second + 0.5) / 2**64
    return radius * (math.sin(angle) if token % 2 else math.cos(angle))


def edited(logits: Sequence[float], row: Parameters, keys: dict, output: Sequence[int]) -> list[float]:
    """Return a row of logits after the keys that change it."""
    x = [single(value) for value in logits]
    for token, copies in loops(output).items():
        x[token] = single(x[token] - single(keys.get("gumbel_repetition_offset", 0.0) * copies))
    strength = keys.get("gumbel_tail_boost", 0.0)
    finite = [value for value in x if math.isfinite(value)]
    if strength and finite:
        mean = math.fsum(finite) / len(finite)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite))
        for token, value in enumerate(x):
            if math.isfinite(value):
                x[token] = single(value + strength * spread * normal(row.seed, row.position, token, row.salt))
    return x


def draw(logits: Sequence[float], row: Parameters, keys: dict, output: Sequence[int]) -> int:
    """Return the drawn id, for a row that has a candidate; `output` are the tokens generated so far."""
    row = parameters(row, keys, len(logits))
    x = naive.tempered(edited(logits, row, keys, output), row.temperature)
    keep = naive.kept(x, row)
    scale = keys.get("gumbel_noise_scale", 1.0) if row.temperature > 0 else 0.0
    best = max(x[token] for token in keep)
    if scale == 0:
        return min(token for token in keep if x[token] == best)
    if len(output) < keys.get("gumbel_hybrid_steps", 0):
        masses = [math.exp((x[token] - best) / scale) for token in keep]
        u = (naive.word(row.seed, row.position, 0, INVERSE_CDF, row.salt) + 0.5) / 2**64
        above = [token for i, token in enumerate(keep) if math.fsum(masses[: i + 1]) > u * math.fsum(masses)]
        return above[0]
    noise = {token: naive.gumbel(naive.word(row.seed, row.position, token, 0, row.salt)) for token in keep}
    return max(keep, key=lambda token: (x[token] + scale * noise[token], -token))
