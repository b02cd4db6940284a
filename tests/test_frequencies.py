"""How often each token was drawn: the divergences, the file of counts, profiles, and `vllm-gumbel profile`."""

import json
import math
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest

from tests.recording import VOCAB, heard, make_recorder, step, total
from vllm_gumbel import cli
from vllm_gumbel.metrics import catalogue, exporter, frequencies
from vllm_gumbel.metrics.catalogue import DEFAULT, GUMBEL
from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE
from vllm_gumbel.metrics.frequencies import (
    INTERVAL,
    LEAST_TOKENS,
    Frequencies,
    ProfileError,
    counts_of_folder,
    divergence,
    read_profile,
    write_profile,
)
from vllm_gumbel.metrics.series import Series
from vllm_gumbel.settings import SamplerSettings

SPAWN = multiprocessing.get_context("spawn")
KL = catalogue.TOKEN_FREQUENCY_KL


class Clock:
    """Seconds that go on when they are told to."""

    now = 0.0

    def __call__(self):
        """Return the time."""
        return self.now


def make(folder, clock, profile=None, vocab=VOCAB):
    """Return what counts frequencies in a folder."""
    return Frequencies(Series(folder, model_name="m", engine=0), vocab, profile, clock=clock)


def plain_divergence(counts, reference):
    """Return KL in nats, id by id, each count plus a half over the ids that were seen."""
    seen = [i for i in range(len(counts)) if counts[i] or reference[i]]
    n, m = sum(counts[i] + 0.5 for i in seen), sum(reference[i] + 0.5 for i in seen)
    p = {i: (counts[i] + 0.5) / n for i in seen}
    return sum(p[i] * math.log(p[i] / ((reference[i] + 0.5) / m)) for i in seen)


def test_divergence_is_that_of_plain_python_and_finite_where_one_side_saw_nothing():
    generator = np.random.default_rng(0)
    for _ in range(50):
        counts, reference = generator.poisson(generator.exponential(2, (2, 40)))
        assert divergence(counts, reference) == pytest.approx(plain_divergence(counts, reference), abs=1e-12)
        assert divergence(counts, counts) == 0
    apart = divergence(np.array([1000, 0]), np.array([0, 1000]))
    assert apart == pytest.approx(math.log(2001) * 1000 / 1001, rel=1e-9)
    assert divergence(np.array([6, 0, 4]), np.array([5, 0, 5])) == pytest.approx(
        6.5 / 11 * math.log(6.5 / 5.5) + 4.5 / 11 * math.log(4.5 / 5.5)
    ), "an id that nobody saw takes no part"


def test_divergence_of_two_samples_of_one_law_is_the_floor_that_the_docstring_states():
    """(K - 1) / 2 (1 / n + 1 / m) for K ids, each seen often.

    400 pairs of samples: twice their nm / (n + m) KL is chi-square of K - 1, so the mean's relative deviation is
    sqrt(2 / (400 (K - 1))) = 0.50%; 5 of them, false alarm 6e-7, are allowed, with 1% more for what is of higher order.
    A law that differs by 7% in one tenth of the ids adds 7.9%, and is caught below.
    """
    generator, k, n, m, pairs = np.random.default_rng(3), 201, 60_000, 90_000, 400
    law = generator.uniform(0.5, 1.5, k)
    law /= law.sum()
    floor = (k - 1) / 2 * (1 / n + 1 / m)
    allowed = 5 * math.sqrt(2 / (pairs * (k - 1))) + 0.01
    same = np.mean([divergence(generator.multinomial(n, law), generator.multinomial(m, law)) for _ in range(pairs)])
    assert abs(same / floor - 1) < allowed
    other = law * np.where(np.arange(k) % 10 == 0, 1.07, 1.0)
    other /= other.sum()
    moved = np.mean([divergence(generator.multinomial(n, other), generator.multinomial(m, law)) for _ in range(pairs)])
    assert moved / floor - 1 > allowed


