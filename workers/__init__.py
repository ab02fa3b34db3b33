"""Scheduler, engines, sampler and the engine worker's process."""
