"""What a keyed sampler makes possible: comparing, verifying and replaying generated texts."""