def test_divergences_are_shown_once_both_sides_have_enough_tokens(tmp_path):
    """0 would say that there is no difference, so there is no gauge before; and only every 10 seconds."""
    clock, profile = Clock(), tmp_path / "profile.json"
    stored = np.arange(VOCAB)
    write_profile(profile, stored)
    counting = make(tmp_path, clock, str(profile))
    generator = np.random.default_rng(1)
    counts = {arm: np.zeros(VOCAB, np.int64) for arm in (GUMBEL, DEFAULT)}

    def draw(ours, theirs):
        tokens = generator.integers(0, VOCAB, ours + theirs) // 2
        counting.record(step(*tokens, by_stock=range(ours, ours + theirs)))
        for arm, drawn in ((GUMBEL, tokens[:ours]), (DEFAULT, tokens[ours:])):
            np.add.at(counts[arm], drawn, 1)

    def shown():
        found = {}
        for family in exporter.FolderCollector(tmp_path).collect():
            for sample in family.samples:
                found[sample.labels["arm"], sample.labels["reference"]] = sample.value
        return found

    draw(LEAST_TOKENS - 1, 10)
    clock.now = INTERVAL
    counting.record(step())
    assert shown() == {}
    draw(1, LEAST_TOKENS - 11)
    clock.now = 2 * INTERVAL - 0.1
    counting.record(step())
    assert shown() == {}
    clock.now = 2 * INTERVAL
    counting.record(step())
    assert shown() == {(GUMBEL, "profile"): pytest.approx(plain_divergence(counts[GUMBEL], stored))}
    draw(0, 1)
    clock.now = 3 * INTERVAL
    counting.record(step())
    assert shown() == {
        (GUMBEL, "profile"): pytest.approx(plain_divergence(counts[GUMBEL], stored)),
        (GUMBEL, "default"): pytest.approx(plain_divergence(counts[GUMBEL], counts[DEFAULT])),
        (DEFAULT, "profile"): pytest.approx(plain_divergence(counts[DEFAULT], stored)),
    }
    assert counts_of_folder(tmp_path).tolist() == counts[GUMBEL].tolist()
    assert counts_of_folder(tmp_path, DEFAULT).tolist() == counts[DEFAULT].tolist()


def count_in_a_process_of_its_own(folder, token):
    """Be a worker that draws one token often."""
    counting = make(folder, Clock())
    counting.record(step(*[token] * 1500))
    counting.publish()


def test_counts_of_all_workers_add_up_also_of_engines_in_one_process(tmp_path):
    """One process may hold several engines, and counts past 2^32 are held."""
    for token in (5, 5, 7):
        count_in_a_process_of_its_own(tmp_path, token)
    process = SPAWN.Process(target=count_in_a_process_of_its_own, args=(tmp_path, 9))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    many = make(tmp_path, Clock())
    many._counts[GUMBEL][11] = 2**40
    many.publish()
    found = counts_of_folder(tmp_path)
    assert found.dtype == np.int64
    assert {i: int(found[i]) for i in np.flatnonzero(found)} == {5: 3000, 7: 1500, 9: 1500, 11: 2**40}


def test_profile_comes_back_as_it_was_written(tmp_path):
    counts = np.random.default_rng(0).poisson(0.5, VOCAB) * 2**33
    write_profile(tmp_path / "profile", counts)
    assert read_profile(tmp_path / "profile", VOCAB).tolist() == counts.tolist()


BAD_PROFILES = {
    "empty": "",
    "no JSON": "not a profile",
    "a list": "[1, 2]",
    "no vocabulary": '{"counts": {}}',
    "no counts": '{"vocab": 300}',
    "counts in a list": '{"vocab": 300, "counts": [1, 2]}',
    "a word for an id": '{"vocab": 300, "counts": {"x": 1}}',
    "id past the vocabulary": '{"vocab": 300, "counts": {"300": 1}}',
    "negative id": '{"vocab": 300, "counts": {"-1": 1}}',
    "negative count": '{"vocab": 300, "counts": {"1": -1}}',
    "count past 64 bits": '{"vocab": 300, "counts": {"1": 9223372036854775808}}',
    "no count": '{"vocab": 300, "counts": {"1": null}}',
    "NaN": '{"vocab": 300, "counts": {"1": NaN}}',
    "infinite": '{"vocab": Infinity, "counts": {}}',
}


@pytest.mark.parametrize("content", BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_file_that_is_no_profile_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=f"{path} is no profile of token frequencies"):
        read_profile(path, 300)


def test_profile_that_is_missing_binary_or_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        read_profile(tmp_path / "absent", 300)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is no profile"):
        read_profile(tmp_path / "binary", 300)
    for vocab in (3, 10**15):  # the latter would not fit into memory
        (tmp_path / "other").write_text(json.dumps({"vocab": vocab, "counts": {"1": 4}}))
        with pytest.raises(ProfileError, match=f"of a vocabulary of {vocab} ids, the model has 300"):
            read_profile(tmp_path / "other", 300)
    with pytest.raises(ProfileError, match="cannot be written: Is a directory"):
        write_profile(tmp_path, np.zeros(3, np.int64))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive", b"\x93NUMPY"])
