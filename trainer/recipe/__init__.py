"""The whole recipe: its phases, the work of each, evaluation, and what a run needs before it starts."""
