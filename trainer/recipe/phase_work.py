"""The work of each phase of a recipe. It connects data, models, engines and tools. Each phase has its own process.

Invariants:
- The work of a phase depends on the configuration, its seed, and the results of earlier phases only.
- The first rank writes the phase's result file last.
- Only the first rank uses engines, tools and the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.recipe.collect_phase import collect
from trainer.recipe.filter_phase import filter_problems
from trainer.recipe.phases import Phase, RecipeRun
from trainer.recipe.prepare_phase import prepare
from trainer.recipe.rl_phase import grpo
from trainer.recipe.sft_phase import sft

PHASE_FUNCTIONS: Mapping[str, Callable[[RecipeRun, Phase], None]] = {
    "prepare": prepare,
    "sft": sft,
    "filter": filter_problems,
    "collect": collect,
    "grpo": grpo,
}
"""The function of each phase except `eval`, whose function also returns the reports (`trainer.recipe.eval_phase`)."""
