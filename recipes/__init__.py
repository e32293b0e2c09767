"""Stagewright."""
