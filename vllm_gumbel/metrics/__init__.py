"""What the sampler counts and how it reaches `/metrics`; nothing of vLLM here."""
