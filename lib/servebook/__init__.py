"""servebook: predict how fast an LLM serves, write it down, measure it, explain every miss."""

__version__ = "0.1.0"
