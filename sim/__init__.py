"""lanesim: trace-driven simulation of LLM serving on GPUs."""
