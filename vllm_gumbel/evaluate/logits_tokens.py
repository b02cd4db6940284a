"""The token ids of a record: its own, checked against the verifier's tokenizer, or those of its texts."""

from typing import Any, NamedTuple

from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.text import shorten


class TokensError(Exception):
    """A record's tokens are unknown, or not those of this tokenizer; the message says how."""


class Tokens(NamedTuple):
    """What was fed and what came.

    Attributes:
        prompt: ids before the text.
        output: ids of the text.
        notes: what a reader should know, in words.
    """

    prompt: list[int]
    output: list[int]
    notes: list[str]


def tokens_of(record: Record, tokenizer: Any, vocab: int) -> Tokens:
    """Return the ids of a record.

    Args:
        record: with ids or texts.
        tokenizer: transformers' own.
        vocab: how many ids the model has.

    Raises:
        TokensError: there is neither ids nor text, the prompt is empty, or the tokenizer does not match.
    """
    if record.error is not None:
        raise TokensError(f"there is no text: {record.error}")
    notes: list[str] = []
    prompt, output = record.prompt_token_ids, record.output_token_ids
    for name, ids in (("prompt", prompt), ("output", output)):
        if ids and max(ids) >= vocab:
            raise TokensError(f"the tokenizer does not match: the {name} holds id {max(ids)}, the model has {vocab}")
    if prompt is None:
        prompt = _prompt_from_text(record, tokenizer)
        notes.append("the ids of the prompt are not recorded: they are those of this tokenizer")
    elif record.prompt is not None and record.messages is None:
        _require_same(tokenizer, prompt, record.prompt, "prompt")
    if output is None:
        if record.output is None:
            raise TokensError("there are neither ids nor text of the output")
        output = _ids(tokenizer, record.output, special=False)
        _require_same(tokenizer, output, record.output, "output")
        notes.append(
            "the ids of the output are not recorded: they are those of this tokenizer, which may cut the text into "
            "other tokens than came"
        )
    elif record.output is not None:
        shown = bool(record.params.get("skip_special_tokens", True))
        _require_same(tokenizer, output, record.output, "output", skip_special=shown)
    if not prompt:
        raise TokensError("the prompt has no tokens")
    return Tokens(prompt, output, notes)


def _prompt_from_text(record: Record, tokenizer: Any) -> list[int]:
    if record.messages is not None:
        try:
            ids = tokenizer.apply_chat_template(record.messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs of their own
            raise TokensError(f"the tokenizer cannot write this chat: {error}") from error
        return list(ids)
    if record.prompt is None:
        raise TokensError("there are neither ids nor text of the prompt")
    ids = _ids(tokenizer, record.prompt, special=True)
    _require_same(tokenizer, ids, record.prompt, "prompt")
    return ids


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special))


def _require_same(tokenizer: Any, ids: list[int], text: str, name: str, *, skip_special: bool = True) -> None:
    """Raise `TokensError` if ids do not stand for a text.

    A text may end before its tokens do, in a stop string say, and spaces at its ends are a tokenizer's to add or drop.
    """
    decoded = {
        tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False).strip()
        for skip in {skip_special, False}
    }
    wanted = text.rstrip("\ufffd").strip()
    if any(each.startswith(wanted) for each in decoded):
        return
    found = shorten(min(decoded, key=len), 60)
    raise TokensError(
        f"the tokenizer does not match: the ids of the {name} read {found}, the text is {shorten(text, 60)}"
    )
