"""Load, comparisons and the demonstration. Runs from the checkout (`python -m bench.NAME`) and is not installed."""
