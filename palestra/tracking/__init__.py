"""Trackers: TensorBoard, W&B, MLflow, trackio and others, each in its own process.

The process reads the run's store. A tracker that hangs, raises or dies affects neither steps nor rows of the job.
"""
