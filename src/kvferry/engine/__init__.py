"""The embedded engine: a small, complete serving engine around any Hugging Face causal LM."""

from kvferry.engine.config import EngineConfig
from kvferry.engine.generation import Completion, SamplingParams, TokenEvent, TokenLogprobs
from kvferry.engine.llm import LLM

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams", "TokenEvent", "TokenLogprobs"]
