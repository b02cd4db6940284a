"""The mathematics of the sampler; nothing of vLLM here.

One row of logits, one token. As a loop:

    for i in range(V):
        x[i] = float32(logit[i])                # NaN, or an id past the tokenizer's size: -inf
    if temperature < 1e-5:
        token = first i with the largest x[i]   # greedy
    else:
        for i in range(V):
            x[i] = x[i] / temperature
        keep = all i with x[i] > -inf
        keep = those with x[i] >= max(x) + ln(min_p)               # if min_p > 0
        keep = the top_k best, by (x descending, id ascending)     # if 0 < top_k < V: exactly k
        keep = shortest prefix of that ranking with a share of the mass >= top_p    # if top_p < 1: never empty
        token = argmax over keep of x[i] + G(seed, position, i)    # equal scores: lowest id

Modules:
    contract            shapes, dtypes, constants, streams, the input check
    dispatch            picks a backend and says why
    noise_reference     the noise G in NumPy, the definition
    sample_reference    the draw in NumPy, the definition
    noise_numba         the same noise for CPUs
    sample_numba        the same draw for CPUs: one call a batch, straight from the logits
    statistics          what a draw says about itself, and the check of its arguments
    statistics_reference, statistics_numba, statistics_torch
                        those numbers in NumPy, the definition; for CPUs; and where the logits are, all but the noise
    slots               parameters by request slot, as vLLM's model runner V2 keeps them
    noise_triton        the same noise for GPUs
    noise_stock_triton  vLLM's own noise
    sample_triton       the same draw for GPUs, from slots, without waiting for the device
    plan_triton         launches and bytes of a draw
    *_numba, *_triton   the parts of those draws
"""
