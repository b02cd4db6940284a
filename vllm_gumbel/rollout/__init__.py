"""Which sampler draws a request, and how a server goes from one to the other."""
