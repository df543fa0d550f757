"""autotuner: tune LLM servers unattended, keep the best-known one serving, write down why."""

__version__ = "0.1.0"
