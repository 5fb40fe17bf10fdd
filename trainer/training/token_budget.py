"""TRL's `GRPOTrainer` with passes that are bounded by tokens instead of rows, and without wasted positions.

TRL pads all rows of a step to the longest prompt and the longest completion, computes every row, and computes all
log-probabilities twice. This trainer computes each row of a step at most once, in passes. A pass is one forward and
backward computation of some rows:

- A row without a token in the loss is in no pass.
- A pass has rows of similar length, padded to the longest of them. With the padding it has at most `micro_batch_tokens`
  positions.
- The importance ratio is computed in the pass that computes the loss. A step has one optimizer step, so the pass has
  the weights from which the step starts. The ratio corrects two differences: the engines' rounding, and samples from
  older weights.

Invariants:
- The loss and its gradient are those of TRL on the same rows, to rounding. The denominator is the number of tokens in
  the loss of the whole step, on all ranks.
- All ranks run an equal number of passes, since a pass is a collective operation. A rank that needs fewer passes adds
  passes of one row without loss.

It overrides TRL's private method `_compute_loss`, and calls `_get_per_token_logps_and_entropies`;
tests/trainer/training/test_token_budget.py compares the result with TRL's own. It has no router loss for mixtures of
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from trl import GRPOTrainer

IMPORTANCE_RATIO_CAP = 2.0
"""Largest importance ratio of a token. TRL's default masks whole sequences instead, which zeroes most episodes of 8K to
12K tokens."""

LOSS_MEANS = ("logprob_diff_mean", "importance_ratio_mean", "computed_per_loss_token")
"""Metrics of a step: sums over its passes, divided by the number of tokens in the loss."""
RowEntropies = tuple[list[int], list[int], list[float | None]]
"""The prompt ids, the completion ids and the entropies of one row. There is one entropy per completion id, in nats. It
is None for a token that is not in the loss."""
OnEntropies = Callable[[list[RowEntropies]], None]
Batch = dict[str, Any]
"""TRL's tensors of some rows. Their first dimension is the row. Prompts are padded on the left, completions on the
right.

