"""Measurement of solve rates: samples problems with a model and writes the rates to Parquet."""
