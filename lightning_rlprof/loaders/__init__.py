"""Traces on disk turned into `lightning_rlprof.tables.spans.Spans`; one file per format."""
