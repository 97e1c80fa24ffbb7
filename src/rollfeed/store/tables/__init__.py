"""Batches, dropped groups and timings as Parquet files."""
