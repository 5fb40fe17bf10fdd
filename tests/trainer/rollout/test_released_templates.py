"""Tests of episodes in the chat templates of released models. Tool calls are written as each template writes them."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.tool import TOOL_SCHEMA
from tests.trainer.fakes import ScriptedPool, ScriptedTools, answer_text, qwen_tokenizer, released_template
from tests.trainer.rollout.scripted_rollout import PROBLEM, run_episode, turns
from trainer.episodes.chat_format import ANSWER_INSTRUCTIONS, tokenizer_format
from trainer.episodes.episode import StopReason
from trainer.episodes.template_checks import REASONING


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "qwen3_training"])
async def test_an_episode_has_the_tokens_of_the_conversation_that_the_template_renders(name: str) -> None:
    tokenizer = qwen_tokenizer(released_template(name))

    def render(messages: list[dict[str, Any]], opens_turn: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=[TOOL_SCHEMA], add_generation_prompt=opens_turn, tokenize=False
            )
        )

    arguments = {"code": "print(12 + 30)"}
    call = {"type": "function", "function": {"name": "python", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ANSWER_INSTRUCTIONS + PROBLEM.text},
        {"role": "assistant", "content": REASONING, "tool_calls": [call]},
        {"role": "tool", "content": "got print(12 + 30)"},
        {"role": "assistant", "content": f"{REASONING}\n\n{answer_text('42')}"},
    ]
    texts = [render(messages[: n + 1], False).removeprefix(render(messages[:n], True)).rstrip() for n in (1, 3)]
    tools = ScriptedTools(lambda code: f"got {code}")
    chat_format = tokenizer_format(tokenizer, tools=[TOOL_SCHEMA])
    episode = await run_episode(chat_format, ScriptedPool(turns(*texts)), tools)

    assert (episode.stop_reason, episode.answer) == (StopReason.FINISHED, "42")
    assert [made.arguments for turn in episode.turns for made in turn.tool_calls] == [arguments]
    ids = [*episode.prompt_ids, *episode.response_ids]
    assert ids == tokenizer.encode(render(messages, False).removesuffix("\n"), add_special_tokens=False)
    sampled = [token for token, bit in zip(episode.response_ids, episode.loss_mask, strict=True) if bit]
    assert chat_format.decode(sampled) == "".join(texts)
