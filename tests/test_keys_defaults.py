"""Server-wide defaults of keys: a request's own key wins, and a default never makes a request fail.

The statements are checked over all pairs and triples of the values in `test_keys_pairs.py`, against the rules in words
that stand there; then in vLLM's real batch.
"""

from functools import partial
from itertools import combinations, product

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from tests.test_keys_pairs import BESIDE, VALUES, logits_of, refused_key
from tests.test_rows import filled, make_request
from tests.test_v1_sampler import batch_of, tokens_of
from vllm_gumbel.integration import plugin
from vllm_gumbel.integration.rows import settled
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.metrics import exporter
from vllm_gumbel.params import PRESETS, GumbelParams, ParamsError, ServerRules
from vllm_gumbel.settings import parse

VOCABULARY = 64
SINGLES = [{key: value} for key, values in VALUES.items() for value in values]
TEMPERATURES = [0.0, 0.75, 1.0]

#: A preset that is greedy: what it contradicts, it contradicts as a temperature of 0 does.
GREEDY = ServerRules({**PRESETS, "best": 0.0})


def with_defaults(defaults):
    return ServerRules(GREEDY.presets, defaults)


def read(keys, temperature, rules=GREEDY):
    """Return the parameters of a request, or the text of its refusal."""
    try:
        return GumbelParams.from_extra_args(keys, temperature, rules)
    except ParamsError as error:
        return str(error)


def test_one_default_is_used_exactly_where_the_request_could_have_asked_for_it_itself():
    """All pairs of a default and a key of the request, at each temperature; refusals are those of the request alone."""
    used = left_out = refused = 0
    for default, own, temperature in product(SINGLES, [{}, *SINGLES], TEMPERATURES):
        found = read(own, temperature, with_defaults(default))
        both = {**default, **own}
        if refused_key(own, temperature) is not None:
            refused += 1
            assert found == read(own, temperature)
        elif refused_key(both, temperature) is None:
            used += default.keys().isdisjoint(own)
            assert found == read(both, temperature)
        else:
            left_out += 1
            assert found == read(own, temperature)
    assert min(used, left_out, refused) > 100


def accepted_pairs():
    """Return every pair of defaults that a server may have, a greedy preset among them."""
    singles = [*SINGLES, {"gumbel_preset": "best"}]
    pairs = [{**first, **second} for first, second in combinations(singles, 2) if first.keys() != second.keys()]
    return [pair for pair in pairs if not isinstance(read(pair, 1.0), str)]


def test_of_two_defaults_as_few_as_possible_are_left_out():
    """Every default that is left out would have contradicted what the others and the request ask together."""
    pairs, left_out = accepted_pairs(), 0
    for defaults, own, temperature in product(pairs, [{}, *SINGLES, {"gumbel_preset": "best"}], TEMPERATURES):
        alone, found = read(own, temperature), read(own, temperature, with_defaults(defaults))
        if isinstance(alone, str):
            assert found == alone
            continue
        asked = found.model_dump(exclude_unset=True)
        assert own.items() <= asked.items() <= {**defaults, **own}.items()
        for key in defaults.keys() - asked.keys():
            left_out += 1
            assert "contradicts" in read({**asked, key: defaults[key]}, temperature)
    assert len(pairs) > 200
    assert left_out > 1_000


@pytest.mark.parametrize(
    ("own", "temperature", "said"),
    [
        ({"gumbel_noise_scale": 0.5}, 1.0, None),
        ({"gumbel_preset": "best", "gumbel_noise_scale": 0.5}, 1.0, "gumbel_noise_scale contradicts temperature 0: "),
        ({"gumbel_preset": "best", "gumbel_tail_boost": 1}, 1.0, "gumbel_tail_boost contradicts temperature 0: "),
        ({"gumbel_preset": "best", "gumbel_salt": 1}, 1.0, None),
    ],
)
def test_greedy_preset_contradicts_what_temperature_0_contradicts(own, temperature, said):
    found = read(own, temperature)
    assert isinstance(found, GumbelParams) if said is None else found.startswith(said)