Suffixes of names give the dimensions of a tensor: B rows, L positions of a joined row (prompt and completion without
padding between them), T positions of a completion."""


class TokenBudgetTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` for settings with one gradient accumulation step and without TRL's importance correction."""

    def __init__(
        self, *args: Any, micro_batch_tokens: int, on_entropies: OnEntropies | None = None, **options: Any
    ) -> None:
        """`on_entropies` is called on each rank, once per step, with the rows that this rank has computed."""
        super().__init__(*args, **options)
        self.micro_batch_tokens = micro_batch_tokens
        self._on_entropies = on_entropies
        self.tokens_in_loss = 0
        """The number of tokens in the loss of the last step, on all ranks."""
        self.loss_means: dict[str, float] = {}
        """The metrics `LOSS_MEANS` of the last step, on all ranks."""
        self._entropies: list[RowEntropies] = []

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """Return the loss of a step. This method adds the gradients of all passes but the last to the model. So the
        caller's backward computation only has to add the gradients of the last pass."""
        self.tokens_in_loss = int(inputs["num_items_in_batch"])
        passes = self._split_into_passes(inputs)
        earlier_loss = torch.zeros((), device=self.accelerator.device)
        sums = torch.zeros(1 + len(LOSS_MEANS), device=self.accelerator.device)
        # With sharding, gradients are reduced after every pass, so that no rank keeps those of the whole model.
        is_sharded = bool(self.args.fsdp)
        for number, batch in enumerate(passes, 1):
            is_last = number == len(passes)
            with nullcontext() if is_last or is_sharded else self.accelerator.no_sync(model):
                loss = self._pass_loss(model, batch, sums)
                if not is_last:
                    self.accelerator.backward(loss)
                    earlier_loss += loss.detach()
        tokens, *totals = self.accelerator.reduce(sums).tolist()
        self.loss_means = {name: total / max(1, tokens) for name, total in zip(LOSS_MEANS, totals, strict=True)}
        if self._on_entropies:
            rows, self._entropies = self._entropies, []
            self._on_entropies(rows)
        return loss + earlier_loss

    def _pass_loss(self, model: Any, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """Return this pass's part of the loss of the step (rStar2-Agent, arXiv 2508.20722, equation 3, without its
        clip: the ratio is 1 and only its gradient counts).

        Adds to `sums` the number of tokens in the loss, the sums of their log-probability differences and of their
        importance ratios, and the number of positions of the pass.
        """
        ids_BL, mask_BL = _joined(batch)
        logps_BT, entropies_BT = self._score(model, ids_BL, mask_BL, batch)
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        difference_BT = torch.nan_to_num((logps_BT.detach() - batch["sampling_per_token_logps"]) * mask_BT)
        importance_BT = difference_BT.exp().clamp(max=IMPORTANCE_RATIO_CAP)
        ratio_BT = (logps_BT - logps_BT.detach()).exp()
        loss_BT = -ratio_BT * batch["advantages"][:, None] * importance_BT
        counted = (difference_BT.abs(), importance_BT)
        if self._on_entropies:
            self._entropies += _row_entropies(batch, entropies_BT, mask_BT)
        sums += torch.stack([mask_BT.sum(), *((x * mask_BT).sum() for x in counted), sums.new_tensor(mask_BL.numel())])
        # Gradients are averaged over ranks, so each rank divides by its equal share of the tokens.
        return (loss_BT * mask_BT).sum() / (batch["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes)

    def _score(
        self, model: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities and entropies of the completions."""
        prompt_lengths_B = batch["prompt_mask"].sum(1)
        num_scored = ids_BL.size(1) - int(prompt_lengths_B.min())
        logps, entropies, *_ = super()._get_per_token_logps_and_entropies(
            model, ids_BL, mask_BL, num_scored, compute_entropy=True
        )
        # Position t of a completion is position (prompt length + t) of the row. TRL scores the last `num_scored`
        # positions of a row.
        positions_T = torch.arange(batch["completion_mask"].size(1), device=ids_BL.device)
        index_BT = (prompt_lengths_B[:, None] + positions_T - (ids_BL.size(1) - num_scored)).clamp(max=num_scored - 1)
        return logps.gather(1, index_BT), entropies.gather(1, index_BT)

    def _split_into_passes(self, inputs: Batch) -> list[Batch]:
        """Return the rows in the loss, as batches of at most `micro_batch_tokens` positions."""
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        lengths = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
        in_loss = [row for row, tokens in enumerate(mask_BT.sum(1).tolist()) if tokens]
        groups = list(pack_rows(lengths, in_loss, self.micro_batch_tokens))
        num_groups = torch.tensor([len(groups)], device=self.accelerator.device)
        num_passes = max(1, self.accelerator.gather(num_groups).max().item())
        passes = [_take(inputs, rows) for rows in groups]
        while len(passes) < num_passes:  # another rank has more passes: add the shortest row, without loss
            batch = _take(inputs, [min(range(len(lengths)), key=lengths.__getitem__)])
            batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
            batch["completion_mask"][:, 0] = 1
            batch["tool_mask"] = torch.zeros_like(batch["completion_mask"])
            passes.append(batch)
        return passes


def pack_rows(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield `rows` in groups of similar length, the longest rows first. A group has at most `max_tokens` positions if
    each of its rows is padded to the longest one. A row of more than `max_tokens` is a group of its own."""
    group: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if group and lengths[group[0]] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _take(inputs: Batch, rows: Sequence[int]) -> Batch:
    """Return some rows, without the columns that are padding in all of them."""
    batch = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
    num_prompt = int(batch["prompt_mask"].sum(1).max())
    num_completion = max(1, int(batch["completion_mask"].sum(1).max()))
    for name, value in batch.items():
        if name.startswith("prompt"):
            batch[name] = value[:, value.size(1) - num_prompt :]
        elif value.dim() == 2:
            batch[name] = value[:, :num_completion]
    return batch


def _row_entropies(batch: Batch, entropies_BT: torch.Tensor, mask_BT: torch.Tensor) -> Iterator[RowEntropies]:
    for row, in_loss in enumerate(mask_BT.bool().tolist()):
        if not any(in_loss):  # a pass without loss
            continue
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        length = int(batch["completion_mask"][row].sum())
        values = entropies_BT[row, :length].tolist()
        entropies = [round(value, 4) if used else None for value, used in zip(values, in_loss[:length], strict=True)]
        yield prompt_ids, batch["completion_ids"][row, :length].tolist(), entropies


def _joined(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and the attention mask of joined rows: the completion follows the prompt without padding
    between them. The rows are padded on the right."""
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask_BL = torch.zeros_like(mask)
    mask_BL[torch.arange(mask.size(1), device=mask.device) < mask.sum(1, keepdim=True)] = True
    ids_BL = torch.zeros_like(ids).masked_scatter(mask_BL, ids[mask])
    length = int(mask.sum(1).max())
    return ids_BL[:, :length], mask_BL[:, :length].to(batch["prompt_mask"].dtype)
