"""Tests of `bench.training_peak`: what it counts, and that a real training step has the peak that it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft", reason="needs peft")

from trl import GRPOTrainer  # noqa: E402

from bench.training_peak import BLOCK_BYTES, StorageCount, counted_peak  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, model_folder  # noqa: E402
from tests.trainer.training.stage_run import StageRun  # noqa: E402
from trainer.config import ModelShape  # noqa: E402
from trainer.recipe.resource_plan import shape_of  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402

pytestmark = [QUIET_LIBRARIES, pytest.mark.filterwarnings("ignore::UserWarning:peft")]


def test_a_storage_counts_from_the_operation_that_returns_it_until_it_is_freed() -> None:
    with StorageCount() as count:
        first = torch.zeros(BLOCK_BYTES)  # float32
        view, second = first[1:], torch.zeros(1)
        assert count.restart() == 5 * BLOCK_BYTES, "a view has the storage of its base; a block is the least size"
        del first, second
        assert (count.restart(), count.restart()) == (5 * BLOCK_BYTES, 4 * BLOCK_BYTES)
        view.untyped_storage().resize_(0)
        assert (count.restart(), count.restart()) == (4 * BLOCK_BYTES, 0)


def test_the_ranks_of_a_sharded_step_end_with_the_count() -> None:
    shape = ModelShape(1, 16, 32, 2, 1, 64, tie_word_embeddings=True)
    one, two, two_again = [
        counted_peak(shape, 8, "float32", gradient_checkpointing=False, ranks=ranks)["update"] for ranks in (1, 2, 2)
    ]
    assert one > two == two_again
    assert not torch.distributed.is_initialized(), "another test in this process could not make its own ranks"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_real_training_step_has_the_counted_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int
) -> None:
    """The step has several passes, whose padded rows have at most `micro_batch_tokens` positions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model = model_folder(tmp_path / "model")
    options: dict[str, Any] = {"r": lora_rank, "target_modules": "all-linear"} if lora_rank else {}
    tokens: set[int] = set()
    score = GRPOTrainer._get_per_token_logps_and_entropies

    def record_tokens(self: Any, model: Any, ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        tokens.add(ids.numel())
        return score(self, model, ids, *args, **options)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", record_tokens)
    with LoopThread() as loop_thread:
        sampler, stage_run = Sampler(model), StageRun(tmp_path, model, loop_thread, micro_batch_tokens=40)
        with StorageCount() as count:
            stage_run.run(sampler, peft=options)
            real = count.restart()
    shape = shape_of(json.loads((model / "config.json").read_text()))
    counted = counted_peak(
        shape, max(tokens), "float32", gradient_checkpointing=False, lora_rank=lora_rank, has_gpu_kernels=False
    )
    assert max(counted.values()) == pytest.approx(real, rel=0.1)
