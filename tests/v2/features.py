"""Requests for what vLLM can do, by the name that the README's table of features has, and what is compared of answers.

Each is seeded, greedy or leaves no choice, so that runner V2 must answer as V1 does.
"""

END = 2  # ends a text of the default model
BOOLEANS = {"type": "array", "items": {"type": "boolean"}}

#: name -> (prompt, fields of `SamplingParams`, what ends the texts).
FEATURES = {
    "n": ("Once upon a time", {"n": 3, "temperature": 1.2, "seed": 5}, "length"),
    "stop": ("1, 2, 3,", {"temperature": 0, "stop": [" 5"]}, "stop"),
    "stop_token_ids": ("1, 2, 3,", {"temperature": 0, "stop_token_ids": [28]}, "stop"),
    "ignore_eos": ("One", {"temperature": 0, "logit_bias": {END: 100.0}, "ignore_eos": True}, "length"),
    "min_tokens": ("One", {"temperature": 0, "logit_bias": {END: 100.0}, "min_tokens": 3}, "stop"),
    "max_tokens": ("Once upon a time", {"temperature": 0, "max_tokens": 2}, "length"),
    "repetition": ("a a", {"temperature": 0, "logit_bias": {300: 100.0}, "detected": (2, 1, 3)}, "repetition"),
    "logprobs 0": ("Once upon a time", {"temperature": 0.9, "seed": 3, "logprobs": 0}, "length"),
    "logprobs of ids": ("Once upon a time", {"temperature": 0, "logprob_token_ids": [28, 9, 400]}, "length"),
    "prompt_logprobs": ("Once upon a time", {"temperature": 0, "prompt_logprobs": 2}, "length"),
    "JSON": ("A list:", {"temperature": 0, "structured": {"json": BOOLEANS}}, "length"),
    "regex": ("A number: ", {"temperature": 1.0, "seed": 4, "structured": {"regex": "[0-9]{3}"}}, "stop"),
    "choice": ("Well? ", {"temperature": 1.5, "seed": 9, "structured": {"choice": ["certainly", "never"]}}, "stop"),
    "grammar": ("A: ", {"temperature": 1.0, "seed": 2, "structured": {"grammar": 'root ::= "x" [abc] "y"'}}, "stop"),
}
#: Of each request unless it says otherwise.
TOKENS = 5


def answers(llm):
    """Return, by name, what an engine answers to all of them at once, as JSON has it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    params = []
    for _, fields, _ in FEATURES.values():
        fields = {"max_tokens": TOKENS, **fields}
        if "structured" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields.pop("structured"))
        if "detected" in fields:
            fields["repetition_detection"] = RepetitionDetectionParams(*fields.pop("detected"))
        params.append(SamplingParams(**fields))
    outputs = llm.generate([prompt for prompt, _, _ in FEATURES.values()], params, use_tqdm=False)
    return {
        name: {
            "choices": [
                [list(each.token_ids), each.text, each.finish_reason, each.stop_reason, _plain(each.logprobs)]
                for each in output.outputs
            ],
            "prompt": _plain(output.prompt_logprobs),
        }
        for name, output in zip(FEATURES, outputs, strict=True)
    }


def _plain(logprobs):
    """Return logprobs of positions as lists of ids, ranks and values."""
    if logprobs is None:
        return None
    return [
        None if at is None else sorted([token, each.rank, each.logprob] for token, each in at.items())
        for at in logprobs
    ]