def test_file_of_counts_that_is_broken_is_an_error_with_its_folder(tmp_path, content):
    with pytest.raises(ProfileError, match=f"no token frequencies in {tmp_path}"):
        counts_of_folder(tmp_path)
    count_in_a_process_of_its_own(tmp_path, 5)
    (tmp_path / "token-frequencies-9_1-gumbel.npz").write_bytes(content)
    with pytest.raises(ProfileError, match=f"the token frequencies in {tmp_path} cannot be read"):
        counts_of_folder(tmp_path)


def test_counts_of_two_models_are_no_profile(tmp_path):
    for vocab in (300, 301):
        make(tmp_path, Clock(), vocab=vocab).publish()
    with pytest.raises(ProfileError, match="cannot be read"):
        counts_of_folder(tmp_path)


def test_reader_never_finds_a_file_in_the_making(tmp_path, monkeypatch):
    counting = make(tmp_path, Clock())
    counting.record(step(4, 4))
    counting.publish()

    def fail(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frequencies.np, "savez", fail)
    with pytest.raises(OSError, match="No space left"):
        counting.publish()
    assert counts_of_folder(tmp_path)[4] == 2


def test_token_past_the_vocabulary_is_a_fault_of_this_part(tmp_path):
    recorder = make_recorder(tmp_path)
    with heard() as said:
        recorder.record(step(1, VOCAB))
    assert total(tmp_path, catalogue.FAULTS, part="frequencies") == total(tmp_path, catalogue.FAULTS) == 1
    assert "IndexError" in said[0]
    assert total(tmp_path) == 2


# -------------------------------------------------------------------------------------------------- vllm-gumbel profile


def test_command_writes_a_profile_that_a_server_takes(tmp_path, capsys, monkeypatch):
    folder, out = tmp_path / "folder", tmp_path / "profile.json"
    folder.mkdir()
    counting = make(folder, Clock())
    counting.record(step(*[3] * 1200, *[4] * 800, 5, 5, by_stock=(2000, 2001)))
    counting.publish()
    assert cli.main(["profile", str(out), "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == f"2,000 tokens, 2 ids of 300: {out}\n"
    assert {i: n for i, n in enumerate(read_profile(out, VOCAB)) if n} == {3: 1200, 4: 800}
    monkeypatch.setenv(PRIVATE_VARIABLE, str(folder))
    assert cli.main(["profile", str(out), "--arm", "default"]) == 0
    assert capsys.readouterr().out == f"2 tokens, 1 ids of 300: {out}\n"
    assert cli.main(["profile", str(out)]) == 0
    recorder = make_recorder(tmp_path, settings=SamplerSettings(token_profile=str(out)))
    recorder._parts[-1]._due = 0
    recorder.record(step(*[3] * 1200, *[4] * 800))
    assert recorder._parts[-1].name == "frequencies"
    assert total(tmp_path, KL, reference="profile", arm=GUMBEL) == 0
    recorder._parts[-1]._due = 0
    recorder.record(step(*[3] * 1000))
    expected = plain_divergence([2200, 800], [1200, 800])
    assert total(tmp_path, KL, reference="profile", arm=GUMBEL) == pytest.approx(expected)


def test_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(PRIVATE_VARIABLE, raising=False)
    count_in_a_process_of_its_own(tmp_path, 5)
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (["out"], "--folder must name the server's folder of metrics"),
        (["out", "--folder", str(tmp_path / "empty")], "no token frequencies in"),
        (["out", "--folder", str(tmp_path / "absent")], "no token frequencies in"),
        ([str(tmp_path), "--folder", str(tmp_path)], "cannot be written: Is a directory"),
    ):
        assert cli.main(["profile", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("vllm-gumbel profile: ")
        assert said in captured.err


def test_profile_that_cannot_be_used_is_an_error_of_the_recorder(tmp_path):
    with pytest.raises(ProfileError, match="absent cannot be read"):
        make_recorder(tmp_path, settings=SamplerSettings(token_profile=str(tmp_path / "absent")))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_profile_that_does_not_fit_is_refused_before_anything_starts(tmp_path, runner):
    """Not first noticed by a worker, which would draw all the same and count less than it was asked to."""
    from vllm_gumbel.integration import v1, v2
    from vllm_gumbel.settings import SettingsError

    write_profile(tmp_path / "profile.json", np.ones(7, np.int64))
    config = SimpleNamespace(
        additional_config={"sampler": "gumbel", "sampler_config": {"token_profile": str(tmp_path / "profile.json")}},
        model_config=SimpleNamespace(get_vocab_size=lambda: 300),
        speculative_config=None,
        diffusion_config=None,
    )
    with pytest.raises(SettingsError, match=r"token_profile: .*vocabulary of 7 ids, the model has 300"):
        {"v1": v1, "v2": v2}[runner].GumbelSampler.check_config(config)
