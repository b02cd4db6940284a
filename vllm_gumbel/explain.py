"""What a combination of settings does to a model's distribution: in numbers, in words, and as a small plot.

A draw's law is known without drawing: `law` computes it for one row of logits, from the same tempering and the same
filters as the reference. What depends on the text so far, penalties and `gumbel_repetition_offset`, is left out, and so
is what changes no law: seed, salt, hybrid steps, whose sampler it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import tail_noise
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE
from vllm_gumbel.kernels.sample_reference import clean, kept, scale
from vllm_gumbel.params import GumbelParams

Row = npt.NDArray[np.float32]
Law = npt.NDArray[np.float64]

#: How many draws of tail noise the law of a boosted row is averaged over.
TAIL_DRAWS = 24

#: Texts after which a model is asked where none are given: from nearly certain to wide open.
PROMPTS = (
    "The capital of France is",
    "2 + 2 =",
    "The quick brown fox jumps over the lazy",
    "She opened the door and saw",
    "My favourite book is",
    "Once upon a time",
)

#: Values of each setting that a plot goes through.
SWEEPS: dict[str, Sequence[float]] = {
    "temperature": (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0),
    "top_k": (1, 2, 5, 10, 20, 50, 100, 1000),
    "top_p": (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
    "min_p": (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5),
    "gumbel_top_n": (1, 5, 20, 100, 1000, 10_000),
    "gumbel_tail_boost": (0.0, 0.1, 0.25, 0.5, 1.0),
    "gumbel_noise_scale": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
}


@dataclass(frozen=True)
class Setting:
    """What a request asks for; the fields that vLLM has too mean what they mean there."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    keys: GumbelParams = field(default_factory=GumbelParams)

    def at(self, name: str, value: float) -> "Setting":
        """Return this setting with one value changed; `name` is a field or a key.

        Raises:
            ParamsError: the keys contradict that value.
        """
        changed: dict[str, Any] = {name: int(value) if name in ("top_k", "gumbel_top_n") else value}
        keys: dict[str, Any] = self.keys.model_dump(exclude_unset=True)
        others: dict[str, Any] = {}
        (keys if name in GumbelParams.model_fields else others).update(changed)
        setting = replace(self, **others)
        return replace(setting, keys=GumbelParams.from_extra_args(keys, setting.temperature))


@dataclass(frozen=True)
class Effect:
    """What a setting does to one row, or to several on average.

    Attributes:
        entropy_nats: of the law that tokens are drawn from.
        kept_ids: how many ids can be drawn.
        kept_mass: share of the model's own mass, at temperature 1, that they have.
        kl_nats: Kullback-Leibler divergence of that law from the model's own.
        best: probability of the likeliest id.
    """

    entropy_nats: float
    kept_ids: float
    kept_mass: float
    kl_nats: float
    best: float


def law(logits: Row, setting: Setting) -> Law:
    """Return the probability of every id to be drawn.

    Args:
        logits: float32 [vocab].
        setting: of the request.

    Returns:
        float64 [vocab]; with `gumbel_tail_boost` the mean over `TAIL_DRAWS` draws of the noise.
    """
    strength = setting.keys.gumbel_tail_boost
    if strength == 0:
        return _law_of_fixed(logits, setting)
    boosted = (tail_noise.boost(logits, strength, 0, position) for position in range(TAIL_DRAWS))
    return np.mean([_law_of_fixed(row, setting) for row in boosted], axis=0)


def effect(logits: npt.NDArray[np.float32], setting: Setting) -> Effect:
    """Return the mean effect of a setting on rows of logits, float32 [rows, vocab]."""
    each = [_effect_on_row(row, setting) for row in logits]
    return Effect(*(float(np.mean([getattr(one, name) for one in each])) for name in Effect.__dataclass_fields__))