def test_greedy_preset_is_greedy_in_vllms_own_words():
    given = SamplingParams(temperature=1.0, top_k=3, seed=1)
    assert given.sampling_type.name == "RANDOM_SEED"  # which vLLM caches on the object
    keys = read({"gumbel_preset": "best"}, 1.0)
    assert settled(given, keys, 50, GREEDY).sampling_type.name == "GREEDY"
    assert (given.temperature, given.sampling_type.name) == (1.0, "RANDOM_SEED")


@pytest.fixture
def stock_kernels():
    """Stock's own draw needs what a worker loads."""
    current_platform.import_kernels()


@pytest.mark.usefixtures("stock_kernels")
def test_batch_draws_with_the_defaults_as_if_requests_had_set_them():
    """Every value of every key as a default; among the rows some that set the key themselves, and greedy ones."""
    processors = batch_of([], VOCABULARY).logitsprocs
    own = [{}, {"gumbel_noise_scale": 0.75}, {"gumbel_sampler": "gumbel"}, {"gumbel_preset": "creative"}]
    rows = [(keys, beside) for beside in BESIDE for keys in own if refused_key(keys, beside["temperature"]) is None]
    logits, changed = logits_of(len(rows), 9), 0

    def drawn(asked, **server):
        requests = [
            make_request(
                str(i),
                output=(9, 5, 6, 5, 6, 5, 6),
                seed=i,
                generator=torch.Generator().manual_seed(i),
                extra_args=keys,
                **beside,
            )
            for i, (keys, (_, beside)) in enumerate(zip(asked, rows, strict=True))
        ]
        batch = filled(requests, vocabulary=VOCABULARY, processors=processors, **server)
        return tokens_of(GumbelSampler()(logits.clone(), batch.sampling_metadata))

    plain = drawn([keys for keys, _ in rows])
    for default in [*SINGLES, {"gumbel_preset": "best"}]:
        if "gumbel_salt" in default:
            continue  # a field of its own
        rules = with_defaults(default)
        expected = [read(keys, beside["temperature"], rules).model_dump(exclude_unset=True) for keys, beside in rows]
        found = drawn([keys for keys, _ in rows], rules=rules)
        assert found == drawn(expected, rules=GREEDY), default
        changed += found != plain
    assert changed >= 8


def test_server_checks_requests_by_its_own_presets():
    settings = parse({"presets": {"calm": 0.3}, "request_defaults": {"gumbel_noise_scale": 0.5}})
    calm = SamplingParams(extra_args={"gumbel_preset": "calm"})
    GumbelSampler.validate_params(calm, settings)
    GumbelSampler.validate_params(SamplingParams(temperature=0), settings)
    with pytest.raises(ParamsError, match="gumbel_preset must be one of creative, factual, got 'calm'"):
        GumbelSampler.validate_params(calm)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_integer_past_64_bits_is_refused_by_the_name_of_its_key_and_counted(value, tmp_path, monkeypatch):
    """vLLM refuses it first, without saying which key; for keys of others its text stays."""
    monkeypatch.delenv(exporter.HOST_VARIABLE, raising=False)
    monkeypatch.setenv(exporter.PRIVATE_VARIABLE, str(tmp_path))
    original = getattr(SamplingParams.from_optional, "__wrapped__", SamplingParams.from_optional)
    ask = partial(plugin._from_optional, partial(plugin._validate, GumbelSampler, parse(None)), original)
    with pytest.raises(VLLMValidationError, match=rf"^gumbel_salt must be an integer .*, got {value} ") as refused:
        ask(extra_args={"gumbel_salt": value}, temperature=None)
    assert refused.value.parameter == "gumbel_salt"
    samples = [sample for each in exporter.FolderCollector(tmp_path).collect() for sample in each.samples]
    assert [s.value for s in samples if s.labels.get("key") == "gumbel_salt" and s.name.endswith("_total")] == [1]
    with pytest.raises(VLLMValidationError, match=r"^extra_args integers must be between"):
        ask(extra_args={"of_somebody_else": value, "gumbel_salt": 1})
    assert ask(extra_args={"gumbel_salt": 2**64 - 1}).extra_args == {"gumbel_salt": 2**64 - 1}
