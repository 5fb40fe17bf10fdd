"""Runs and collects episodes on a scripted pool with scripted tools."""

from __future__ import annotations

import random

from tests.trainer.fakes import END, ScriptedTools, answer_text, call_text, qwen_tokenizer
from trainer.config import SamplingConfig
from trainer.environments.connection import SandboxConnection
from trainer.environments.registry import open_environment
from trainer.environments.services import Services
from trainer.episodes.episode import Episode, Problem
from trainer.rollout.collector import EpisodeCollector
from trainer.rollout.turn_loop import TurnLoop

PROBLEM = Problem("p0", "What is 12 + 30?", "42", "test")
LIMITS = SamplingConfig(max_response_tokens=2000, max_turns=5, temperature=0.7, top_p=0.9)
SEED = 7
CALL_THEN_ANSWER = (call_text("1") + END, answer_text("42") + END)
"""The turns of an episode that calls a tool once and then answers correctly."""


def turns(*texts):
    """Return a script that generates the given texts one after the other."""
    remaining_texts = iter(texts)
    return lambda context, sampling: next(remaining_texts)


def token_ids(text):
    return qwen_tokenizer().encode(text, add_special_tokens=False)


def text_by_seed(context, sampling):
    """Generate a text that depends on the seed alone, sometimes with a tool call."""
    rng = random.Random(sampling.seed)
    if rng.random() < 0.6:
        return call_text(str(rng.randrange(100))) + END
    return answer_text(str(rng.choice([42, 41]))) + END


async def run_episode(chat_format, pool, tools=None, *, limits=LIMITS, sample=0, **options):
    """Run one episode on a scripted pool, which also acts as the episode's handle. The episode is not scored."""
    episode = Episode(PROBLEM, sample, tuple(chat_format.encode_prompt(PROBLEM.text)))
    turns = TurnLoop(chat_format, tools or ScriptedTools(), limits, SEED, pool.busy_timer, **options)
    await turns.run(episode, pool)
    return episode


def make_collector(pool, chat_format, tools):
    """Return a collector whose problems have the environment `python`, with scripted tools in place of the sandbox."""
    services = Services(SandboxConnection((), python_tool=tools, answer_checker=tools, program_judge=tools))
    return EpisodeCollector(pool, lambda _: chat_format, lambda problem: open_environment(problem, services))


def collect(pool, chat_format, tools, problems, samples_per_problem, limits=LIMITS, seed=SEED):
    return make_collector(pool, chat_format, tools).collect(problems, samples_per_problem, limits=limits, seed=seed)


def assert_loss_mask_marks_the_turns(episode):
    sampled_positions = [position for turn in episode.turns for position in range(turn.start, turn.end)]
    assert sampled_positions == [position for position, bit in enumerate(episode.loss_mask) if bit]
