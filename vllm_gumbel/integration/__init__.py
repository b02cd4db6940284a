"""Everything that touches vLLM; `plugin.py` keeps the ledger of what is replaced there."""
