"""The one place that holds the version; the build reads it without importing torch."""

__version__ = "0.1.0"
