"""Tests of the engine, on scripted executors and a byte tokenizer; no torch."""
