"""decaylab: what weight decay does to a network, and a K-FAC that is right."""

__version__ = "0.1.0"
