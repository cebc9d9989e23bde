"""Engines that are programs of other projects: vLLM and SGLang."""
