"""What vLLM can do, and which tests show that it can with `--sampler gumbel`: the rows of the README's table.

`scripts/parity_matrix.py` writes that table from the results of these tests.
"""

from typing import NamedTuple

#: What the first test compares with vLLM's own sampler.
EQUAL = "equal"
OWN = "own noise, repeats"
SCHEDULE = "as without it"
REFUSED = "refused by both"
ALONE = "not compared"

DRAWS = "tests/parity/test_parity_draws.py"
STOPS = "tests/parity/test_parity_stops.py"
LOGITS = "tests/parity/test_parity_logits.py"
LOGPROBS = "tests/parity/test_parity_logprobs.py"
STRUCTURED = "tests/parity/test_parity_structured.py"
ENDPOINTS = "tests/parity/test_parity_endpoints.py"
ENGINES = "tests/parity/test_parity_engines.py"
COMMANDS = "tests/parity/test_parity_commands.py"
SERVER, SPECULATIVE = "tests/test_server.py", "tests/test_speculative.py"
TENSOR, TOPOLOGIES = "tests/test_tensor_parallel.py", "tests/test_topologies.py"

#: Checks of runner V2, in Triton's interpreter.
V2_DEFINITION = "tests/v2/check_draws.py::test_tokens_are_the_definitions"
V2_EDITS = "tests/v2/check_draws.py::test_everything_before_the_draw_acts_as_under_runner_v1"
V2_LOGPROBS = "tests/v2/check_outputs.py::test_logprobs_are_those_of_the_definition_in_every_mode"
V2_DRAFTS = "tests/v2/check_drafts.py::test_tokens_and_logprobs_with_drafts_are_those_without"
V2_ENGINE = "tests/test_v2_engine.py"
V2_FEATURE = f"{V2_ENGINE}::test_feature_acts_as_under_runner_v1"


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
        name: of what a request or a server asks for.
        compared: with stock.
        tests: that show it under runner V1, as file::function; the first is named in the table.
        v2: the check that shows it under runner V2; None if none does.
    """

    name: str
    compared: str
    tests: tuple[str, ...]
    v2: str | None = None


FEATURES = (
    Feature(
        "temperature 0",
        EQUAL,
        (f"{DRAWS}::test_greedy_text_is_stocks",),
        f"{V2_ENGINE}::test_tokens_and_logprobs_are_those_of_runner_v1",
    ),
    Feature(
        "`temperature`",
        OWN,
        (f"{DRAWS}::test_temperature_moves_both_from_the_greedy_text_and_more_the_hotter",),
        V2_DEFINITION,
    ),
    Feature("`top_k`", OWN, (f"{DRAWS}::test_top_k_holds_for_both",), V2_DEFINITION),
    Feature("`top_p`", OWN, (f"{DRAWS}::test_top_p_holds_for_both",), V2_DEFINITION),
    Feature("`min_p`", OWN, (f"{DRAWS}::test_min_p_holds_for_both",), V2_DEFINITION),
    Feature(
        "filters that leave one id",
        EQUAL,
        (f"{DRAWS}::test_text_that_a_filter_leaves_no_choice_is_stocks",),
        V2_DEFINITION,
    ),
    Feature(
        "`seed`",
        OWN,
        (f"{DRAWS}::test_seed_repeats_a_text_and_another_seed_does_not",),
        "tests/v2/check_draws.py::test_tokens_are_those_of_runner_v1",
    ),
    Feature("`n`", OWN, (f"{DRAWS}::test_completions_of_one_request_are_as_many_and_as_different",), V2_FEATURE),
    Feature("`stop`", EQUAL, (f"{STOPS}::test_stop_strings_end_both_at_one_place",), V2_FEATURE),
    Feature("`stop_token_ids`", EQUAL, (f"{STOPS}::test_stop_token_ids_end_both_at_one_place",), V2_FEATURE),
    Feature("`ignore_eos`", EQUAL, (f"{STOPS}::test_end_of_sequence_ends_both_unless_it_is_ignored",), V2_FEATURE),
    Feature("`min_tokens`", EQUAL, (f"{STOPS}::test_min_tokens_puts_off_the_end_and_the_stops",), V2_EDITS),
    Feature("`max_tokens`", EQUAL, (f"{STOPS}::test_max_tokens_is_the_length",), V2_FEATURE),
    Feature("`logprobs` 0", EQUAL, (f"{LOGPROBS}::test_logprobs_of_the_drawn_token_alone",), V2_FEATURE),
    Feature("`logprobs` 5", EQUAL, (f"{LOGPROBS}::test_logprobs_of_the_five_best",), V2_LOGPROBS),
    Feature("`logprobs` -1", EQUAL, (f"{LOGPROBS}::test_logprobs_of_all_ids",)),
    Feature("the four `--logprobs-mode`", EQUAL, (f"{ENGINES}::test_logprobs_of_every_mode_are_stocks",), V2_LOGPROBS),
    Feature("`prompt_logprobs`", EQUAL, (f"{LOGPROBS}::test_logprobs_of_the_prompt",), V2_FEATURE),
    Feature("`logprob_token_ids`", EQUAL, (f"{LOGPROBS}::test_logprobs_of_chosen_ids",), V2_FEATURE),
    Feature(
        "presence, frequency and repetition penalties",
        EQUAL,
        (f"{LOGITS}::test_penalties_change_what_they_change_for_stock",),
        V2_EDITS,
    ),
    Feature("`bad_words`", EQUAL, (f"{LOGITS}::test_bad_words_are_said_by_neither",), V2_EDITS),
    Feature("`logit_bias`", EQUAL, (f"{LOGITS}::test_logit_bias_moves_both",), V2_EDITS),
    Feature("`allowed_token_ids`", EQUAL, (f"{LOGITS}::test_allowed_token_ids_are_all_that_is_said",), V2_EDITS),
    Feature("JSON by a schema", EQUAL, (f"{STRUCTURED}::test_json_by_a_schema",), V2_FEATURE),
    Feature("text by a regex", EQUAL, (f"{STRUCTURED}::test_text_by_a_regex",), V2_FEATURE),
    Feature("choice of texts", EQUAL, (f"{STRUCTURED}::test_choice_of_texts",), V2_FEATURE),
    Feature("text by a grammar", EQUAL, (f"{STRUCTURED}::test_text_by_a_grammar",), V2_FEATURE),
    Feature("`thinking_token_budget`", EQUAL, (f"{STOPS}::test_thinking_budget_ends_a_thought",)),
    Feature(
        "`repetition_detection`",
        EQUAL,
        (f"{STOPS}::test_repetition_that_is_detected_ends_both_at_one_place",),
        V2_FEATURE,
    ),
    Feature("streaming", EQUAL, (f"{ENDPOINTS}::test_streams_say_what_whole_answers_say",)),
    Feature("beam search", EQUAL, (f"{ENDPOINTS}::test_beams_are_stocks",)),
    Feature("LoRA", EQUAL, (f"{ENDPOINTS}::test_adapter_speaks_as_for_stock",)),
    Feature(
        "prefix caching",
        EQUAL,
        (
            f"{ENDPOINTS}::test_prompt_in_chunks_and_from_the_cache_gives_stocks_text",
            f"{SERVER}::test_tokens_equal_those_of_another_schedule",
        ),
    ),
    Feature(
        "chunked prefill",
        EQUAL,
        (
            f"{ENDPOINTS}::test_prompt_in_chunks_and_from_the_cache_gives_stocks_text",
            f"{SERVER}::test_seeded_prompt_longer_than_a_chunk_completes",
        ),
        f"{V2_ENGINE}::test_tokens_do_not_depend_on_backend_or_schedule",
    ),
    Feature(
        "preemption under a small cache",
        EQUAL,
        (f"{ENDPOINTS}::test_preempted_texts_are_stocks", f"{SERVER}::test_tokens_equal_those_of_another_schedule"),
        "tests/v2/check_table.py::test_table_is_that_of_plain_dictionaries_after_every_step",
    ),
    Feature(
        "asynchronous scheduling",
        SCHEDULE,
        (f"{SERVER}::test_tokens_equal_those_of_another_schedule",),
        f"{V2_ENGINE}::test_tokens_and_logprobs_are_those_of_runner_v1",
    ),
    Feature(
        "n-gram speculation",
        SCHEDULE,
        (f"{SPECULATIVE}::test_drafts_change_no_token_and_no_logprob",),
        V2_DRAFTS,
    ),
    Feature(
        "speculation by a draft model",
        SCHEDULE,
        (
            f"{ENGINES}::test_drafts_of_a_model_change_no_token_and_no_logprob",
            f"{ENGINES}::test_greedy_tokens_with_drafts_are_stocks",
            f"{ENGINES}::test_drafts_of_a_model_are_accepted_and_rejected",
        ),
        f"{V2_ENGINE}::test_drafts_change_no_token",
    ),
    Feature("tensor parallel 2", SCHEDULE, (f"{TENSOR}::test_two_workers_draw_as_one",)),
    Feature(
        "data parallel 2", ALONE, (f"{TOPOLOGIES}::test_two_replicas_behind_two_api_servers_count_each_token_once",)
    ),
    Feature(
        "`--api-server-count` 2",
        ALONE,
        (f"{TOPOLOGIES}::test_two_replicas_behind_two_api_servers_count_each_token_once",),
    ),
    Feature("sleep and wake", REFUSED, (f"{COMMANDS}::test_sleep_is_refused_on_a_cpu_by_vllm_itself",)),
    Feature("`vllm run-batch`", EQUAL, (f"{COMMANDS}::test_batch_of_a_file_is_answered_as_by_stock",)),
    Feature("`vllm bench serve`", EQUAL, (f"{COMMANDS}::test_benchmark_of_a_server_ends_as_with_stock",)),
    Feature("chat endpoint", EQUAL, (f"{ENDPOINTS}::test_chat_is_stocks",)),
    Feature("completions endpoint", EQUAL, (f"{ENDPOINTS}::test_completions_of_several_prompts_are_stocks",)),
    Feature("responses endpoint", EQUAL, (f"{ENDPOINTS}::test_responses_are_stocks",)),
)
