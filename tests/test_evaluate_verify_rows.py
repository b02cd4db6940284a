"""The laws that a verdict rests on are probabilities, and the claimed one names the token that the sampler draws."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_gumbel.evaluate import likelihood_row
from vllm_gumbel.evaluate.likelihood import DIFFERS, MATCHES, UNDECIDED, judge, laws, of_many
from vllm_gumbel.evaluate.likelihood_row import TokenRow
from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.evaluate.replayed import Claim, Vocabulary, drawn
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import RowParams

FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "cold": {"temperature": 0.3, "top_p": 0.95},
    "scaled": {"gumbel_noise_scale": 0.5, "top_p": 0.9},
    "hybrid": {"gumbel_hybrid_steps": 9, "top_p": 0.9},
    "greedy": {"temperature": 0},
    "stock": {"noise": "stock", "top_p": 0.9},
}


def claim_of(vocab, *, noise="gumbel", **params):
    record = Record(id="one", params={"temperature": 0.8, "seed": 11, **params}, noise=noise)
    return Claim.of(record, Vocabulary(vocab, vocab, frozenset(), list))


def logits_of(vocab, rng):
    return (rng.normal(size=vocab) * 2.5).astype(np.float32)


@pytest.mark.parametrize("name", FILTERS)
def test_every_law_is_a_probability(name):
    """3 rows of 40 ids under all laws: chances add up to 1, whatever the tolerance, to 1e-6."""
    rng = np.random.default_rng(1)
    claim = claim_of(40, **FILTERS[name])
    for position, tolerance in enumerate((0.001, 0.05, 0.5)):
        logits, tried = logits_of(40, rng), laws(claim, tolerance)
        rows = [TokenRow(logits, claim, tried[0], position, token, 0) for token in range(40)]
        for law in tried:
            assert sum(row.chance(law) for row in rows) == pytest.approx(1, abs=1e-6), law


@pytest.mark.parametrize("name", FILTERS)
def test_no_law_exceeds_a_probability_where_only_a_part_of_the_vocabulary_is_looked_at(name, monkeypatch):
    """A row of 600 ids, of which the 40 best and the lucky are looked at: chances add up to 1 at most, to 1e-3."""
    monkeypatch.setattr(likelihood_row, "HEAD", 40)
    rng = np.random.default_rng(2)
    claim, logits = claim_of(600, **FILTERS[name]), logits_of(600, rng)
    tried = laws(claim, 0.05)
    rows = [TokenRow(logits, claim, tried[0], 3, token, 0) for token in range(600)]
    for law in tried[::3]:
        assert sum(row.chance(law) for row in rows) < 1 + 1e-3, law
    assert sum(row.chance(tried[0]) for row in rows) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("spread", [0.3, 2.5])
@pytest.mark.parametrize("head", [3, 40, 2048])
@pytest.mark.parametrize("name", [name for name in FILTERS if name not in ("scaled", "hybrid", "stock")])
def test_match_is_what_the_reference_draws(name, head, spread, monkeypatch):
    """200 rows of 500 ids: exactly the reference's token matches, however little of the vocabulary is looked at.

    In nearly flat rows one winner in fifty is neither among the best 40 nor lucky.
    """
    monkeypatch.setattr(likelihood_row, "HEAD", head)
    rng = np.random.default_rng(3)
    claim = claim_of(500, **FILTERS[name])
    for position in range(200):
        logits = logits_of(500, rng) * np.float32(spread / 2.5)
        given = {"temperature": claim.temperature, "top_k": claim.top_k, "top_p": claim.top_p, "min_p": claim.min_p}
        params = RowParams.uniform(1, **given, seed=claim.seed or 0, position=position)
        whole = logits.copy()
        token = int(sample_reference.draw(logits[None], params).tokens[0])
        assert drawn(logits, claim, position, 0) == token
        law = laws(claim, 0.001)[0]
        look = TokenRow(logits, claim, law, position, token, 0).look()
        assert look.match, (position, look)
        assert look.kept
        assert look.rank == 1
        assert look.margin >= 0
        logits[token] = -np.inf
        second = int(sample_reference.draw(logits[None], params).tokens[0])
        assert not TokenRow(whole, claim, law, position, second, 0).look().match


@pytest.mark.parametrize("name", ["scaled", "hybrid", "stock"])
def test_match_is_what_a_replay_draws(name):
    """100 rows of 500 ids."""
    rng = np.random.default_rng(4)
    claim = claim_of(500, **FILTERS[name])
    for position in range(100):
        logits = logits_of(500, rng)
        token = drawn(logits, claim, position, 0)
        law = laws(claim, 0.001)[0]
        assert TokenRow(logits, claim, law, position, token, 0).look().match
        assert not TokenRow(logits, claim, law, position, (token + 1) % 500, 0).look().match


def test_edges_of_a_kept_set_move_with_the_disagreement():
    """A token just outside top_p, by value or by mass, costs a few nats, where a strange one costs 16 or more."""
    rng, hardest = np.random.default_rng(5), 0.0
    claim = claim_of(200, top_p=0.9, temperature=1.0)
    for position in range(100):
        logits = logits_of(200, rng)
        moved = (logits + rng.normal(scale=0.05, size=200)).astype(np.float32)
        token = drawn(moved, claim, position, 0)
        law = laws(claim, 0.05)[0]
        hardest = min(hardest, np.log(TokenRow(logits, claim, law, position, token, 0).chance(law)))
    assert hardest > -12


def test_edges_of_a_kept_set_move_by_mass_too():
    """The best id has 0.9002 of the mass, the next one 1/600: top_p 0.9 keeps one id here, and two on a server whose
    logits are lower by 0.002. The second one is certain to have won where its noise is large."""
    claim = claim_of(61, top_p=0.9, temperature=1.0)
    logits = np.log(np.r_[0.9002, np.full(60, 0.0998 / 60)]).astype(np.float32)
    law = laws(claim, 0.05)[0]
    won = [place for place in range(3000) if np.subtract(*claim.noise(place, np.arange(2))) < -7]
    assert won
    for place in won:
        assert TokenRow(logits, claim, law, place, 1, 0).chance(law) > 0.01


def test_numbers_of_a_judgement_are_those_of_its_chances():
    """40 tokens of chance 1/2 under the claim and 1/8 if the noise is not known; then one other law gives them 1."""
    tried = laws(claim_of(10), 0.05)
    chances = np.full((40, len(tried)), 1e-9)
    chances[:, 0], chances[:, 1] = 0.5, 0.125
    matching = judge(chances, tried, 1e-3)
    assert matching.evidence_for == pytest.approx(40 * np.log10(4))
    assert (matching.verdict, matching.decided_at) == (MATCHES, 4)  # 4^5 is the first power above 1,000
    place = next(index for index, law in enumerate(tried) if law.name == "temperature 1.2")
    chances[:, place] = 1.0
    share = 1 / 5 / sum(law.family == "temperature" for law in tried)
    differing = judge(chances, tried, 1e-3)
    assert differing.evidence_against == pytest.approx(40 * np.log10(2) + np.log10(share))
    assert differing.decided_at == int(np.ceil(np.log2(1000 / share))) - 1
    assert differing.explanation == "temperature 1.2 explains it 10^12 times better than the claimed 0.8"


def chances_of(claim, tolerance, tokens, draw, rng, vocab=64):
    """Return chances of every token of a text, whose tokens come from `draw(logits, claim, position)`."""
    tried, found = laws(claim, tolerance), []
    for position in range(tokens):
        logits = logits_of(vocab, rng)
        row = TokenRow(logits, claim, tried[0], position, draw(logits, claim, position), position)
        found.append([row.chance(law) for law in tried])
    return np.array(found), tried


def by_its_own_law(logits, claim, position, rng):
    """Return a token that is drawn from the claimed law itself."""
    law = laws(claim, 0.05)[0]
    chances = [TokenRow(logits, claim, law, position, token, position).chance(law) for token in range(len(logits))]
    return int(rng.choice(len(logits), p=np.array(chances) / sum(chances)))


def test_false_alarms_are_as_rare_as_promised():
    """60 texts of 12 tokens that follow P0, at alpha 0.05. Ville: 3 alarms on average at most; 15 or more would have a
    chance of 2e-7, while a verdict that forgot the weights of its laws would give alarms in most of them."""
    rng, alarms = np.random.default_rng(6), 0
    for text in range(60):
        claim = claim_of(24, seed=text, top_p=0.9)
        found, tried = chances_of(claim, 0.05, 12, lambda x, c, p: by_its_own_law(x, c, p, rng), rng, vocab=24)
        alarms += judge(found, tried, 0.05).verdict == DIFFERS
    assert alarms < 15


def test_texts_of_another_seed_seldom_match():
    """300 texts of 10 tokens drawn with another seed, at alpha 0.05: 15 matches on average at most; 36 or more would
    have a chance of 5e-7."""
    rng, matches = np.random.default_rng(7), 0
    for text in range(300):
        claim = claim_of(24, seed=text)
        other = replace(claim, seed=text + 10**6)
        found, tried = chances_of(claim, 0.05, 10, lambda x, c, p, o=other: drawn(x, o, p, p), rng, vocab=24)
        matches += judge(found, tried, 0.05).verdict == MATCHES
    assert matches < 36


def test_no_tokens_are_undecided():
    claim = claim_of(10)
    tried = laws(claim, 0.05)
    assert judge(np.empty((0, len(tried))), tried, 1e-3).verdict == UNDECIDED


def test_totals_say_what_a_share_of_alarms_is_worth():
    claim = claim_of(24)
    found, tried = chances_of(claim, 0.05, 10, lambda x, c, p: drawn(x, c, p, p), np.random.default_rng(8), vocab=24)
    honest = judge(found, tried, 0.01)
    alarm = replace(honest, verdict=DIFFERS)
    totals = of_many([honest] * 98 + [alarm] * 2, 0.01)
    assert (totals.judged, totals.differ, totals.expected) == (100, 2, 1.0)
    assert totals.chance == pytest.approx(1 - 0.99**100 - 100 * 0.01 * 0.99**99, rel=1e-9)


def test_texts_as_one_show_what_no_single_one_does():
    """Disagreement of twice the tolerance: of 60 texts of 20 tokens some law is found by all together."""
    rng, texts, honest = np.random.default_rng(9), [], []
    for seed in range(60):
        claim = claim_of(24, seed=seed)
        for kept, size in ((texts, 0.2), (honest, 0.05)):

            def draw(logits, claim, position, size=size):
                moved = logits + rng.logistic(scale=size / 2**0.5, size=len(logits))
                return drawn(moved.astype(np.float32), claim, position, position)

            kept.append(judge(*chances_of(claim, 0.05, 20, draw, rng, vocab=24), 1e-3))
    totals = of_many(texts, 1e-3)
    assert totals.differ < 10
    assert totals.verdict == DIFFERS
    assert "logits that differ by about" in totals.explanation
    assert of_many(honest, 1e-3).verdict == MATCHES
