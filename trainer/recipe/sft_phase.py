"""The phase `sft`: the first training, on conversations."""

from __future__ import annotations

from trainer.data.sources import read_conversations
from trainer.recipe.phases import Phase, RecipeRun, TrainResult
from trainer.recipe.rollout_session import load_chat_format
from trainer.recipe.training_inputs import join_ranks, training_context
from trainer.training.context import checkpoint_step, leave_ranks
from trainer.training.sft import train_sft


def sft(run: RecipeRun, phase: Phase) -> None:
    """Train the first model on conversations."""
    config, is_first_rank = run.config, join_ranks(run.config)
    conversations = [
        messages for source in config.sft.data for messages in read_conversations(source, seed=config.seed)
    ]
    steps = round(config.sft.epochs * len(conversations) / config.sft.batch_size)
    with training_context(run, phase, steps) as (context, _):
        chat_format = load_chat_format(config, context.model)
        trained = train_sft(config.sft, context, conversations=conversations, chat_format=chat_format)
    if is_first_rank:
        step = context.first_step + checkpoint_step(trained.checkpoint)
        run.write_result(phase, TrainResult(run.relative(trained.model), step))
    leave_ranks()