def sentences(setting: Setting, vocab: int) -> list[str]:
    """Return, in words and in the order in which things happen, what a setting does."""
    keys, said = setting.keys, []
    if keys.gumbel_repetition_offset > 0:
        offset = keys.gumbel_repetition_offset
        said.append(f"Tokens that would continue a loop of 3 copies or more lose {offset:g} for each copy.")
    if keys.gumbel_tail_boost > 0:
        said.append(f"Every logit gets normal noise of {keys.gumbel_tail_boost:g} times the row's standard deviation.")
    tau = _temperature(setting, vocab)
    if tau < GREEDY_TEMPERATURE:
        return [*said, "Temperature 0: the best id is taken, filters and noise play no part."]
    parts = [f"{setting.temperature:g}" if keys.gumbel_preset is None else f"preset {keys.gumbel_preset}"]
    if keys.gumbel_temperature_rule == "log_vocab":
        parts.append(f"1 + 0.1 ln {vocab}")
    said.append(f"Logits are divided by the temperature {tau:.4g} ({' times '.join(parts)}).")
    top_k = keys.top_k(setting.top_k)
    if setting.min_p > 0:
        said.append(f"Ids less likely than {setting.min_p:g} times the best are left out.")
    if 0 < top_k < vocab:
        said.append(f"Of the rest the {top_k} best stay, ties by lowest id.")
    if setting.top_p < 1:
        said.append(f"Of those the shortest ranking that holds {setting.top_p:g} of their mass stays.")
    said.append(_ending(keys))
    return said


def plot(logits: npt.NDArray[np.float32], setting: Setting, over: str, width: int = 24) -> list[str]:
    """Return lines of a plot: entropy and kept mass while one setting goes through its values."""
    effects = [(value, effect(logits, setting.at(over, value))) for value in SWEEPS[over]]
    most = max([each.entropy_nats for _, each in effects] + [1e-9])
    lines = [f"{over:>20}  {'entropy, nats':<{width + 8}}  kept mass of the model's own"]
    for value, each in effects:
        entropy = "#" * round(width * each.entropy_nats / most)
        mass = "=" * round(width * each.kept_mass)
        lines.append(f"{value:>20g}  {each.entropy_nats:6.3f} {entropy:<{width}}   {each.kept_mass:6.4f} {mass}")
    return lines


def model_logits(model: str, prompts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return a model's logits after each prompt, float32 [prompts, vocab].

    Args:
        model: folder of the model, or its name where transformers finds it.
        prompts: texts.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            rows.append(network(tokenizer(prompt, return_tensors="pt").input_ids).logits[0, -1].numpy())
    return np.stack(rows)


def _law_of_fixed(logits: Row, setting: Setting) -> Law:
    """Return the law for logits that are not changed any more."""
    x, _ = clean(logits)
    tau = _temperature(setting, len(x))
    greedy = tau < GREEDY_TEMPERATURE
    factor = 0.0 if greedy else setting.keys.gumbel_noise_scale
    if not greedy:
        x = scale(x, np.float32(tau))
        keep = kept(x, setting.keys.top_k(setting.top_k), setting.top_p, setting.min_p)
        x = np.where(keep, x, np.float32(-np.inf))
    mass = np.zeros(len(x))
    if factor == 0:
        mass[np.argmax(x)] = 1
        return mass
    mass = np.exp((x.astype(np.float64) - np.float64(x.max())) / factor)
    return mass / mass.sum()


def _effect_on_row(logits: Row, setting: Setting) -> Effect:
    q, p = law(logits, setting), law(logits, Setting())
    there = q > 0
    return Effect(
        entropy_nats=float(-(q[there] * np.log(q[there])).sum()),
        kept_ids=float(there.sum()),
        kept_mass=float(p[there].sum()),
        kl_nats=float((q[there] * (np.log(q[there]) - np.log(np.maximum(p[there], 1e-300)))).sum()),
        best=float(q.max()),
    )


def _temperature(setting: Setting, vocab: int) -> float:
    greedy = setting.temperature < GREEDY_TEMPERATURE
    return setting.temperature if greedy else setting.keys.temperature(setting.temperature, vocab)


def _ending(keys: GumbelParams) -> str:
    """Return the sentence about the draw itself."""
    if keys.gumbel_sampler == "default":
        return "vLLM's own sampler draws one of them."
    if keys.gumbel_noise_scale == 0:
        return "The best of them is taken: noise is scaled to 0."
    if keys.gumbel_noise_scale < 1:
        return f"One is drawn with noise times {keys.gumbel_noise_scale:g}, as if at that temperature once more."
    if keys.gumbel_hybrid_steps > 0:
        return f"One is drawn: the first {keys.gumbel_hybrid_steps} by inverse CDF, then by Gumbel-Max, with one law."
    return "One is drawn by Gumbel-Max, exactly by its probability."
