"""CluSTER: cluster-aware balanced sampling for data-parallel instruction tuning."""

__version__ = "0.1.0"
