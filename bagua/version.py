"""The version of the project, for Python, packaging and the extension alike."""

__version__ = "0.1.0"
