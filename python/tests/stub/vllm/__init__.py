"""A part of vLLM: its interface for memory that sleeps."""
