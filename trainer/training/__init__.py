"""SFT and GRPO-RoC on TRL: a model folder and its data in, a model folder and checkpoints out."""
