"""Simulates one training step under a plan: live bytes and extra seconds."""
