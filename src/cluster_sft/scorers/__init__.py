"""Steps of stage score, one file each: what scored strategies choose by.

The step of a strategy's own name writes scores.parquet, where a higher score is better; steps with
a hyphen more (`s2l-proxy`) are what it builds on.
"""
