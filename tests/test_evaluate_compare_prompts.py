"""Prompts: the built-in sets, and what is refused in a file of them."""

import pytest

from vllm_gumbel.evaluate.prompts import TASKS, PromptError, built_in, digest, read


def test_built_in_prompts_are_twelve_a_task_with_references_where_they_make_sense():
    prompts = built_in()
    assert len({prompt.id for prompt in prompts}) == len({prompt.salt for prompt in prompts}) == 12 * len(TASKS)
    assert {prompt.task for prompt in prompts if prompt.references} == {"facts", "summary"}
    assert all(prompt.references for prompt in prompts if prompt.task in ("facts", "summary"))
    assert all(prompt.task == prompt.id.rpartition("-")[0] for prompt in prompts)
    assert max(prompt.salt for prompt in prompts) < 2**53
    assert digest(prompts) != digest(prompts[:-1])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a"', "line 2: no JSON"),
        (b'{"prompt": "a"}\n{"id": "2", "prompt": "a"}', "line 3: id '2' is that of an earlier line too"),
        (b'{"prompt": 3}', "line 2: prompt: Input should be a valid string"),
        (b'{"id": "x"}', "line 2: must have `prompt` or `messages`, and not both"),
        (b'{"prompt": "a", "messages": [{"role": "user"}]}', "line 2: must have `prompt` or `messages`, and not both"),
        (b'{"prompt": "a", "seed": 3}', "line 2: seed: Extra inputs are not permitted"),
        (b'"a"', "line 2: must be an object"),
        (b'{"prompt": "\\ud800"}', "line 2: half of a pair of surrogates"),
        (b'{"prompt": "\xff"}', "is no text in UTF-8: byte"),
        (b"[" * 100_000, "line 2:"),
    ],
)
def test_broken_prompts_are_refused_with_the_line(tmp_path, line, said):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line)
    with pytest.raises(PromptError, match=r"p\.jsonl") as error:
        read(path)
    assert said in str(error.value)
    path.write_bytes(b"\n \n")
    with pytest.raises(PromptError, match="has no prompt"):
        read(path)
