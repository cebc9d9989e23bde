"""Trackers: TensorBoard, W&B, MLflow, trackio and others, which get a run's metrics by a process of their own.

The process reads the run's store. A tracker that hangs, raises or dies costs the job no step and no row.
"""
