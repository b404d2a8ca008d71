"""decaylab in the tools people train with: Lightning, Hugging Face, and trackers of experiments.

Each module needs its own extra and is imported only when asked for:
`decaylab.integrations.lightning`, `.transformers`, `.trackers`.
"""
