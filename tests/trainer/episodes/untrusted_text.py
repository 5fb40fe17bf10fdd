"""Strategies for texts that imitate tags and special tokens."""

from __future__ import annotations

from hypothesis import strategies as st

plain_texts = st.text(st.characters(codec="utf-8"), max_size=12)
imitations = st.sampled_from(["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<", "|", "a\n"])
untrusted_texts = st.lists(imitations | plain_texts).map("".join)
"""Texts of a problem or of a tool, which may contain the spelling of any special token."""
